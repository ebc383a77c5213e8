"""Group filters of dynamic sampling: does a group carry a learning signal? Every filter returns (keep, reason).

Reasons are counted, so that a strict filter can be told from a broken grader. A filter that raises ends the run: an
exception is never a rejection.

A filter may also have an attribute `reject_early`, a function Group -> reason or None. It is asked whenever a sample of
the group has been graded; samples without a grade are still running. A reason rejects the group: its remaining samples
are aborted. The function must depend on the group alone and must not change its answer when more samples are graded,
so that the result does not depend on timing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_dapo.errors import UserError
from megatron_dapo.plugins import in_one_line, is_plugin, load_function
from megatron_dapo.types import Group

GroupFilter = Callable[[Group], tuple[bool, str]]
EarlyRejection = Callable[[Group], str | None]

KEPT = "kept"
SMALLEST_STD = 1e-6


def keep_group(group: Group) -> tuple[bool, str]:
    """DAPO's filter: some samples are correct and some are wrong. Ungraded samples are neither.

    It looks at correctness, never at a reward: a length penalty must not make an all-correct group look informative.
    """
    accuracies = group.accuracies
    if not accuracies:
        return False, "ungraded"
    if all(accuracies):
        return False, "all-correct"
    if not any(accuracies):
        return False, "all-wrong"
    return True, KEPT


def reward_range(group: Group) -> tuple[bool, str]:
    """The scores are not all equal. For graders whose scores are finer than right or wrong."""
    scores = _scores(group)
    if not scores:
        return False, "ungraded"
    return (True, KEPT) if max(scores) != min(scores) else (False, "equal-scores")


def reward_std(group: Group) -> tuple[bool, str]:
    """The scores' unbiased std is above 1e-6, as other frameworks filter. `reward_range` needs no threshold."""
    scores = _scores(group)
    if not scores:
        return False, "ungraded"
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return (True, KEPT) if std > SMALLEST_STD else (False, "small-std")


def keep_all(group: Group) -> tuple[bool, str]:
    return True, KEPT


FILTERS: dict[str, GroupFilter] = {
    "accuracy": keep_group,
    "reward-range": reward_range,
    "reward-std": reward_std,
    "none": keep_all,
}


def give_up_after(samples: int) -> EarlyRejection:
    """Rejects a group whose first `samples` rollouts are all correct or all wrong.

    The first by index, not the first to finish: those would be the short ones. A group with an ungraded sample among
    them is not rejected early.
    """

    def reject_early(group: Group) -> str | None:
        grades = [sample.grade for sample in group.samples if sample.part == 0][:samples]
        verdicts = [grade.correct for grade in grades if grade is not None and grade.correct is not None]
        if len(verdicts) < samples:
            return None
        return "all-correct" if all(verdicts) else None if any(verdicts) else "all-wrong"

    return reject_early


def load_group_filter(name: str) -> GroupFilter:
    """The filter that `rollout.group_filter` names: one of FILTERS, or the user's python:module.function."""
    if name in FILTERS:
        return FILTERS[name]
    if not is_plugin(name):
        known = ", ".join(FILTERS)
        raise UserError(f"rollout.group_filter: expected one of {known} or python:module.function, found {name!r}")
    return _UserFilter(name, load_function(name, "rollout.group_filter"))


class _UserFilter:
    """Calls the user's function, which may return a bool alone; checks what it returns."""

    def __init__(self, name: str, function: Callable[[Group], Any]) -> None:
        self._name = name
        self._function = function
        self.reject_early = self._reject_early if hasattr(function, "reject_early") else None

    def __call__(self, group: Group) -> tuple[bool, str]:
        match returned := self._call(self._function, group):
            case bool() | np.bool_():
                return bool(returned), KEPT if returned else "rejected"
            case (bool() | np.bool_() as keep, str() as reason):
                return bool(keep), reason
        raise self._unexpected(self._name, "a bool or (bool, reason)", returned, group)

    def _reject_early(self, group: Group) -> str | None:
        returned = self._call(self._function.reject_early, group)  # type: ignore[attr-defined]
        if returned is None or isinstance(returned, str):
            return returned
        raise self._unexpected(f"{self._name}.reject_early", "a reason or None", returned, group)

    def _call(self, function: Callable[[Group], Any], group: Group) -> Any:
        try:
            return function(group)
        except Exception as error:
            raised = in_one_line(error, function)
            raise UserError(
                f"rollout.group_filter: {self._name}, prompt {group.prompt.id!r}, raised {raised}"
            ) from error

    def _unexpected(self, name: str, expected: str, returned: Any, group: Group) -> UserError:
        return UserError(
            f"rollout.group_filter: {name} must return {expected}, but returned {returned!r} on prompt "
            f"{group.prompt.id!r}"
        )


def _scores(group: Group) -> list[float]:
    """Raw scores of the graded rollouts, without penalties."""
    scores = [grade.score for grade in group.grades]
    if not all(math.isfinite(score) for score in scores):
        raise UserError(
            f"prompt {group.prompt.id!r}: expected finite scores, found {scores}; a grader that cannot decide must "
            "return correct=None"
        )
    return scores
