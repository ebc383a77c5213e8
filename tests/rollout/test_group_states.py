"""The parts of a step: the table of group states, the fill policy, and the state that is carried over."""

import pytest
from simulation import Prompts, through_json

from megatron_dapo.config.rollout import SamplerConfig
from megatron_dapo.rollout.accounting import StepAccounting
from megatron_dapo.rollout.carry_over import CarryOver, DrawnPrompts, InterruptedStep
from megatron_dapo.rollout.fill_policy import FillPolicy
from megatron_dapo.rollout.pending_group import GroupState, GroupTable, PendingGroup, new_samples
from megatron_dapo.types import Group


def pending(serial, seeds=(1, 2)):
    prompt = Prompts(start=serial)()
    return PendingGroup(serial, 0, Group(prompt, new_samples(prompt, list(seeds))))


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


@pytest.mark.parametrize(
    ("options", "kept", "unused", "wanted"),
    [
        ({}, 0, 0, 4),
        ({}, 3, 9, 1),
        ({}, 5, 0, -1),
        ({"oversampling": 1.5}, 1, 0, 5),  # ceil(3 × 1.5)
        ({"fill": "dynamic"}, 1, 2, 1),
        ({"fill": "dynamic"}, 1, 3, 0),
        ({"fill": "dynamic"}, 0, 9, 1),  # nothing kept yet: one more
    ],
)
def test_groups_in_flight_follow_from_what_is_missing(options, kept, unused, wanted):
    policy = FillPolicy(SamplerConfig(**{"oversampling": 1} | options), 4)
    assert policy.wanted_in_flight(kept, unused) == wanted


def test_the_limit_counts_oversampled_batches():
    policy = FillPolicy(SamplerConfig(oversampling=1.3, max_generation_batches=2), 4)
    assert not policy.limit_reached(11) and policy.limit_reached(12)  # 2 × ceil(5.2)
    assert not FillPolicy(SamplerConfig(max_generation_batches=None), 4).limit_reached(10**9)


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


def test_states_of_earlier_versions_load():
    """They kept an interrupted step under `cut`, with `tally` and `repeats` inside; or nothing of the kind."""
    state = through_json(example_carry_over().to_state())
    step, drawn = state.pop("interrupted"), state.pop("drawn")
    assert CarryOver.from_state(state).interrupted is None
    older = {**state, "cut": {**step, "tally": step["accounting"], "repeats": drawn["counts"]}}
    del older["cut"]["accounting"]
    found = CarryOver.from_state(older)
    assert found.drawn == DrawnPrompts(4, drawn["counts"]) and found.interrupted.accounting.dropped["all-wrong"] == 2
    assert through_json(found.to_state()) == {**state, "interrupted": step, "drawn": drawn}
