"""Adaptive oversampling: engines stay full, the estimate follows the yield and is part of the state."""

import asyncio

import pytest
from simulation import (
    Prompts,
    SimulatedEngine,
    coin_grader,
    collect,
    collect_with_cuts,
    rollout,
    run_virtually,
)

from megatron_dapo.config.rollout import RolloutConfig, SamplerConfig
from megatron_dapo.planner.generation import Fleet
from megatron_dapo.planner.server_model import DecodeModel
from megatron_dapo.planner.simulation.engine import Prompts as FleetPrompts
from megatron_dapo.planner.simulation.engine import SimulatedEngine as FleetEngine
from megatron_dapo.planner.workload import Workload
from megatron_dapo.rollout.fill_policy import FillPolicy, YieldEstimate
from megatron_dapo.rollout.sampler import Sampler

ADAPTIVE = {"oversampling": "adaptive", "order": "completion", "unfinished": "continue"}


# A 1.5B model on an H200: 23 600 and 47 700 tokens/s at 64 and 256 requests.
SMALL = DecodeModel(0.0, 0.0, 0.0, 0.0, 0.0, fixed=1.8e-3, per_sequence=1.4e-5, per_prompt_token=1e-5)


class FallingYield(FleetPrompts):
    """The share of informative prompts follows from the weight version of the engine, which is set later."""

    engine = None

    def take(self):
        self.kept = 0.8 - 0.08 * self.engine.weight_version
        return super().take()


def test_a_colocated_engine_stays_full_while_the_yield_falls():
    """64 groups of 8 on an engine of 512 slots; yield falls from 80 to 40 %; partial samples are prefilled again.
    simulation/test_run.py has a 32B step."""
    work = Workload(64, 8, 1, 150, 300, 150, 768, sigma=0.45)
    fleet = Fleet(1, SMALL, kv_tokens=10**9, max_running=512)

    async def main():
        prompts = FallingYield(work, unit=1, seed=0)
        engine = prompts.engine = FleetEngine(fleet, prompts)
        config = RolloutConfig(samples_per_prompt=8, max_response_tokens=768, max_prompt_tokens=150)
        sampler, found = Sampler(engine, prompts.grade, prompts.take, config, groups_per_step=64), []
        for step in range(6):
            began = asyncio.get_running_loop().time()
            batch = await sampler.collect(step)
            found.append((asyncio.get_running_loop().time() - began, batch.metrics))
            await engine.update(step + 1, 0.0)
        return found

    steps = run_virtually(main())
    tokens = sum(metrics["rollout/response_tokens"] for _, metrics in steps[1:])
    assert sum(seconds for seconds, _ in steps[1:]) < tokens / fleet.full_speed(work) / 0.85
    expected = [metrics["rollout/expected_yield"] for _, metrics in steps]
    assert expected[1] > 0.65 and expected[-1] < 0.58, expected
    occupied = [metrics["rollout/engine_occupancy"] for _, metrics in steps[1:]]
    assert min(occupied) > 0.8 and sum(occupied) / 5 > 0.88, occupied
    assert max(metrics["rollout/staleness"] for _, metrics in steps) <= 1
    for _, metrics in steps:
        assert metrics["rollout/samples_trained"] == 64 * 8 and not metrics.get("rollout/dropped/stale")


@pytest.mark.parametrize(
    ("options", "kept", "unused", "expected_yield", "wanted"),
    [
        ({"unfinished": "finish"}, 0, 0, 0.5, 11),  # ceil(4 × 1.3 ÷ 0.5)
        ({"unfinished": "finish"}, 3, 9, 0.5, 3),
        ({"unfinished": "finish"}, 4, 0, 0.5, 0),
        ({"unfinished": "finish", "fill": "dynamic"}, 1, 2, 0.5, 1),  # every decided group counts
        ({}, 0, 0, 0.5, 20),  # ceil(4 × 2.5 ÷ 0.5): the rest is carried over
        ({}, 3, 5, 0.4, 7),
        ({}, 4, 0, 0.5, 0),
        # Without the estimate.
        ({"oversampling": 1}, 0, 0, 0.5, 4),
        ({"oversampling": 1}, 3, 9, 0.5, 1),
        ({"oversampling": 1}, 5, 0, 0.5, -1),
        ({"oversampling": 1.5}, 1, 0, 0.5, 5),  # ceil(3 × 1.5)
        ({"oversampling": 1, "fill": "dynamic"}, 1, 2, 0.5, 1),
        ({"oversampling": 1, "fill": "dynamic"}, 1, 3, 0.5, 0),
        ({"oversampling": 1, "fill": "dynamic"}, 0, 9, 0.5, 1),  # nothing kept yet: one more
    ],
)
def test_groups_in_flight_follow_from_what_is_missing_and_the_expected_yield(
    options, kept, unused, expected_yield, wanted
):
    assert FillPolicy(SamplerConfig(**options), 4).wanted_in_flight(kept, unused, expected_yield) == wanted


def test_only_carried_over_work_fills_the_engine():
    assert FillPolicy(SamplerConfig(), 4, max_running=10).engine_full(10)
    assert not FillPolicy(SamplerConfig(), 4, max_running=10).engine_full(9)
    for options in ({"oversampling": 2}, {"unfinished": "finish"}):
        assert not FillPolicy(SamplerConfig(**options), 4, max_running=10).engine_full(99)


def test_the_estimate_weighs_recent_steps_more():
    estimate = YieldEstimate()
    assert estimate.value == pytest.approx(0.7)
    for keep in [True] * 8:
        estimate.add(keep)
    assert estimate.value == pytest.approx((5.6 + 8) / 16)
    estimate.end_step()
    for keep in [False] * 8:
        estimate.add(keep)
    assert estimate.value == pytest.approx(0.7 * 13.6 / (0.7 * 16 + 8))
    for _ in range(10_000):
        estimate.add(False)
    assert estimate.value == 0.05, "the groups in flight stay bounded when nothing is kept"


def test_the_engine_is_filled_up_to_its_slots_and_no_further():
    """A sample that ends is replaced at once, not when its group ends. At most one group's samples queue."""
    seen = []
    config = rollout(**ADAPTIVE, max_carryover_staleness=9)
    batches, _, _, engine = collect(config, steps=4, needed=30, slots=20, on_progress=seen.append)
    assert engine.most_running == 20
    assert max(progress.running_requests for progress in seen) < 20 + 3
    assert min(batch.metrics["rollout/engine_occupancy"] for batch in batches) > 0.88


def test_without_carry_over_the_groups_in_flight_shrink_with_what_is_missing():
    seen = []
    config = rollout(oversampling="adaptive", order="completion")
    collect(config, steps=1, needed=8, slots=200, on_progress=seen.append)
    assert seen[0].in_flight == 15  # ceil(8 × 1.3 ÷ 0.7)
    late = [progress for progress in seen if progress.kept == 7]
    assert late and max(progress.in_flight for progress in late) <= 15


def test_the_estimate_survives_an_interrupted_step_and_a_resume():
    """Cancelled in the middle of step 0 and restored from JSON: the same estimate as without."""
    middle = []

    class Recorded(Sampler):
        def restore(self, state):
            middle.append(state["yield_estimate"])
            super().restore(state)

    async def main(cuts):
        engine, prompts, config = SimulatedEngine(9, longest=60), Prompts(), rollout(oversampling="adaptive")
        make = lambda: Recorded(engine, coin_grader(0.3), prompts, config, groups_per_step=4)  # noqa: E731
        sampler, values = make(), []
        for step in range(3):
            engine.weight_version = step
            _, sampler = await collect_with_cuts(sampler, make, step, cuts, reload=True)
            values.append(sampler.state()["yield_estimate"])
        return values

    whole = run_virtually(main([]))
    assert run_virtually(main([8.0])) == whole and whole[0] != whole[1]
    assert middle[0] not in whole
    assert middle[0][1] > YieldEstimate().decided, "decisions of the interrupted step are in the estimate"
