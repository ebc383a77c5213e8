"""What happens to a fleet in `simulate`: derived times, conservation, and the flags."""

import json
import random
from dataclasses import replace

import pytest
from test_command import COMMAND, workplace  # noqa: F401
from test_run import CARRY, ENGINE, FINISH, FLEET, WORK, setting

from megatron_dapo.cli import main
from megatron_dapo.errors import UserError
from megatron_dapo.planner.generation import ServerKind
from megatron_dapo.planner.simulation.incidents import Incidents, Tools, slower
from megatron_dapo.planner.simulation.run import simulate
from megatron_dapo.planner.workload import Lengths

EQUAL = replace(WORK, kept=1.0, sigma=0.0, mean_response=1024)  # 256 samples on 4 × 16 slots
ROUND = 1024 * 2.6e-3  # seconds


def run(incidents, work=WORK, fleet=FLEET, steps=4, **options):
    """With `options` of the sampler; `training` of a step takes 10 s, its update one."""
    fleet = incidents.apply(fleet, lambda name: ServerKind(1, slower(ENGINE, 2.0), 10**6))
    return simulate(replace(setting(work, fleet, **options), incidents=incidents), steps=steps)


def test_a_slow_server_costs_its_share():
    """Three servers and one at 0.3 × have 3.3 / 4 of the speed; a balancer that did not know would need 1 / 0.3."""
    plain, slow = run(Incidents(), **CARRY), run(Incidents(slow=((1, 0.3),)), **CARRY)
    assert slow.limit == pytest.approx(plain.limit * 4 / 3.3, rel=0.1)
    assert slow.over_limit < 1.15


def test_mixed_gpus_are_as_fast_as_they_are_together():
    mixed = run(Incidents(mixed=((2, "faster"),)), **CARRY)
    assert mixed.setting.fleet.full_speed(WORK) == pytest.approx(FLEET.full_speed(WORK) * 6 / 4)
    assert mixed.over_limit < 1.15


def test_dead_servers_lose_tokens_and_not_samples():
    """Two of four die half way into the first round, which 32 samples end: 224 remain for 32 slots, seven rounds. The
    second step has eight rounds on the two servers."""
    found = run(Incidents(changes=((ROUND / 2, -2),)), EQUAL, steps=2, **FINISH)
    assert [step.collecting for step in found.steps] == pytest.approx([8 * ROUND] * 2, rel=0.02)
    assert all(step.trained_tokens == 256 * 1024 for step in found.steps)
    assert [points[-1][1] for points in found.trace] == [0] * 4


def test_joiners_take_work_at_once():
    """Four more after the first round: 3 × 64 samples on eight servers take two rounds, a whole batch as well."""
    found = run(Incidents(changes=((ROUND, 4),)), EQUAL, steps=2, **FINISH)
    assert found.steps[0].collecting == pytest.approx(3 * ROUND, rel=0.05)
    assert found.steps[1].collecting == pytest.approx(2 * ROUND, rel=0.02)
    assert len(found.trace) == 8


def test_the_last_server_does_not_die():
    """Of two servers, two may die when another one joins at the same time."""
    deaths = Incidents.of([], [], ["3@1", "3@2"], ["3@2"], 0.0, 1, None)
    found = run(deaths, replace(EQUAL, prompts=2), steps=1, **FINISH)
    assert found.steps[0].trained_tokens == 2 * 8 * 1024
    with pytest.raises(UserError, match="of 4 servers, none is left after 2 s"):
        run(Incidents(changes=((1.0, -3), (2.0, -1))))


def test_tools_add_their_time_and_use_no_engine():
    """One group, alone: two turns of 512 tokens at 8 running, and one call between them."""
    work = replace(EQUAL, prompts=1)
    plain, tools = (run(Incidents(tools=t), work, steps=3, **FINISH) for t in (Tools(), Tools(seconds=50.0)))
    assert tools.mean("trained_tokens") == plain.mean("trained_tokens") == 8 * 1024
    # The slowest of eight exponential calls takes 50 × (1 + 1/2 + … + 1/8) = 136 s on average.
    assert 60 < tools.mean("collecting") - plain.mean("collecting") < 300
    assert run(Incidents(tools=Tools(5.0, 3)), **CARRY).mean("trained_tokens") > 0


def test_the_yield_drifts():
    found = run(Incidents(kept_end=0.2), replace(WORK, kept=0.9), steps=5, **FINISH)
    assert found.steps[0].kept > 0.75 > 0.45 > found.steps[-1].kept


@pytest.mark.parametrize("index", [1.2, 1.5, 3.0])
def test_pareto_lengths_have_their_mean_and_a_heavier_tail(index):
    lengths, chance = Lengths(1000, 20_000, pareto=index), random.Random(0)
    drawn = sorted(length for _ in range(4000) for length in lengths.group(8, chance))
    assert sum(drawn) / len(drawn) == pytest.approx(1000, rel=0.06)
    assert sum(n * n for n in drawn) / sum(drawn) / 2 == pytest.approx(lengths.held, rel=0.15)
    assert Lengths(1000, 20_000, pareto=1.2).held > lengths.held or index == 1.2


def test_the_command_has_the_flags(capsys):
    flags = ["--slow", "1:0.3", "--dies", "1@5", "--joins", "2@20", "--tool-seconds", "2", "--kept-end", "0.3"]
    assert main([*COMMAND, "--pareto", "1.5", *flags, "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)[0]
    assert main([*COMMAND, "--json"]) == 0
    assert slow["collecting_seconds"] > json.loads(capsys.readouterr().out)[0]["collecting_seconds"]
    for words, said in (
        (["--slow", "1"], "--slow 1: expected SERVERS:VALUE"),
        (["--slow", "9:0.5"], "name more servers than the fleet has: 2"),
        (["--slow", "1:inf"], "--slow 1:inf: expected SERVERS:VALUE"),
        (["--dies", "1@soon"], "--dies 1@soon: expected SERVERS@VALUE"),
        (["--dies", "1@-3"], "--dies 1@-3: expected SERVERS@VALUE"),
        (["--joins", "1@nan"], "--joins 1@nan: expected SERVERS@VALUE"),
        (["--dies", "2@9"], "of 2 servers, none is left after 9 s"),
        (["--mixed", "1:h1000"], "unknown GPU 'h1000'"),
        (["--kept-end", "2"], "--kept-end is 2"),
        (["--pareto", "0.5"], "--pareto is 0.5"),
    ):
        assert main([*COMMAND, "--set", "rollout.max_response_tokens=1024", *words]) == 2, words
        assert said in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        main([*COMMAND, "--tool-seconds", "inf"])
    assert "'inf' is not a number of at least 0" in capsys.readouterr().err


def test_impossible_speeds_are_refused():
    with pytest.raises(UserError, match="above 0"):
        Incidents(slow=((1, 0.0),))
