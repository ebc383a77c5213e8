"""Steps of the sampler that reach a limit, fail or are cancelled: nothing is lost, and the next attempt continues."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from long_lists import ALL_CASES
from simulation import (
    Prompts,
    SimulatedEngine,
    as_json,
    assert_whole,
    carried,
    coin_grader,
    collect,
    collect_with_cuts,
    failing,
    rollout,
    run_virtually,
    through_json,
    virtually,
)

from megatron_dapo.algorithm.filtering import keep_group
from megatron_dapo.engines.protocol import Completion, ForeignWeightsError
from megatron_dapo.errors import EngineError, UserError
from megatron_dapo.observe.metrics_file import is_wall_clock
from megatron_dapo.rollout.accounting import StepAccounting
from megatron_dapo.rollout.sampler import Sampler, SamplingLimitError
from megatron_dapo.types import FinishReason, Grade, Group, WeightSpan, as_logprobs, as_tokens


@settings(max_examples=80 if ALL_CASES else 25)
@given(
    cuts=st.lists(st.floats(0.05, 8.0), min_size=1, max_size=5), jitter=st.floats(0.01, 1.0), reload=st.booleans(),
    in_order=st.sampled_from([(1.0, "completion"), (1.0, "prompt"), (2.5, "prompt"), ("adaptive", "prompt")]),
    share=st.floats(0.15, 0.85),
    fill=st.sampled_from(["full", "dynamic"]), limit=st.sampled_from([None, 1, 2]), faults=st.booleans(),
    on_limit=st.sampled_from(["train", "fill"]), stop=st.sampled_from([(), ("END",)]),
    repeated=st.booleans(), early=st.booleans(),
)  # fmt: skip
@example(
    cuts=[2.0, 2.0, 2.0], jitter=0.5, reload=False, in_order=(1.0, "completion"), share=0.75, fill="full", limit=1,
    faults=True, on_limit="train", stop=(), repeated=False, early=False,
)  # lost the message of a failure  # fmt: skip
@example(
    cuts=[1.0], jitter=0.5, reload=False, in_order=(1.0, "completion"), share=0.75, fill="full", limit=1,
    faults=False, on_limit="train", stop=(), repeated=False, early=True,
)  # named the reasons in another order  # fmt: skip
@example(
    cuts=[2.0, 2.0, 2.0], jitter=0.5, reload=False, in_order=(1.0, "completion"), share=0.15, fill="full", limit=1,
    faults=False, on_limit="fill", stop=(), repeated=False, early=False,
)  # fills the batch with groups that were rejected before the interruption  # fmt: skip
def test_a_cancelled_step_continues_with_the_same_decisions_and_counts(
    cuts, jitter, reload, in_order, share, fill, limit, faults, on_limit, stop, repeated, early
):
    """Cancelled at any moments, restored or not: the batches and counts of an uninterrupted step. With early rejection,
    timing decides how many tokens the aborted samples have and which of them finish, and nothing else."""
    oversampling, order = in_order
    timed = ("wasted_tokens", "response_tokens", "length_dropped", "interrupted_share") if early else ()
    config = rollout(
        longest=60, stop=stop, oversampling=oversampling, order=order, fill=fill, max_generation_batches=limit,
        on_limit=on_limit, max_failed_groups=10**6, give_up_after=2 if early else None,
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
                batch, sampler = await collect_with_cuts(sampler, make, step, cuts, reload)
            except SamplingLimitError as error:
                return [*found, str(error)]
            counts = {name: value for name, value in batch.metrics.items() if not is_wall_clock(name)}
            metrics = {name: value for name, value in counts.items() if not name.endswith(timed)}
            found.append((metrics, as_json([group.to_state() for group in batch.groups])))
        return found

    assert run_virtually(main(cuts, jitter)) == run_virtually(main([], 0.0))


@virtually
async def test_a_finished_group_is_filtered_after_an_error_too():
    """p1 is finished and waits for p0, whose grader fails. In the next attempt p1 must still pass the filter."""

    async def grade(prompt, sample):
        if prompt.id == "p0" and not repaired:
            await asyncio.sleep(1000)
            raise ZeroDivisionError("the grader has a bug")
        return Grade(prompt.id == "p1" or sample.index == 0, 1.0)

    repaired: list[bool] = []
    config = rollout(oversampling=2, order="prompt")
    sampler = Sampler(SimulatedEngine(slots=50), grade, Prompts(), config, groups_per_step=2)
    with pytest.raises(ZeroDivisionError):
        await sampler.collect(0)
    repaired.append(True)
    batch = await sampler.collect(0)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p2"]
    assert batch.metrics["rollout/dropped/all-correct"] == 1


async def only_p5_is_mixed(prompt, sample):
    return Grade(prompt.id != "p5" or sample.index == 0, 1.0)


@pytest.mark.parametrize(("on_limit", "groups"), [("train", 1), ("fill", 4)])
def test_the_limit_loses_no_accepted_group(on_limit, groups):
    config = rollout(samples=2, max_generation_batches=2, on_limit=on_limit)
    (batch,), _, prompts, _ = collect(config, grade=only_p5_is_mixed, needed=4)
    assert prompts.drawn == 8 and len(batch.groups) == groups
    assert [group.prompt.id for group in batch.groups if keep_group(group)[0]] == ["p5"]
    assert batch.metrics["rollout/samples_trained"] + batch.metrics["rollout/samples_dropped"] == 16


@virtually
async def test_on_limit_stop_carries_every_kept_group_over():
    """The state after the error, saved and restored, gives the next attempt all that was kept, and trains it once."""

    async def one_in_four_is_mixed(prompt, sample):
        return Grade(int(prompt.id[1:]) % 4 != 1 or sample.index == 0, 1.0)

    def make(on_limit):
        config = rollout(samples=2, max_generation_batches=2, on_limit=on_limit)
        return Sampler(SimulatedEngine(), one_in_four_is_mixed, prompts, config, groups_per_step=4)

    prompts, kept = Prompts(), ["p1", "p5"]
    sampler = make("stop")
    with pytest.raises(SamplingLimitError, match="8 prompts were sampled and 2 of 4 groups were kept") as error:
        await sampler.collect(0)
    assert "The 2 kept groups are carried over" in str(error.value)
    state = sampler.state()
    assert [pending["group"]["prompt"]["id"] for pending in state["surplus"]] == kept
    assert state["unfinished"] == [] and state["interrupted"] is None
    before = as_json([pending["group"] for pending in state["surplus"]])

    resumed = make("train")
    resumed.restore(through_json(state))
    batch = await resumed.collect(0)
    assert [group.prompt.id for group in batch.groups] == ["p1", "p5", "p9", "p13"]
    assert as_json([group.to_state() for group in batch.groups[:2]]) == before
    assert batch.metrics["rollout/samples_carried_in"] == 4
    assert resumed.state()["surplus"] == []


@virtually
async def test_a_step_that_is_repeated_after_an_error_samples_no_seed_twice():
    """The same prompt is drawn again and again. The second attempt must not repeat the seeds of the first."""
    prompts, repaired = Prompts(), []

    async def grade(prompt, sample):
        if prompt.answer == "3" and not repaired:
            raise ZeroDivisionError("the grader has a bug")
        return Grade(sample.index == 0, 1.0)

    def make(groups):
        source = lambda: replace(prompts(), id="the same", answer=str(prompts.drawn))  # noqa: E731
        return Sampler(SimulatedEngine(), grade, source, rollout(), groups_per_step=groups)

    sampler, resumed = make(5), make(8)
    with pytest.raises(ZeroDivisionError):
        await sampler.collect(0)
    resumed.restore(through_json(sampler.state()))
    repaired.append(True)
    batch = await resumed.collect(0)
    seeds = [sample.seed for sample in batch.samples]
    assert len(seeds) == len(set(seeds)) == 8 * 3


def test_without_a_limit_sampling_goes_on_until_the_batch_is_full():
    config = rollout(samples=2, max_generation_batches=None)
    (batch,), _, prompts, _ = collect(config, share=0.9, needed=4)
    assert len(batch.groups) == 4 and prompts.drawn > 8


def test_max_generation_batches_counts_all_batches_of_the_step():
    config = rollout(samples=2, max_generation_batches=3, on_limit="fill")
    (batch,), _, prompts, _ = collect(config, share=1.0, needed=4)
    assert prompts.drawn == 12 and len(batch.groups) == 4


def test_prompts_may_run_out():
    config = rollout(samples=2)
    (batch,), *_ = collect(config, needed=4, prompts=Prompts(3), share=0.5)
    assert 1 <= len(batch.groups) <= 3
    with pytest.raises(UserError, match="the prompts ran out and 0 of 4 groups were kept"):
        collect(config, needed=4, prompts=Prompts(3), share=1.0)


@virtually
async def test_a_broken_grader_ends_the_step_and_nothing_is_lost():
    prompts = Prompts()
    grade = coin_grader(0.5, broken=lambda prompt: prompt.id == "p6")
    engine = SimulatedEngine(slots=4)
    sampler = Sampler(engine, grade, prompts, rollout(), groups_per_step=8)
    with pytest.raises(ZeroDivisionError):
        await sampler.collect(0)
    waiting = [group["prompt"]["id"] for group in carried(sampler)]
    assert "p6" in waiting and engine.running == 0
    assert len(set(waiting)) == len(waiting)


def test_a_step_whose_grader_failed_continues_with_the_same_counts():
    """The run ends there, saves, and is started again."""

    async def main(failures):
        async def grade(prompt, sample):
            if prompt.id == "p3" and failures:
                await asyncio.sleep(2)
                raise failures.pop()
            return Grade(sample.index == 0 or prompt.id == "p1", 1.0)

        prompts = Prompts()
        make = lambda: Sampler(SimulatedEngine(9), grade, prompts, rollout(), groups_per_step=4)  # noqa: E731
        sampler = make()
        while failures:
            with pytest.raises(ZeroDivisionError):
                await sampler.collect(0)
            state = through_json(sampler.state())
            sampler = make()
            sampler.restore(state)
        batch = await sampler.collect(0)
        return {n: v for n, v in batch.metrics.items() if not is_wall_clock(n)}, [g.prompt.id for g in batch.groups]

    errors = [ZeroDivisionError("the grader has a bug")] * 2
    assert run_virtually(main(errors)) == run_virtually(main([]))


def test_failed_groups_are_counted_and_limited():
    broken = failing({"group1-sample2", "group2-"})
    config = rollout(max_failed_groups=2)
    (batch,), *_ = collect(config, engine=lambda: SimulatedEngine(fault=broken))
    assert len(batch.groups) == 4 and batch.metrics["rollout/groups_failed"] == 2
    assert not {"p1", "p2"} & {group.prompt.id for group in batch.groups}
    with pytest.raises(EngineError, match=r"step 1: 2 groups failed .* server http://simulated: generate step1-group"):
        collect(rollout(max_failed_groups=1), engine=lambda: SimulatedEngine(fault=broken))
    config, every = rollout(max_failed_groups=9, max_generation_batches=1), failing({"group"})
    with pytest.raises(SamplingLimitError, match=r"step 1: 4 of 4 groups failed: server http://simulated: generate"):
        collect(config, engine=lambda: SimulatedEngine(fault=every))


def test_a_stalled_engine_is_an_error_that_names_the_prompts():
    config = rollout(stall_timeout=50, longest=1000)
    with pytest.raises(EngineError, match=r"no sample finished within 50 s .*'p0'"):
        collect(config, engine=lambda: SimulatedEngine(token_seconds=100, longest=1000))


def test_accounting_finds_a_lost_sample():
    counts = StepAccounting(submitted=4, trained=3)
    with pytest.raises(AssertionError, match="4 samples entered the step and 3 left it"):
        counts.check()


@pytest.mark.parametrize("order", ["completion", "prompt"])
@pytest.mark.parametrize("named_by", ["engine", "spans"])
@virtually
async def test_foreign_weights_end_the_step_at_once(order, named_by):
    """p0 and the other samples of p2 would run for an hour; the step must not wait for them."""

    class Updated(SimulatedEngine):
        """One sample of p2 comes from a server that another program has updated to version 99."""

        async def generate(self, request_id, prompt, params):
            if "group2-sample1" in request_id:
                await asyncio.sleep(1)
                if named_by == "engine":
                    raise ForeignWeightsError("server http://b: weight version 99 was never sent")
                span = WeightSpan(99, 0, 1)
                return Completion(as_tokens([1]), as_logprobs([-1.0]), FinishReason.STOP, [span], "http://b")
            return await super().generate(request_id, prompt, params)

    engine = Updated(slots=50, token_seconds=600)
    config = rollout(oversampling=2, order=order, max_failed_groups=100)
    sampler = Sampler(engine, coin_grader(0.5), Prompts(), config, groups_per_step=4)
    with pytest.raises(ForeignWeightsError, match=r"server http://b: .*99") as error:
        await sampler.collect(0)
    assert named_by == "engine" or "the newest version that this run has sent is 0" in str(error.value)
    assert asyncio.get_running_loop().time() < 60 and engine.running == 0
    groups = [Group.from_state(group) for group in carried(sampler)]
    assert [group.prompt.id for group in groups] == [f"p{i}" for i in range(8)]
    assert {span.version for group in groups for s in group.samples for span in s.weight_spans} <= {0}


def test_foreign_weights_found_while_aborting_are_not_a_failed_group():
    class Late(SimulatedEngine):
        async def generate(self, request_id, prompt, params):
            made = await super().generate(request_id, prompt, params)
            if made.finish_reason is FinishReason.ABORT and len(made.tokens):
                made.weight_spans = [WeightSpan(7, 0, len(made.tokens))]
            return made

    config = rollout(oversampling=3, order="completion", unfinished="continue", max_failed_groups=100)
    with pytest.raises(ForeignWeightsError, match="weight version 7"):
        collect(config, steps=3, engine=lambda: Late(slots=50))


@virtually
async def test_a_slow_grader_does_not_hold_up_the_end_of_a_step():
    """The batch is full while p0 is being graded. It goes on: the next step takes the grades, and nothing is made or
    graded again."""

    async def grade(prompt, sample):
        graded[prompt.id, sample.index] += 1
        await asyncio.sleep(100 if prompt.id == "p0" else 10)  # all are generated by then
        return Grade(sample.index == 0, 1.0)

    graded, engine = Counter(), SimulatedEngine(slots=50)
    config = rollout(oversampling=2, order="completion", unfinished="continue")
    sampler = Sampler(engine, grade, Prompts(), config, groups_per_step=2)
    first = await sampler.collect(0)
    assert "p0" not in {group.prompt.id for group in first.groups} and asyncio.get_running_loop().time() < 15
    (waiting,) = (group for group in carried(sampler) if group["prompt"]["id"] == "p0")
    assert all(sample["finish_reason"] == "stop" and sample["grade"] is None for sample in waiting["samples"])
    await asyncio.sleep(100)  # the update
    engine.requests.clear()
    second = await sampler.collect(1)
    assert "p0" in {group.prompt.id for group in second.groups} and asyncio.get_running_loop().time() < 130
    assert not any("group0-" in request for request in engine.requests) and set(graded.values()) == {1}
    for group in second.groups:
        assert_whole(group, 1000)


@virtually
async def test_a_run_that_resumes_grades_what_was_being_graded():
    async def grade(prompt, sample):
        await asyncio.sleep(100 if prompt.id in slow else 10)
        return Grade(sample.index == 0, 1.0)

    slow, engine, prompts = {"p0"}, SimulatedEngine(slots=50), Prompts()
    config = rollout(oversampling=2, order="completion", unfinished="continue")
    first, second = (Sampler(engine, grade, prompts, config, groups_per_step=2) for _ in range(2))
    await first.collect(0)
    second.restore(first.state())
    slow.clear()
    engine.requests.clear()
    assert "p0" in {group.prompt.id for group in (await second.collect(1)).groups}
    assert not any("group0-" in request for request in engine.requests)


@virtually
async def test_a_grade_of_a_response_that_is_made_again_is_not_used():
    """The first responses to p0 are being graded when step 0 is cancelled, and step 1 drops them unseen."""

    async def grade(prompt, sample):
        graded[prompt.id] += 1
        seconds, score = (50, -9.0) if graded["p0"] <= 3 and prompt.id == "p0" else (5, 1.0)
        await asyncio.sleep(seconds)
        return Grade(sample.index == 0, score)

    graded = Counter()
    config = rollout(samples=3, oversampling=1, order="completion", unfinished="restart")
    sampler = Sampler(SimulatedEngine(slots=50), grade, Prompts(), config, groups_per_step=2)
    task = asyncio.ensure_future(sampler.collect(0))
    await asyncio.sleep(20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    sampler.groups_per_step = 1  # p1 is enough
    assert [group.prompt.id for group in (await sampler.collect(1)).groups] == ["p1"]
    (group,) = (await sampler.collect(2)).groups
    assert group.prompt.id == "p0" and [sample.grade.score for sample in group.samples] == [1.0] * 3
    assert graded["p0"] == 6


@virtually
async def test_a_run_that_ends_between_two_steps_ends_the_grading():
    async def grade(prompt, sample):
        graded["begun"] += 1
        await asyncio.sleep(100 if prompt.id == "p0" else 10)
        graded["done"] += 1
        return Grade(sample.index == 0, 1.0)

    graded = Counter()
    config = rollout(samples=3, oversampling=2, order="completion", unfinished="continue")
    sampler = Sampler(SimulatedEngine(slots=50), grade, Prompts(), config, groups_per_step=2)
    await sampler.collect(0)
    sampler.close()
    before = graded.copy()
    await asyncio.sleep(200)
    assert graded == before and graded["done"] < graded["begun"] == 12


@virtually
async def test_a_step_that_drops_what_is_unfinished_waits_for_its_grades():
    """The batch is full while p0 is being graded. p0 is complete, so it is trained or kept."""

    async def grade(prompt, sample):
        await asyncio.sleep(25 if prompt.id == "p0" else 10)
        return Grade(sample.index == 0, 1.0)

    config = rollout(oversampling=2, order="completion", unfinished="drop")
    sampler = Sampler(SimulatedEngine(slots=50), grade, Prompts(), config, groups_per_step=2)
    batch = await sampler.collect(0)
    kept = [group["prompt"]["id"] for group in carried(sampler)]
    assert "p0" in [*kept, *(group.prompt.id for group in batch.groups)]


@virtually
async def test_a_second_cancellation_while_requests_are_aborted_loses_nothing():
    class Stubborn(SimulatedEngine):
        async def abort(self, request_id=None):
            await asyncio.sleep(10)

    engine = Stubborn(slots=50, token_seconds=600)
    sampler = Sampler(engine, coin_grader(0.5), Prompts(), rollout(), groups_per_step=4)
    task = asyncio.ensure_future(sampler.collect(0))
    for _ in range(2):
        await asyncio.sleep(5)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [group["prompt"]["id"] for group in carried(sampler)] == ["p0", "p1", "p2", "p3"]
    await asyncio.sleep(0.1)
    assert engine.running == 0


@virtually
async def test_carried_over_groups_that_have_not_started_survive_a_cancellation():
    engine, prompts = SimulatedEngine(slots=50), Prompts()
    many = rollout(oversampling=3, order="completion", unfinished="continue")
    first = Sampler(engine, coin_grader(0.5), prompts, many, groups_per_step=4)
    await first.collect(0)
    second = Sampler(engine, coin_grader(0.5), prompts, rollout(unfinished="continue"), groups_per_step=1)
    second.restore({**first.state(), "surplus": []})
    waiting = [pending["group"]["prompt"]["id"] for pending in first.state()["unfinished"]]
    assert len(waiting) > 2
    task = asyncio.ensure_future(second.collect(1))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [group["prompt"]["id"] for group in carried(second)] == waiting


@virtually
async def test_the_state_cannot_be_read_while_a_batch_is_collected():
    sampler = Sampler(SimulatedEngine(), coin_grader(0.5), Prompts(), rollout(), groups_per_step=4)
    task = asyncio.ensure_future(sampler.collect(0))
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="while a batch is being collected"):
        sampler.state()
    with pytest.raises(RuntimeError, match=r"collect\(1\) was called while another batch"):
        await sampler.collect(1)
    await task
    assert sampler.state()["next_serial"] >= 4
