"""The sampler, simulated: full batches, every sample accounted for once, timing does not matter where it must not."""

import asyncio
import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulation import Prompts, SimulatedEngine, coin_grader, failing, response_of, run_virtual

from megatron_dapo.algorithm import keep_group
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.errors import UserError
from megatron_dapo.observe.metric_names import is_wall_clock
from megatron_dapo.rollout.group_runner import PendingGroup
from megatron_dapo.rollout.sampler import Sampler, SamplingLimitError
from megatron_dapo.types import (
    FinishReason,
    Grade,
    Group,
    Prompt,
    Sample,
    WeightSpan,
    as_logprobs,
    as_tokens,
    json_default,
)


def as_json(state) -> str:
    return json.dumps(state, default=json_default)


def through_json(state):
    return json.loads(as_json(state))


def rollout(samples=3, longest=60, stop=(), **sampler):
    return RolloutConfig(
        samples_per_prompt=samples, max_response_tokens=longest, stop=list(stop), sampler={**sampler}
    )  # fmt: skip


def collect(config, steps=1, *, needed=4, share=0.5, slots=8, prompts=None, engine=None, between=None, seed=0, **more):
    """Batches of several steps, each with a new weight version; returns them with the sampler and its prompts."""

    async def main():
        server = engine() if engine else SimulatedEngine(slots, longest=config.max_response_tokens)
        source = prompts or Prompts()
        grade = more.pop("grade", None) or coin_grader(share)
        sampler = Sampler(server, grade, source, config, groups_per_step=needed, seed=seed, **more)
        batches = []
        for step in range(steps):
            server.weight_version = step
            batches.append(await sampler.collect(step))
            if between:
                sampler = between(sampler, server, grade, source)
        return batches, sampler, source, server

    return run_virtual(main())


def assert_whole(group: Group, longest: int) -> None:
    """Each sample is what the engine makes of its seed in one go, and its spans cover it without gap or overlap."""
    for sample in group.samples:
        tokens, logprobs = response_of(sample.seed, longest)
        assert sample.response_tokens.tolist() == tokens
        assert sample.engine_logprobs == pytest.approx(np.float32(logprobs))
        assert sample.finish_reason is (FinishReason.LENGTH if len(tokens) == longest else FinishReason.STOP)
        edges = [0, *(span.end for span in sample.weight_spans)]
        assert [span.start for span in sample.weight_spans] == edges[:-1] and edges[-1] == len(tokens)
        assert sample.grade is not None


def carried(sampler) -> list[dict]:
    state = sampler.state()
    return [record["group"] for record in (*state["surplus"], *state["unfinished"])]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    needed=st.integers(1, 6), samples=st.integers(2, 4), slots=st.integers(1, 24), share=st.floats(0.15, 0.85),
    oversampling=st.sampled_from([1.0, 1.3, 2.0, 3.0]), order=st.sampled_from(["completion", "prompt"]),
    fill=st.sampled_from(["full", "full", "dynamic"]), limit=st.sampled_from([None, 1, 3]),
    on_limit=st.sampled_from(["train", "fill", "continue", "stop"]),
    unfinished=st.sampled_from(["continue", "finish", "restart", "drop"]), surplus=st.sampled_from(["keep", "drop"]),
    staleness=st.integers(0, 2), jitter=st.floats(0.01, 1.0), faults=st.booleans(), reload=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_no_sample_is_lost_or_trained_twice(
    needed, samples, slots, share, oversampling, order, fill, limit, on_limit, unfinished, surplus, staleness, jitter,
    faults, reload, seed,
):  # fmt: skip
    longest, steps = 60, 4
    config = rollout(
        samples, longest, oversampling=oversampling, order=order, fill=fill, max_generation_batches=limit,
        on_limit=on_limit, unfinished=unfinished, surplus=surplus, max_staleness=staleness, max_failed_groups=10**6,
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
                assert step - group.oldest_version <= staleness
            assert engine.running == 0
            dropped += sum(v for k, v in batch.metrics.items() if k.startswith("rollout/dropped/"))
            failed += batch.metrics["rollout/groups_failed"]
            if reload:
                state = through_json(sampler.state())
                sampler = Sampler(engine, grade, prompts, config, groups_per_step=needed, seed=seed)
                sampler.restore(state)
        waiting = [record["prompt"]["id"] for record in carried(sampler)]
        assert len(set(trained)) == len(trained) and not set(trained) & set(waiting)
        assert len(set(waiting)) == len(waiting)
        assert prompts.drawn == len(trained) + dropped + failed + len(waiting)
        return sampler

    run_virtual(main())


@pytest.mark.parametrize(("oversampling", "order"), [(1.0, "completion"), (1.0, "prompt"), (2.5, "prompt")])
def test_timing_cannot_change_the_batch(oversampling, order):
    """Different speeds, slots and jitter; saved and restored or not: the same groups, tokens and seeds."""
    config = rollout(oversampling=oversampling, order=order, unfinished="finish")

    def batches(slots, jitter, reload):
        def again(sampler, engine, grade, source):
            if not reload:
                return sampler
            fresh = Sampler(engine, grade, source, config, groups_per_step=4)
            fresh.restore(through_json(sampler.state()))
            return fresh

        found, *_ = collect(
            config, steps=4, engine=lambda: SimulatedEngine(slots, longest=60, jitter=jitter), between=again
        )
        return [as_json([group.to_state() for group in batch.groups]) for batch in found]

    expected = batches(64, 0.0, False)
    assert all(len(json.loads(groups)) == 4 for groups in expected)
    for slots, jitter, reload in [(1, 0.0, True), (7, 0.3, False), (30, 0.7, True), (3, 0.9, False)]:
        assert batches(slots, jitter, reload) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cuts=st.lists(st.floats(0.05, 8.0), min_size=1, max_size=5), jitter=st.floats(0.01, 1.0), reload=st.booleans(),
    in_order=st.sampled_from([(1.0, "completion"), (1.0, "prompt"), (2.5, "prompt")]), share=st.floats(0.15, 0.85),
    fill=st.sampled_from(["full", "dynamic"]), limit=st.sampled_from([None, 1, 2]), faults=st.booleans(),
    on_limit=st.sampled_from(["train", "fill", "continue"]), stop=st.sampled_from([(), ("END",)]),
    repeated=st.booleans(),
)  # fmt: skip
@example(
    cuts=[2.0, 2.0, 2.0], jitter=0.5, reload=False, in_order=(1.0, "completion"), share=0.75, fill="full", limit=1,
    faults=True, on_limit="train", stop=(), repeated=False,
)  # the words of a failure were lost  # fmt: skip
def test_a_cancelled_step_goes_on_as_if_it_had_not_been(
    cuts, jitter, reload, in_order, share, fill, limit, faults, on_limit, stop, repeated
):
    """Cut at any moments, saved and restored or not: same batches, and the counts are those of the whole step."""
    oversampling, order = in_order
    config = rollout(
        longest=60, stop=stop, oversampling=oversampling, order=order, fill=fill, max_generation_batches=limit,
        on_limit=on_limit, max_failed_groups=10**6,
    )  # fmt: skip

    async def main(cuts, jitter):
        fault = failing({"group2-", "group7-sample1"}) if faults else (lambda request_id: None)
        engine, grade = SimulatedEngine(9, longest=60, fault=fault, jitter=jitter), coin_grader(share)
        prompts = Prompts()
        source = (lambda: replace(prompts(), id="the same")) if repeated else prompts
        make = lambda: Sampler(engine, grade, source, config, groups_per_step=4, seed=3)  # noqa: E731
        sampler, found, cuts = make(), [], list(cuts)
        for step in range(3):
            engine.weight_version = step
            try:
                while (task := asyncio.ensure_future(sampler.collect(step))) and cuts:
                    await asyncio.wait({task}, timeout=cuts.pop(0))
                    if task.done():
                        break
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                    state = through_json(sampler.state())
                    if reload:
                        sampler = make()
                        sampler.restore(state)
                batch = await task
            except SamplingLimitError as error:
                return [*found, str(error)]
            metrics = {name: value for name, value in batch.metrics.items() if not is_wall_clock(name)}
            found.append((metrics, as_json([group.to_state() for group in batch.groups])))
        return found

    assert run_virtual(main(cuts, jitter)) == run_virtual(main([], 0.0))


def test_a_complete_group_is_judged_after_an_error_too():
    """p1 is complete and waits for p0, whose grader breaks: when the step is tried again, p1 must pass the filter."""

    async def grade(prompt, sample):
        if prompt.id == "p0" and not mended:
            await asyncio.sleep(1000)
            raise ZeroDivisionError("the grader has a bug")
        return Grade(prompt.id == "p1" or sample.index == 0, 1.0)

    async def main():
        config = rollout(oversampling=2, order="prompt")
        sampler = Sampler(SimulatedEngine(slots=50), grade, Prompts(), config, groups_per_step=2)
        with pytest.raises(ZeroDivisionError):
            await sampler.collect(0)
        mended.append(True)
        batch = await sampler.collect(0)
        assert [group.prompt.id for group in batch.groups] == ["p0", "p2"]
        assert batch.metrics["rollout/dropped/all-correct"] == 1

    mended: list[bool] = []
    run_virtual(main())


def test_refill_is_continuous_not_in_waves():
    """With one straggler among the first prompts, its slot-mates are replaced long before it ends."""
    config = rollout(samples=2, longest=400, max_generation_batches=None)
    (batch,), _, prompts, engine = collect(config, needed=4, slots=100, share=0.5)
    order = [int(name.split("-group")[1].split("-")[0]) for name in engine.requests]
    assert order == sorted(order) and prompts.drawn > 4
    lengths = {s.prompt_id: s.length for s in batch.samples}
    assert max(lengths.values()) > 3 * min(lengths.values())
    in_waves = 0.1 * 400 * (prompts.drawn // 4)
    assert batch.metrics["rollout/seconds"] < in_waves


def test_partial_rollouts_carry_tokens_and_versions():
    config = rollout(oversampling=3, order="completion", unfinished="continue", max_staleness=5, surplus="keep")
    batches, *_ = collect(config, steps=8, needed=4, slots=50)
    spans = [len(sample.weight_spans) for batch in batches for sample in batch.samples]
    assert max(spans) > 1, "no trained sample was ever continued"
    assert any(batch.metrics["rollout/cut_share"] > 0 for batch in batches)
    assert all(batch.metrics["rollout/wasted_tokens"] >= 0 for batch in batches)
    for batch in batches:
        for group in batch.groups:
            assert_whole(group, 60)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_long_samples_are_waited_for_at_the_staleness_bound(staleness):
    """No starvation: nothing is ever dropped as stale when the batch takes all surplus."""
    config = rollout(
        oversampling=2, order="completion", unfinished="continue", max_staleness=staleness, longest=200,
        max_generation_batches=None,
    )  # fmt: skip
    batches, _, _, _ = collect(config, steps=12, needed=3, slots=100)
    lag = [batch.step - group.oldest_version for batch in batches for group in batch.groups]
    assert max(lag) <= staleness
    if staleness:
        assert max(lag) == staleness
        assert sum(batch.metrics.get("rollout/dropped/stale", 0) for batch in batches) == 0


async def only_p5_is_mixed(prompt, sample):
    return Grade(prompt.id != "p5" or sample.index == 0, 1.0)


@pytest.mark.parametrize(("on_limit", "groups"), [("train", 1), ("fill", 4)])
def test_the_bound_never_loses_accepted_groups(on_limit, groups):
    config = rollout(samples=2, max_generation_batches=2, on_limit=on_limit)
    (batch,), _, prompts, _ = collect(config, grade=only_p5_is_mixed, needed=4)
    assert prompts.drawn == 8 and len(batch.groups) == groups
    assert [group.prompt.id for group in batch.groups if keep_group(group)[0]] == ["p5"]
    assert batch.metrics["rollout/samples_trained"] + batch.metrics["rollout/samples_dropped"] == 16


def test_stop_at_the_bound_keeps_accepted_groups_in_the_state():
    async def main():
        config = rollout(samples=2, max_generation_batches=2, on_limit="stop")
        sampler = Sampler(SimulatedEngine(), only_p5_is_mixed, Prompts(), config, groups_per_step=4)
        with pytest.raises(SamplingLimitError, match="8 prompts were sampled and 1 of 4 groups were kept"):
            await sampler.collect(0)
        assert len(sampler.state()["surplus"]) == 1

    run_virtual(main())


def test_continue_goes_on_beyond_the_bound():
    config = rollout(samples=2, max_generation_batches=1, on_limit="continue")
    (batch,), _, prompts, _ = collect(config, share=0.9, needed=4)
    assert len(batch.groups) == 4 and prompts.drawn > 8


def test_max_resample_times_counts_batches_after_the_first():
    config = rollout(samples=2, max_resample_times=2, on_limit="fill")
    (batch,), _, prompts, _ = collect(config, share=1.0, needed=4)
    assert prompts.drawn == 12 and len(batch.groups) == 4


def test_dynamic_fill_trains_on_what_one_batch_gives():
    """AReaL's dynamic_bs: kept + dropped reach the batch size; only the kept are trained."""
    config = rollout(samples=2, fill="dynamic")
    (batch,), _, prompts, _ = collect(config, share=0.5, needed=10)
    assert prompts.drawn == 10 and 0 < len(batch.groups) < 10
    dropped = sum(v for k, v in batch.metrics.items() if k.startswith("rollout/dropped/"))
    assert len(batch.groups) + dropped == 10


def test_prompts_may_run_out():
    config = rollout(samples=2)
    (batch,), *_ = collect(config, needed=4, prompts=Prompts(3), share=0.5)
    assert 1 <= len(batch.groups) <= 3
    with pytest.raises(UserError, match="the prompts ran out and 0 of 4 groups were kept"):
        collect(config, needed=4, prompts=Prompts(3), share=1.0)


def test_a_broken_grader_ends_the_step_and_nothing_is_lost():
    async def main():
        prompts = Prompts()
        grade = coin_grader(0.5, broken=lambda prompt: prompt.id == "p6")
        engine = SimulatedEngine(slots=4)
        sampler = Sampler(engine, grade, prompts, rollout(), groups_per_step=8)
        with pytest.raises(ZeroDivisionError):
            await sampler.collect(0)
        waiting = [group["prompt"]["id"] for group in carried(sampler)]
        assert "p6" in waiting and engine.running == 0
        assert len(set(waiting)) == len(waiting)

    run_virtual(main())


def test_failed_groups_are_counted_and_bounded():
    broken = failing({"group1-sample2", "group2-"})
    config = rollout(max_failed_groups=2)
    (batch,), *_ = collect(config, engine=lambda: SimulatedEngine(fault=broken))
    assert len(batch.groups) == 4 and batch.metrics["rollout/groups_failed"] == 2
    assert not {"p1", "p2"} & {group.prompt.id for group in batch.groups}
    with pytest.raises(EngineError, match=r"2 groups failed .* server http://simulated: generate step0-group"):
        collect(rollout(max_failed_groups=1), engine=lambda: SimulatedEngine(fault=broken))


def test_an_engine_that_stalls_is_an_error_that_says_what_it_waited_for():
    config = rollout(stall_timeout=50, longest=1000)
    with pytest.raises(EngineError, match=r"waited 50 s .* no sample finished.*'p0'"):
        collect(config, engine=lambda: SimulatedEngine(token_seconds=100, longest=1000))


def test_repeated_prompts_of_one_step_get_different_seeds():
    class Same(Prompts):
        def __call__(self):
            prompt = super().__call__()
            prompt.id = "same"
            return prompt

    (batch,), *_ = collect(rollout(), prompts=Same())
    seeds = [sample.seed for sample in batch.samples]
    assert len(set(seeds)) == len(seeds) == 12


def test_progress_counts_what_happens():
    seen = []
    (batch,), *_ = collect(rollout(), on_progress=seen.append)
    assert seen[-1].kept == 4 and seen[-1].in_flight == 0 and seen[-1].running_requests == 0
    assert max(progress.running_requests for progress in seen) >= 7  # 8 slots, less the one that has just finished
    assert max(progress.in_flight for progress in seen) == 4
    assert seen[-1].finished_samples == batch.metrics["rollout/samples_submitted"]
    assert seen[-1].tokens_per_second == pytest.approx(batch.metrics["rollout/tokens_per_second"])
    assert sum(seen[-1].dropped.values()) * 3 == batch.metrics["rollout/samples_dropped"]


def test_a_continued_sample_ends_at_the_length_bound():
    """The engine would go on to 200 tokens; all pieces of a response together get 60."""
    config = rollout(oversampling=3, order="completion", unfinished="continue", max_staleness=9)
    batches, *_ = collect(config, steps=8, needed=4, engine=lambda: SimulatedEngine(50, longest=200))
    lengths = [sample.length for batch in batches for sample in batch.samples]
    assert max(lengths) == 60
    truncated = [s for batch in batches for s in batch.samples if s.truncated]
    assert {s.length for s in truncated} == {60} and any(len(s.weight_spans) > 1 for s in truncated)


def test_tokens_that_may_begin_a_stop_string_are_sampled_again():
    """A sample that was cut after 10 tokens goes on from token 7 when the longest stop string has 3 letters."""

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
        sampler.restore({"next_serial": 1, "surplus": [], "unfinished": [pending.to_state()]})
        await sampler.collect(1)

    asked: list[int] = []
    run_virtual(main())
    assert asked[0] == 1 + 7


def test_stop_strings_do_not_change_what_a_sample_is():
    config = rollout(oversampling=3, order="completion", unfinished="continue", max_staleness=9, stop=["END"])
    batches, *_ = collect(config, steps=6, needed=3, slots=50)
    for batch in batches:
        for group in batch.groups:
            assert_whole(group, 60)
    assert any(len(s.weight_spans) > 1 for batch in batches for s in batch.samples)


def test_an_abort_nobody_asked_for_is_continued():
    class Restless(SimulatedEngine):
        async def generate(self, request_id, prompt, params):
            if "-piece0" in request_id:
                asyncio.get_running_loop().call_later(0.35, lambda: asyncio.ensure_future(self.abort(request_id)))
            return await super().generate(request_id, prompt, params)

    (batch,), _, _, engine = collect(rollout(), engine=lambda: Restless(slots=50))
    assert any("-piece1" in request for request in engine.requests)
    for group in batch.groups:
        assert_whole(group, 60)


def test_the_ledger_notices_a_lost_sample():
    from megatron_dapo.rollout.accounting import Tally

    tally = Tally(submitted=4, trained=3)
    with pytest.raises(AssertionError, match="4 samples entered the step and 3 left it"):
        tally.check()
