"""The sampler on a simulated engine: full batches, every sample accounted for once, no influence of timing."""

import asyncio
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import ALL_CASES
from simulation import (
    TIMINGS,
    Prompts,
    SimulatedEngine,
    as_json,
    assert_whole,
    carried,
    coin_grader,
    collect,
    collect_restored,
    failing,
    response_of,
    rollout,
    run_virtually,
    through_json,
)

from megatron_dapo.algorithm.filtering import give_up_after, keep_group
from megatron_dapo.observe.metrics_file import is_wall_clock
from megatron_dapo.rollout.pending_group import CarryOver, PendingGroup
from megatron_dapo.rollout.sampler import Sampler, SamplingLimitError
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, WeightSpan, as_logprobs, as_tokens


@settings(max_examples=120 if ALL_CASES else 50)
@given(
    needed=st.integers(1, 6), samples=st.integers(2, 4), slots=st.integers(1, 24), share=st.floats(0.15, 0.85),
    oversampling=st.sampled_from([1.0, 1.3, 2.0, 3.0, "adaptive"]), order=st.sampled_from(["completion", "prompt"]),
    fill=st.sampled_from(["full", "full", "dynamic"]), limit=st.sampled_from([None, 1, 3]),
    on_limit=st.sampled_from(["train", "fill", "stop"]),
    unfinished=st.sampled_from(["continue", "finish", "restart", "drop"]), surplus=st.sampled_from(["keep", "drop"]),
    staleness=st.integers(0, 2), jitter=st.floats(0.01, 1.0), faults=st.booleans(), reload=st.booleans(),
    early=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_no_sample_is_lost_or_trained_twice(
    needed, samples, slots, share, oversampling, order, fill, limit, on_limit, unfinished, surplus, staleness, jitter,
    faults, reload, early, seed,
):  # fmt: skip
    longest, steps = 60, 4
    config = rollout(
        samples, longest, oversampling=oversampling, order=order, fill=fill, max_generation_batches=limit,
        on_limit=on_limit, unfinished=unfinished, surplus=surplus, max_carryover_staleness=staleness,
        max_failed_groups=10**6, give_up_after=samples - 1 if early and samples > 2 else None,
    )  # fmt: skip
    fault = failing({"group5-", "group9-sample1"}) if faults else (lambda request_id: None)
    prompts, trained, dropped, failed = Prompts(), [], 0, 0

    async def main():
        nonlocal dropped, failed
        engine = SimulatedEngine(slots, longest=longest, fault=fault, jitter=jitter)
        grade = coin_grader(share)
        sampler = Sampler(engine, grade, prompts, config, groups_per_step=needed, seed=seed)
        for step in range(steps):
            engine.weight_version = step
            try:
                batch = await sampler.collect(step)
            except SamplingLimitError:
                assert limit is not None
                return sampler
            assert 1 <= len(batch.groups) <= needed
            if len(batch.groups) < needed:
                assert fill == "dynamic" or (limit is not None and on_limit in ("train", "fill"))
            for group in batch.groups:
                trained.append(group.prompt.id)
                assert len(group.samples) == samples and [s.index for s in group.samples] == list(range(samples))
                assert_whole(group, longest)
                assert keep_group(group)[0] or on_limit == "fill"
                if config.sampler.give_up_after:
                    assert give_up_after(config.sampler.give_up_after)(group) is None
                assert step - group.oldest_version <= staleness
            assert engine.running == 0
            dropped += sum(v for k, v in batch.metrics.items() if k.startswith("rollout/dropped/"))
            failed += batch.metrics["rollout/groups_failed"]
            if reload:
                state = through_json(sampler.state())
                sampler = Sampler(engine, grade, prompts, config, groups_per_step=needed, seed=seed)
                sampler.restore(state)
        waiting = [group["prompt"]["id"] for group in carried(sampler)]
        assert len(set(trained)) == len(trained) and not set(trained) & set(waiting)
        assert len(set(waiting)) == len(waiting)
        assert prompts.drawn == len(trained) + dropped + failed + len(waiting)
        return sampler

    run_virtually(main())


@pytest.mark.parametrize(
    ("oversampling", "order"), [(1.0, "completion"), (1.0, "prompt"), (2.5, "prompt"), ("adaptive", "prompt")]
)
def test_timing_does_not_change_the_batch(oversampling, order):
    """Any speed, slots and jitter, restored or not: the same groups, tokens and seeds; in prompt order also the same
    counts and state."""
    config = rollout(oversampling=oversampling, order=order, unfinished="finish")

    def batches(slots, jitter, reload):
        found, sampler = collect_restored(config, slots, jitter, reload, steps=5, share=0.3)
        groups = [as_json([group.to_state() for group in batch.groups]) for batch in found]
        if order == "completion":
            return groups
        counted = [{n: v for n, v in batch.metrics.items() if not is_wall_clock(n)} for batch in found]
        return groups, counted, as_json(sampler.state())

    expected = batches(64, 0.0, False)
    if oversampling == "adaptive":
        assert len({metrics["rollout/expected_yield"] for metrics in expected[1]}) > 3, "the estimate never changed"
    for timing in TIMINGS:
        assert batches(*timing) == expected


def test_refill_is_continuous_not_in_waves():
    """While one long sample runs, the groups that ended are replaced."""
    config = rollout(samples=2, longest=400, max_generation_batches=None)
    (batch,), _, prompts, engine = collect(config, needed=4, slots=100, share=0.5)
    order = [int(name.split("-group")[1].split("-")[0]) for name in engine.requests]
    assert order == sorted(order) and prompts.drawn > 4
    lengths = {s.prompt_id: s.length for s in batch.samples}
    assert max(lengths.values()) > 3 * min(lengths.values())
    in_waves = 0.1 * 400 * (prompts.drawn // 4)
    assert batch.metrics["rollout/seconds"] < in_waves


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_partial_rollouts_carry_tokens_and_versions(stop):
    config = rollout(
        oversampling=3, order="completion", unfinished="continue", max_carryover_staleness=5, surplus="keep", stop=stop
    )
    batches, *_ = collect(config, steps=8, needed=4, slots=50)
    spans = [len(sample.weight_spans) for batch in batches for sample in batch.samples]
    assert max(spans) > 1, "no trained sample was ever continued"
    assert any(batch.metrics["rollout/interrupted_share"] > 0 for batch in batches)
    assert all(batch.metrics["rollout/wasted_tokens"] >= 0 for batch in batches)
    for batch in batches:
        for group in batch.groups:
            assert_whole(group, 60)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_step_waits_for_long_samples_at_the_staleness_limit(staleness):
    """No starvation: no group becomes stale while the batch takes all surplus."""
    config = rollout(
        oversampling=2, order="completion", unfinished="continue", max_carryover_staleness=staleness, longest=200,
        max_generation_batches=None,
    )  # fmt: skip
    batches, _, _, _ = collect(config, steps=12, needed=3, slots=100)
    lag = [batch.step - group.oldest_version for batch in batches for group in batch.groups]
    assert max(lag) <= staleness
    if staleness:
        assert max(lag) == staleness
        assert sum(batch.metrics.get("rollout/dropped/stale", 0) for batch in batches) == 0


def test_dynamic_fill_trains_on_the_kept_groups_of_one_batch():
    """As AReaL's dynamic_bs: sampling stops when kept + dropped reach the batch size; only kept groups are trained."""
    config = rollout(samples=2, fill="dynamic")
    (batch,), _, prompts, _ = collect(config, share=0.5, needed=10)
    assert prompts.drawn == 10 and 0 < len(batch.groups) < 10
    dropped = sum(v for k, v in batch.metrics.items() if k.startswith("rollout/dropped/"))
    assert len(batch.groups) + dropped == 10


def test_progress_reports_the_counts_of_the_step():
    seen = []
    (batch,), *_ = collect(rollout(), on_progress=seen.append)
    assert seen[-1].kept == 4 and seen[-1].in_flight == 0 and seen[-1].running_requests == 0
    finished = 2 if sys.version_info < (3, 12) else 3  # just now; newer event loops need fewer turns
    assert max(progress.running_requests for progress in seen) >= 8 - finished  # slots
    assert max(progress.in_flight for progress in seen) == 4
    assert seen[-1].finished_samples == batch.metrics["rollout/samples_submitted"]
    assert seen[-1].tokens_per_second == pytest.approx(batch.metrics["rollout/tokens_per_second"])
    assert sum(seen[-1].dropped.values()) * 3 == batch.metrics["rollout/samples_dropped"]


def test_a_continued_sample_ends_at_the_length_limit():
    """The engine would go on to 200 tokens; all pieces of a response together get 60."""
    config = rollout(oversampling=3, order="completion", unfinished="continue", max_carryover_staleness=9)
    batches, *_ = collect(config, steps=8, needed=4, engine=lambda: SimulatedEngine(50, longest=200))
    lengths = [sample.length for batch in batches for sample in batch.samples]
    assert max(lengths) == 60
    truncated = [s for batch in batches for s in batch.samples if s.truncated]
    assert {s.length for s in truncated} == {60} and any(len(s.weight_spans) > 1 for s in truncated)


def test_tokens_that_may_begin_a_stop_string_are_sampled_again():
    """A sample that was aborted after 10 tokens continues at token 7 if the longest stop string has 3 characters."""

    class Listening(SimulatedEngine):
        async def generate(self, request_id, prompt, params):
            asked.append(len(prompt))
            return await super().generate(request_id, prompt, params)

    async def main():
        engine = Listening()
        sampler = Sampler(engine, coin_grader(0.5), Prompts(), rollout(samples=2, stop=["END"]), groups_per_step=1)
        tokens, logprobs = response_of(4, 1000)
        half = Sample("p", 0, as_tokens([1]), as_tokens(tokens[:10]), as_logprobs(logprobs[:10]), FinishReason.ABORT,
                      [WeightSpan(0, 0, 8), WeightSpan(1, 8, 10)], seed=4)  # fmt: skip
        whole = Sample("p", 1, as_tokens([1]), as_tokens([5]), as_logprobs([-1]), FinishReason.STOP,
                       [WeightSpan(0, 0, 1)], seed=5, grade=Grade(False, 0.0))  # fmt: skip
        pending = PendingGroup(0, 0, Group(Prompt("p", "", as_tokens([1])), [half, whole]))
        engine.weight_version = 1
        sampler.restore(CarryOver(next_serial=1, unfinished=[pending]).to_state())
        await sampler.collect(1)

    asked: list[int] = []
    run_virtually(main())
    assert asked[0] == 1 + 7


class Restless(SimulatedEngine):
    """Aborts each request after three tokens, as when its weights change. `asked`: response tokens sent to continue."""

    def __init__(self):
        super().__init__(slots=50)
        self.asked: dict[str, list[int]] = {}

    async def generate(self, request_id, prompt, params):
        self.asked.setdefault(request_id.split("-at")[0], []).append(len(prompt) - int(prompt[0]))
        if "-piece0" in request_id:
            asyncio.get_running_loop().call_later(0.35, lambda: asyncio.ensure_future(self.abort(request_id)))
        return await super().generate(request_id, prompt, params)


def test_a_sample_that_the_engine_aborts_by_itself_is_continued():
    (batch,), _, _, engine = collect(rollout(), engine=Restless)
    assert any("-piece1" in request for request in engine.requests)
    for group in batch.groups:
        assert_whole(group, 60)


def test_a_stop_string_over_an_abort_within_a_step_is_found():
    """All three tokens are sampled again if the stop string is longer: no part of it is lost between two requests."""
    *_, engine = collect(rollout(stop=["THE END"]), engine=Restless)
    assert any(len(known) > 1 for known in engine.asked.values())
    assert all(known == [0] * len(known) for known in engine.asked.values())
