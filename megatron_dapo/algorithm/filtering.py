"""Group filters of dynamic sampling: does a group carry a learning signal? Every filter returns (keep, reason).

Reasons are counted, so that a strict filter can be told from a broken grader. A filter that raises ends the run: an
exception is never a rejection.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_dapo.errors import UserError
from megatron_dapo.plugins import is_plugin, load_function
from megatron_dapo.types import Group

GroupFilter = Callable[[Group], tuple[bool, str]]

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


def load_group_filter(name: str) -> GroupFilter:
    """The filter that `rollout.group_filter` names: one of FILTERS, or the user's python:module.function."""
    if is_plugin(name):
        return _user_filter(name, load_function(name, "rollout.group_filter"))
    if name not in FILTERS:
        known = ", ".join(FILTERS)
        raise UserError(f"rollout.group_filter: expected one of {known} or python:module.function, found {name!r}")
    return FILTERS[name]


def _user_filter(name: str, function: Callable[[Group], Any]) -> GroupFilter:
    """Wraps the user's function, which may return a bool alone, so that it returns (keep, reason)."""

    def checked(group: Group) -> tuple[bool, str]:
        try:
            returned = function(group)
        except Exception as error:
            raise UserError(
                f"rollout.group_filter: {name} raised {type(error).__name__} on prompt {group.prompt.id!r}: {error}"
            ) from error
        match returned:
            case bool() | np.bool_():
                return bool(returned), KEPT if returned else "rejected"
            case (bool() | np.bool_() as keep, str() as reason):
                return bool(keep), reason
        raise UserError(
            f"rollout.group_filter: {name} must return a bool or (bool, reason), "
            f"but returned {returned!r} on prompt {group.prompt.id!r}"
        )

    return checked


def _scores(group: Group) -> list[float]:
    """Raw scores of the graded samples, without penalties."""
    scores = [s.grade.score for s in group.samples if s.grade is not None and not s.grade.ungraded]
    if not all(math.isfinite(score) for score in scores):
        raise UserError(
            f"prompt {group.prompt.id!r}: expected finite scores, found {scores}; a grader that cannot decide must "
            "return correct=None"
        )
    return scores
