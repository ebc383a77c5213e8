"""The queueing model of the engines, and dynamic sampling on it."""

import random
from dataclasses import replace

import pytest

from megatron_dapo.config.rollout import SamplerConfig
from megatron_dapo.planner.generation import Fleet, generate
from megatron_dapo.planner.server_model import DecodeModel, FleetModel, Sequence, ServerModel
from megatron_dapo.planner.workload import Lengths, Workload

# One second per decoding step, one per running sequence, and half a second per prompt token.
SECOND = DecodeModel(0.0, 0.0, 0.0, 0.0, 0.0, fixed=1.0, per_sequence=1.0, per_prompt_token=0.5)
# 16 slots, a millisecond per step and a tenth of one per sequence.
ENGINE = DecodeModel(0.0, 0.0, 0.0, 0.0, 0.0, fixed=1e-3, per_sequence=1e-4, per_prompt_token=1e-6)
WORK = Workload(64, 8, 4, 100, 1000, 200, 4000, kept=0.5)


def run_all(server):
    """(time, sequence) of every end."""
    found = []
    while (event := server.next_event()) is not None:
        found += [(event, sequence) for sequence in server.run_until(event)]
    return found


def test_sequences_share_a_server():
    """Two sequences: 2 tokens of both take 3 s each, then one token of the other takes 2 s; 4 prompt tokens 2 s."""
    server = ServerModel(SECOND, kv_tokens=1000, max_running=8)
    short, long = Sequence(2, 10, 4), Sequence(3, 10, 0)
    server.add(short)
    server.add(long)
    assert [(time, sequence) for time, sequence in run_all(server)] == [(8.0, short), (10.0, long)]
    assert server.generated == 5
    assert (server.context, server.running) == (0, 0)


def test_time_between_events_is_not_lost():
    """Stopping at any moment does not change when a sequence ends."""
    server, pieces = (ServerModel(SECOND, 1000, 8) for _ in range(2))
    for one in (server, pieces):
        one.add(Sequence(7, 10, 3))
    for tenth in range(150):
        pieces.run_until(tenth / 10)
    (expected,) = [time for time, _ in run_all(server)]
    assert expected == 15.5 and pieces.next_event() == pytest.approx(expected)


def test_an_aborted_sequence_keeps_its_tokens():
    server = ServerModel(SECOND, 1000, 8)
    one, other = Sequence(10, 5, 0), Sequence(10, 5, 0)
    server.add(one)
    server.add(other)
    server.run_until(9.5)  # three steps of 3 s and a part
    server.remove(one)
    assert (one.generated, one.remaining, one.context) == (3, 7, 8)
    assert server.running == 1 and server.context == 8


def test_the_next_event_follows_every_change():
    """A step takes 2 s of one sequence, 3 s of two."""
    server = ServerModel(SECOND, 1000, 8)
    long, short = Sequence(10, 5, 0), Sequence(2, 5, 0)
    server.add(long)
    assert server.next_event() == 20.0
    server.add(short)
    assert server.next_event() == 6.0
    server.run_until(3.0)  # one step
    assert server.next_event() == 6.0
    server.remove(short)
    assert server.next_event() == 3.0 + 9 * 2


def test_a_full_kv_cache_retracts_the_newest_and_computes_it_again():
    server = ServerModel(SECOND, kv_tokens=100, max_running=8)
    old, new = Sequence(40, 40, 0), Sequence(40, 40, 0)
    server.add(old)
    server.add(new)
    ended = run_all(server)
    assert [sequence for _, sequence in ended] == [old, new]
    assert new.generated == 40
    # 10 steps together; the old one alone for 30; then the new one: 50 tokens computed again, 30 steps.
    assert new.prefill == 50
    assert ended[1][0] == pytest.approx(10 * 3 + 30 * 2 + 25 + 30 * 2)


def test_requests_wait_for_a_slot_of_the_least_loaded_server():
    fleet = FleetModel(ServerModel(SECOND, 1000, max_running=1) for _ in range(2))
    sequences = [Sequence(n, 1, 0) for n in (4, 1, 1)]
    fleet.submit(sequences)
    ends = fleet.run_until(100.0)
    assert [(time, sequences.index(s)) for time, s in ends] == [(2.0, 1), (4.0, 2), (8.0, 0)]


def test_of_idle_servers_the_fastest_takes_a_request():
    slow, fast = (ServerModel(replace(SECOND, fixed=fixed), 1000, max_running=4) for fixed in (9.0, 1.0))
    FleetModel([slow, fast]).submit([Sequence(4, 1, 0)])
    assert (slow.running, fast.running) == (0, 1)


def test_an_aborted_request_makes_room():
    fleet = FleetModel([ServerModel(SECOND, 1000, max_running=1)])
    first, second, third = (Sequence(n, 1, 0) for n in (4, 1, 5))
    fleet.submit([first, second])
    fleet.abort([first])
    assert fleet.run_until(10.0) == [(2.0, second)]
    fleet.submit([first])
    fleet.abort_all()
    fleet.submit([third])
    assert fleet.run_until(100.0) == [(20.0, third)]


@pytest.mark.parametrize("mean", [100, 1000, 3600])
def test_lengths_have_the_mean_that_was_asked_for(mean):
    lengths, source = Lengths(mean, 4000), random.Random(0)
    drawn = [n for _ in range(3000) for n in lengths.group(8, source)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
    assert max(drawn) <= 4000
    held = sum(n * n for n in drawn) / (2 * sum(drawn))
    assert lengths.held == pytest.approx(held, rel=0.05)


def test_equal_lengths_have_no_tail():
    """512 samples of 1 000 tokens on 4 servers of 16 slots: 8 rounds of 1 000 steps of 2.6 ms, and the prompts."""
    work = replace(WORK, kept=1.0, sigma=0.0)
    found = generate(work, SamplerConfig(), Fleet(4, ENGINE, 10**6, 16))
    prompts = 16 * 100 * 1e-6
    assert found.seconds == pytest.approx(8 * 1000 * 2.6e-3 + prompts, rel=1e-3)
    assert found.tokens == 512_000 and found.wasted == 0
    assert found.utilisation == pytest.approx(1.0, rel=1e-3)


FINISH = {"oversampling": 1, "unfinished": "finish", "order": "prompt"}
WAVES = {**FINISH, "oversampling": 3, "surplus": "drop"}
CARRY = {"oversampling": 3, "unfinished": "continue", "order": "completion"}


def seconds(servers=4, work=WORK, **options):
    return generate(work, SamplerConfig(**options), Fleet(servers, ENGINE, 10**6, 16))


def test_carry_over_removes_the_tail_and_dropping_adds_waste():
    finish, drop, carry = (seconds(servers=16, **options) for options in (FINISH, WAVES, CARRY))
    assert carry.seconds < 0.6 * finish.seconds and carry.utilisation > finish.utilisation
    assert drop.wasted / drop.tokens > 0.6 > finish.wasted / finish.tokens > 0.4
    assert carry.seconds < drop.seconds


def test_more_servers_help_less_with_a_tail():
    few, many = (seconds(servers=n, **FINISH).seconds for n in (4, 32))
    carry_few, carry_many = (seconds(servers=n, **CARRY).seconds for n in (4, 32))
    assert few / many < 2.5 < carry_few / carry_many


def test_a_part_of_the_fleet_stands_for_the_whole():
    """A large fleet is simulated in parts; the whole one, simulated exactly, needs about the same time."""
    large = replace(WORK, prompts=256)
    part = generate(large, SamplerConfig(**FINISH), Fleet(8, ENGINE, 10**6, 16))
    whole = generate(replace(WORK, prompts=96), SamplerConfig(**FINISH), Fleet(3, ENGINE, 10**6, 16))
    assert part.tokens == pytest.approx(whole.tokens * 256 / 96, rel=0.1)
    assert part.seconds == pytest.approx(whole.seconds, rel=0.15)
