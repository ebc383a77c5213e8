"""Groups that are rejected before all of their samples are finished: counted once, nothing lost, no matter when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import (
    Prompts,
    SimulatedEngine,
    as_json,
    assert_whole,
    carried,
    coin_grader,
    collect,
    collect_with_cuts,
    rollout,
    run_virtually,
    through_json,
)
from test_group_states import pending

from megatron_dapo.algorithm.filtering import give_up_after, keep_group
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.observe.metrics_file import is_wall_clock
from megatron_dapo.rollout.sampler import Sampler, SamplingLimitError
from megatron_dapo.types import Grade, Group


def graded(*verdicts):
    """A group of samples that are correct, wrong, ungraded (None) or unfinished ("running")."""
    group = pending(0, seeds=range(len(verdicts))).group
    for sample, verdict in zip(group.samples, verdicts, strict=True):
        sample.grade = None if verdict == "running" else Grade(verdict, 0.0)
    return group


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ((True, True, "running", "running"), "all-correct"),
        ((False, False, True, "running"), "all-wrong"),  # the first two by index decide, whatever else finished
        ((True, "running", True, True), None),
        ((True, False, "running", "running"), None),
        ((None, True, True, True), None),
        ((True, True, False, False), "all-correct"),  # also when everything has finished before it was asked
    ],
)
def test_the_first_samples_by_index_decide(verdicts, reason):
    assert give_up_after(2)(graded(*verdicts)) == reason


def test_the_remaining_samples_of_a_rejected_group_are_aborted():
    async def grade(prompt, sample):
        return Grade(int(prompt.id[1:]) % 2 == 0 or sample.index == 0, 1.0)

    config = rollout(samples=6, longest=400, give_up_after=2)
    (batch,), *_ = collect(config, grade=grade, needed=4, slots=200)
    (whole,), *_ = collect(rollout(samples=6, longest=400), grade=grade, needed=4, slots=200)
    assert [g.prompt.id for g in batch.groups] == [g.prompt.id for g in whole.groups] == ["p1", "p3", "p5", "p7"]
    found, usual = batch.metrics, whole.metrics
    assert found["rollout/dropped/early-all-correct"] == usual["rollout/dropped/all-correct"] > 0
    assert found["rollout/samples_dropped"] == usual["rollout/samples_dropped"]
    assert found["rollout/wasted_tokens"] < 0.8 * usual["rollout/wasted_tokens"]
    assert found["rollout/response_tokens"] < usual["rollout/response_tokens"]
    assert found["rollout/seconds"] < usual["rollout/seconds"]
    for group in batch.groups:
        assert_whole(group, 400)


@settings(max_examples=40)
@given(
    slots=st.integers(1, 24), share=st.floats(0.2, 0.8), jitter=st.floats(0.01, 1.0), reload=st.booleans(),
    oversampling=st.sampled_from([1.0, 2.5, "adaptive"]), order=st.sampled_from(["completion", "prompt"]),
    unfinished=st.sampled_from(["continue", "finish", "restart", "drop"]), after=st.integers(2, 3),
    on_limit=st.sampled_from(["train", "fill"]), limit=st.sampled_from([None, 2]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_no_sample_is_lost_when_groups_are_rejected_early(
    slots, share, jitter, reload, oversampling, order, unfinished, after, on_limit, limit, seed
):
    config = rollout(
        4, oversampling=oversampling, order=order, unfinished=unfinished, give_up_after=after, on_limit=on_limit,
        max_generation_batches=limit, max_carryover_staleness=2,
    )  # fmt: skip
    prompts, trained = Prompts(), []

    async def main():
        engine, grade, dropped = SimulatedEngine(slots, longest=60, jitter=jitter), coin_grader(share), 0
        sampler = Sampler(engine, grade, prompts, config, groups_per_step=3, seed=seed)
        for step in range(4):
            engine.weight_version = step
            try:
                batch = await sampler.collect(step)
            except SamplingLimitError:
                return
            for group in batch.groups:
                trained.append(group.prompt.id)
                assert_whole(group, 60)
                assert give_up_after(after)(group) is None
                assert keep_group(group)[0] or on_limit == "fill"
            dropped += sum(v for k, v in batch.metrics.items() if k.startswith("rollout/dropped/"))
            assert engine.running == 0
            if reload:
                state = through_json(sampler.state())
                sampler = Sampler(engine, grade, prompts, config, groups_per_step=3, seed=seed)
                sampler.restore(state)
        waiting = [group["prompt"]["id"] for group in carried(sampler)]
        assert len({*trained, *waiting}) == len(trained) + len(waiting)
        assert prompts.drawn == len(trained) + dropped + len(waiting)

    run_virtually(main())


@settings(max_examples=25)
@given(
    cuts=st.lists(st.floats(0.05, 8.0), min_size=1, max_size=5), jitter=st.floats(0.01, 1.0), reload=st.booleans(),
    oversampling=st.sampled_from([1.0, "adaptive"]), share=st.floats(0.2, 0.8),
)  # fmt: skip
def test_an_interrupted_step_makes_the_same_early_decisions(cuts, jitter, reload, oversampling, share):
    """How many tokens the aborted samples had depends on timing; nothing else does."""
    config = rollout(4, oversampling=oversampling, give_up_after=2)
    timed = ("wasted_tokens", "response_tokens", "length_dropped")

    async def main(cuts, jitter):
        engine, grade, prompts = SimulatedEngine(9, longest=60, jitter=jitter), coin_grader(share), Prompts()
        make = lambda: Sampler(engine, grade, prompts, config, groups_per_step=4, seed=3)  # noqa: E731
        sampler, found, cuts = make(), [], list(cuts)
        for step in range(3):
            engine.weight_version = step
            batch, sampler = await collect_with_cuts(sampler, make, step, cuts, reload)
            metrics = {n: v for n, v in batch.metrics.items() if not is_wall_clock(n) and not n.endswith(timed)}
            # Samples of a rejected group may or may not finish before they are aborted.
            metrics.pop("rollout/interrupted_share")
            found.append((metrics, as_json([group.to_state() for group in batch.groups])))
        return found

    assert run_virtually(main(cuts, jitter)) == run_virtually(main([], 0.0))


def test_a_filter_of_the_user_may_reject_early():
    asked = []

    def own_filter(group: Group):
        return True, "kept"

    def reject_early(group: Group):
        asked.append(sum(sample.grade is not None for sample in group.samples))
        return "odd" if int(group.prompt.id[1:]) % 2 else None

    own_filter.reject_early = reject_early
    (batch,), *_ = collect(rollout(), needed=3, group_filter=own_filter)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p2", "p4"]
    assert batch.metrics["rollout/dropped/early-odd"] == 2
    assert {0, 1} <= set(asked)


def test_a_group_that_was_rejected_early_does_not_fill_the_batch():
    async def all_correct(prompt, sample):
        return Grade(True, 1.0)

    config = rollout(3, give_up_after=2, max_generation_batches=1, on_limit="fill")
    with pytest.raises(SamplingLimitError, match="early-all-correct"):
        collect(config, grade=all_correct, needed=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_filter": "reward-range"}, "needs group_filter: accuracy, found reward-range"),
        ({"samples_per_prompt": 4}, r"give_up_after is 4: it must be less than samples_per_prompt \(4\)"),
    ],
)
def test_settings_that_cannot_work_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**{"sampler": {"give_up_after": 4}, **changes})
