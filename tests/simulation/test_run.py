"""The sampler on a virtual clock: times that can be derived by hand, staleness, waste, and the planner's own model."""

from dataclasses import replace

import pytest
from published_models import published_runs

from megatron_dapo.config.rollout import RolloutConfig, SamplerConfig
from megatron_dapo.planner.generation import Fleet, generate
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.server_model import DecodeModel, decode_model
from megatron_dapo.planner.simulation.run import Setting, simulate
from megatron_dapo.planner.workload import Workload

# A millisecond per step and a tenth of one per sequence: 16 sequences take 2.6 ms.
ENGINE = DecodeModel(0.0, 0.0, 0.0, 0.0, 0.0, fixed=1e-3, per_sequence=1e-4, per_prompt_token=1e-6)
FLEET = Fleet(4, ENGINE, kv_tokens=10**6, max_running=16)
WORK = Workload(32, 8, 4, 100, 1000, 200, 4000, kept=0.5)
FINISH = {"oversampling": 1, "unfinished": "finish", "order": "prompt"}
WAVES = {"oversampling": 3, "unfinished": "finish", "order": "prompt", "surplus": "drop"}
CARRY = {"oversampling": 3, "unfinished": "continue", "order": "completion"}


def setting(work=WORK, fleet=FLEET, training=10.0, sync=1.0, staleness=0, **sampler):
    rollout = RolloutConfig(samples_per_prompt=work.samples_per_prompt, sampler=SamplerConfig(**sampler))
    return Setting(rollout, work, fleet, training, sync, staleness)


def test_equal_lengths_without_a_filter_take_the_time_of_full_batches():
    """256 samples of 1 000 tokens on 4 × 16 slots: 4 rounds of 1 000 steps of 2.6 ms; then training and the update."""
    work = replace(WORK, kept=1.0, sigma=0.0, mean_response=1024)
    found = simulate(setting(work, **FINISH), steps=3)
    seconds = 4 * 1024 * 2.6e-3
    for step in found.steps:
        assert step.collecting == pytest.approx(seconds, rel=0.01)
        assert (step.tokens, step.trained_tokens, step.wasted_tokens) == (256 * 1024, 256 * 1024, 0)
    assert found.step_seconds == pytest.approx(seconds + 11.0, rel=0.01)
    assert found.over_limit == pytest.approx(1.0, rel=0.02)
    assert found.utilisation == pytest.approx(seconds / (seconds + 11.0), rel=0.02)


def test_the_same_seed_gives_the_same_run():
    first, again, other = (simulate(setting(**CARRY), steps=3, seed=seed) for seed in (1, 1, 2))
    assert first.steps == again.steps and first.trace == again.trace
    assert first.steps != other.steps


def test_tails_dropped_surplus_and_carry_over():
    """Many servers: waiting for the slowest sample costs most; carry-over removes it; waves waste tokens."""
    fleet = replace(FLEET, servers=16)
    finish, waves, carry = (simulate(setting(fleet=fleet, **options), steps=5) for options in (FINISH, WAVES, CARRY))
    assert carry.mean("collecting") < 0.6 * finish.mean("collecting")
    assert waves.waste > 0.6 > finish.waste > 0.35
    assert carry.mean("mean_staleness") > 0 == finish.mean("mean_staleness")
    assert finish.over_limit > 2 > carry.over_limit


@pytest.mark.parametrize("options", [FINISH, WAVES, CARRY, {}], ids=["finish", "waves", "carry", "default"])
def test_the_planner_predicts_what_the_sampler_does(options):
    """`plan` has a copy of the sampler's logic without requests and tasks: the two agree."""
    work, fleet = replace(WORK, prompts=64), replace(FLEET, servers=8)
    found = simulate(setting(work, fleet, **options), steps=6)
    predicted = generate(work, SamplerConfig(**options), fleet)
    assert found.mean("collecting") == pytest.approx(predicted.seconds, rel=0.15)


ADAPTIVE = {"oversampling": "adaptive", "unfinished": "continue", "order": "completion"}


def test_32b_with_adaptive_oversampling_is_close_to_engines_that_are_always_full():
    """A 32B model, TP 4 servers on H100, long tails, half of the groups kept: part of a fleet of 16 servers. The whole
    fleet, with Qwen2.5-32B and `--whole`, needs 1.06 × and 2.87 ×."""
    decode = decode_model(published_runs().published_shapes()["Qwen3-32B"], Cluster(find_gpu("h100"), 128, 8, 64), 4)
    work = Workload(96, 16, 16, 256, 4000, 2048, 20480, kept=0.5)
    fleet = Fleet(3, decode, kv_tokens=890_000, max_running=256)
    adaptive, one_by_one = (simulate(setting(work, fleet, **options), steps=4) for options in (ADAPTIVE, FINISH))
    assert adaptive.over_limit <= 1.15
    assert one_by_one.over_limit >= 2.2


def test_no_token_is_staler_than_allowed():
    found = simulate(setting(**CARRY, max_carryover_staleness=1), steps=6)
    assert max(step.max_staleness for step in found.steps) == 1
    none = simulate(setting(**FINISH), steps=4)
    assert max(step.max_staleness for step in none.steps) == 0


def test_overlap_hides_the_shorter_side():
    """With staleness 1 a step takes about as long as the longer of generation and training, and the update."""
    work = replace(WORK, kept=1.0, sigma=0.0, mean_response=1024)  # 10.65 s of generation
    turns = simulate(setting(work, training=8.0, **FINISH), steps=6)
    overlapped = simulate(setting(work, training=8.0, staleness=1, **FINISH), steps=6)
    assert turns.step_seconds == pytest.approx(10.65 + 8 + 1, rel=0.02)
    assert overlapped.step_seconds == pytest.approx(10.65 + 1, rel=0.1)
    assert max(step.max_staleness for step in overlapped.steps) == 1
    assert overlapped.utilisation > 1.4 * turns.utilisation


@pytest.mark.parametrize("critic", [5.0, 15.0])
def test_a_critic_is_trained_beside_the_next_batch(critic):
    """10.65 s of generation, or the critic's updates where they take longer; then training and the update."""
    work = replace(WORK, kept=1.0, sigma=0.0, mean_response=1024)
    found = simulate(replace(setting(work, training=8.0, **FINISH), critic_seconds=critic), steps=6)
    assert found.step_seconds == pytest.approx(max(10.65, critic) + 8 + 1, rel=0.02)
    assert max(step.max_staleness for step in found.steps) == 0


def test_a_weight_update_computes_running_sequences_again():
    """Prefill that takes as long as a decoding step shows up in the seconds."""
    slow = replace(FLEET, decode=replace(ENGINE, per_prompt_token=1e-4))
    cheap, dear = (simulate(setting(fleet=fleet, **CARRY), steps=5) for fleet in (FLEET, slow))
    assert dear.mean("collecting") > 1.02 * cheap.mean("collecting")


def test_the_trace_has_every_server_and_the_trainer():
    found = simulate(setting(**CARRY), steps=3)
    assert len(found.trace) == 4
    for points in found.trace:
        times = [time for time, _ in points]
        assert times == sorted(times) and max(running for _, running in points) == 16
    names = [phase.name for phase in found.phases]
    assert names.count("train") == names.count("sync") == 3
    assert found.phases[-1].end == pytest.approx(found.steps[-1].ended)


def test_waste_is_a_share_in_a_short_simulation():
    """Half of the groups are kept, so half of the decided tokens are wasted; the second and third step decide groups
    that the first one generated."""
    for steps in (2, 3):
        found = simulate(setting(fleet=replace(FLEET, servers=32), **CARRY), steps=steps)
        assert found.waste == pytest.approx(0.5, abs=0.15)
