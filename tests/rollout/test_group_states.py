"""The parts of a step: the table of group states, the fill policy, the counts, and the state that is carried over."""

import pytest
from simulation import Prompts, through_json

from megatron_dapo.config.rollout import RolloutConfig, SamplerConfig
from megatron_dapo.errors import UserError
from megatron_dapo.rollout.accounting import STALE, UNFINISHED, Occupancy, StepAccounting
from megatron_dapo.rollout.fill_policy import FillPolicy, check_staleness, staleness_metrics
from megatron_dapo.rollout.pending_group import (
    CarryOver,
    DrawnPrompts,
    GroupState,
    GroupTable,
    InterruptedStep,
    PendingGroup,
    new_samples,
)
from megatron_dapo.types import Grade, Group, WeightSpan, as_tokens


def pending(serial, seeds=(1, 2)):
    prompt = Prompts(start=serial)()
    return PendingGroup(serial, 0, Group(prompt, new_samples(prompt, list(seeds))))


def graded(*verdicts):
    """A group of samples that are correct, wrong, ungraded (None) or unfinished ("running")."""
    group = pending(0, seeds=range(len(verdicts))).group
    for sample, verdict in zip(group.samples, verdicts, strict=True):
        sample.grade = None if verdict == "running" else Grade(verdict, 0.0)
    return group


def test_a_group_is_in_exactly_one_state():
    table, groups = GroupTable(), [pending(serial) for serial in (2, 0, 1)]
    for group in groups:
        table.put(group, GroupState.RUNNING)
    table.put(groups[0], GroupState.KEPT)
    table.put(groups[0], GroupState.KEPT)
    assert [table.count(state) for state in (GroupState.RUNNING, GroupState.KEPT)] == [2, 1]
    assert [p.serial for p in table.ordered(GroupState.KEPT, GroupState.RUNNING)] == [0, 1, 2]
    assert table.first(GroupState.KEPT, GroupState.RUNNING).serial == 0
    table.remove(groups[1])
    assert table.first(*GroupState).serial == 1 and table.count(*GroupState) == 2
    assert table.first(GroupState.ENDED) is None and list(table.unordered(GroupState.KEPT)) == [groups[0]]


def test_the_limit_counts_oversampled_batches():
    policy = FillPolicy(SamplerConfig(oversampling=1.3, max_generation_batches=2), 4)
    assert not policy.limit_reached(11) and policy.limit_reached(12)  # 2 × ceil(5.2)
    assert not FillPolicy(SamplerConfig(max_generation_batches=None), 4).limit_reached(10**9)


def test_oversampling_rounds_up():
    policy = FillPolicy(SamplerConfig(oversampling=1.3), 4)
    assert [policy.wanted_in_flight(kept, 0) for kept in (0, 1, 3, 4)] == [6, 4, 2, 0]


def test_only_requests_that_the_engine_runs_occupy_it():
    occupancy = Occupancy(0.0, max_running=4)
    occupancy.change(0.0, requests=10, groups=2)
    occupancy.change(1.0, requests=1)
    occupancy.change(3.0, requests=0, groups=0)
    assert occupancy.metrics() == {
        "rollout/groups_in_flight": 2.0, "rollout/engine_occupancy": (4 * 1 + 1 * 2) / (4 * 3),
    }  # fmt: skip


def test_a_partial_group_must_finish_one_version_before_it_is_too_stale():
    policy = FillPolicy(SamplerConfig(unfinished="continue", max_carryover_staleness=2), 4)
    assert [policy.too_stale(n) for n in range(4)] == [False, False, False, True]
    assert [policy.must_finish_now(n) for n in range(4)] == [False, False, True, True]
    assert not FillPolicy(SamplerConfig(unfinished="finish"), 4).must_finish_now(9)


def example_carry_over():
    counts = StepAccounting(submitted=6, failed_groups=1)
    counts.drop(pending(3).group, "all-wrong")
    step = InterruptedStep(4, counts, 2.5, running=[1], rejected=[(pending(3), "all-wrong")], last_failure="gone")
    drawn = DrawnPrompts(4)
    drawn.counts["p1"] += 2
    return CarryOver(5, surplus=[pending(0)], unfinished=[pending(1)], drawn=drawn, interrupted=step)


def test_the_carried_over_state_survives_exactly():
    state = example_carry_over().to_state()
    for found in (state, through_json(state)):
        assert through_json(CarryOver.from_state(found).to_state()) == through_json(state)
    empty = CarryOver.from_state(through_json(CarryOver().to_state()))
    assert empty.interrupted is None and empty.surplus == [] and empty.drawn.step == -1


# ---- the accuracy of all sampled responses, which dynamic sampling hides from that of trained ones ----


def accuracy_all(accounting: StepAccounting) -> float | None:
    return accounting.metrics([], 1.0).get("reward/accuracy_all")


def test_every_graded_sample_of_a_decided_group_counts_once():
    accounting = StepAccounting()
    assert accuracy_all(accounting) is None
    trained, easy, hard = graded(True, False, None), graded(True, True, True), graded(False, False, False)
    accounting.drop(easy, "all-correct")
    accounting.drop(hard, "all-wrong")
    accounting.drop(graded(True, True, True), UNFINISHED)
    accounting.drop(graded(True, True, True), STALE)
    accounting.train([trained])
    assert accuracy_all(accounting) == pytest.approx(4 / 8), "1 of 2 trained, 3 of 3 easy, 0 of 3 hard"
    restored = StepAccounting.from_state(accounting.to_state())
    assert accuracy_all(restored) == accuracy_all(accounting)


def test_a_rejected_group_that_fills_the_batch_counts_once():
    accounting = StepAccounting()
    easy, hard = graded(True, True), graded(False, False)
    for rejected in (easy, hard):
        accounting.drop(rejected, "flat")
    accounting.undrop(easy, "flat")
    accounting.train([easy])
    assert accuracy_all(accounting) == pytest.approx(2 / 4)


def test_a_response_without_tokens_has_no_version():
    """It is not as old as the weights that the run began with."""
    mixed, empty = graded(True, False), graded(True)
    mixed.samples[0].weight_spans = [WeightSpan(6, 0, 3)]
    found = staleness_metrics([mixed, empty], version=7)
    assert found == {"rollout/staleness": 1, "rollout/staleness_max": 1, "rollout/staleness_tokens": 1}


# ---- staleness: the oldest token counts ----


def test_a_group_is_as_old_as_its_oldest_token():
    one, other = pending(0), pending(1)
    first, second = one.group.samples
    first.response_tokens, second.response_tokens = as_tokens([1, 2, 3]), as_tokens([1])
    first.weight_spans = [WeightSpan(2, 0, 1), WeightSpan(5, 1, 3)]
    second.weight_spans = [WeightSpan(4, 0, 1)]
    other.group.samples[0].response_tokens = as_tokens([1, 2])
    other.group.samples[0].weight_spans = [WeightSpan(6, 0, 2)]
    del other.group.samples[1]
    assert first.oldest_version == one.oldest_version == one.group.oldest_version == 2
    found = staleness_metrics([one.group, other.group], 6)
    assert found["rollout/staleness"] == (4 + 0) / 2 and found["rollout/staleness_max"] == 4
    assert found["rollout/staleness_tokens"] == pytest.approx((4 * 1 + 1 * 2 + 2 * 1 + 0 * 2) / 6)
    config = RolloutConfig(max_staleness=4)
    check_staleness(found, config, 6)
    with pytest.raises(UserError, match="5 weight versions old"):
        check_staleness(found | {"rollout/staleness_max": 5.0}, config, 6)


@pytest.mark.parametrize(
    ("reason", "unused", "counted"),
    [("all-wrong", 1, 2), (STALE, 0, 0), (UNFINISHED, 1, 0), ("early-all-wrong", 1, 0)],
)
def test_what_a_dropped_group_counts(reason, unused, counted):
    """A stale group is of an earlier step: nothing replaces it. Grades of incomplete groups depend on timing."""
    counts, group = StepAccounting(), graded(False, False)
    for sample in group.samples:
        sample.response_tokens = as_tokens([1, 2, 3])
    counts.drop(group, reason)
    assert (counts.unused_groups, counts.graded) == (unused, counted)
    assert counts.wasted_tokens == 6 and counts.dropped[reason] == 2


def test_a_dynamic_batch_is_full_with_one_kept_group():
    """Every decided group counts, but training needs one that was kept."""
    policy = FillPolicy(SamplerConfig(fill="dynamic"), 4)
    assert [policy.missing(*counts) for counts in ((0, 0), (0, 3), (0, 9), (1, 2), (1, 3), (2, 9))] == [
        4,
        1,
        1,
        1,
        0,
        0,
    ]
