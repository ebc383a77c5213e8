"""Groups that are rejected before all of their samples are finished: counted once, nothing lost, no matter when."""

import pytest
from simulation import (
    assert_whole,
    collect,
    rollout,
)
from test_group_states import graded

from megatron_dapo.algorithm.filtering import give_up_after
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.rollout.sampler import SamplingLimitError
from megatron_dapo.types import Grade, Group


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


def test_a_batch_without_a_grade_says_why_a_response_is_ungraded():
    async def too_large(prompt, sample):
        return Grade(True, 1e300)

    with pytest.raises(SamplingLimitError, match=r"step 1: 4 of 4 groups ungraded: invalid: 1e\+300 is not") as error:
        collect(rollout(3, max_generation_batches=1), grade=too_large)
    ((reason, group),) = error.value.rejected.items()
    assert reason == "ungraded" and group.prompt.id == "p0", "the first of each reason"


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


def test_rollouts_decide_and_not_their_samples():
    """The first rollout has two samples, both with its grade; the second is wrong."""
    group = graded(True, True, False, "running")
    group.samples[1].part, group.samples[1].index = 1, 0
    assert give_up_after(2)(group) is None
    assert give_up_after(1)(group) == "all-correct"
