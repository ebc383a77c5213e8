"""Rewards of single turns as advantages of tokens: a turn is not credited with rewards that were earned before it.

The score of a rollout includes the rewards of all its turns. With `algorithm.turn_credit: turn`, the tokens of turn k
are judged by the score without the rewards of the turns before k, compared with the mean of that over the group, where
a rollout with fewer turns counts with all of its rewards removed. The divisor stays that of the group's advantages.
Without rewards of turns, nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dapo.policy.batch import Floats
from megatron_dapo.types import Sample

Rollout = Sequence[Sample]


def turn_advantages(
    groups: Sequence[Sequence[Rollout]], totals: Sequence[np.ndarray], *, normalize_std: bool, eps: float
) -> Floats:
    """[responses]: what is added to the advantage of every token. `totals[g]`: scores of the rollouts of group g."""
    found = [
        _of_group(rollouts, _divisor(rollouts, scores, normalize_std, eps))
        for rollouts, scores in zip(groups, totals, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.float32), *found]).astype(np.float32)


def _of_group(rollouts: Sequence[Rollout], divisor: float) -> np.ndarray:
    earned = [_earned_before(rollout) for rollout in rollouts]
    graded = [before for before, rollout in zip(earned, rollouts, strict=True) if _graded(rollout)]
    parts = []
    for rollout, before in zip(rollouts, earned, strict=True):
        turn = 0
        for sample in rollout:
            values = np.zeros(sample.length)
            for span in sample.turns:
                if span.generated:
                    mean = np.mean([other[min(turn, len(other) - 1)] for other in graded]) if graded else 0.0
                    values[span.start : span.end] = -(before[turn] - mean) / divisor if _graded(rollout) else 0.0
                    turn += 1
            parts.append(values)
    return np.concatenate([np.zeros(0), *parts])


def _earned_before(rollout: Rollout) -> list[float]:
    """Rewards before each generated turn, and at the end those of all turns."""
    rewards = [span.reward or 0.0 for sample in rollout for span in sample.turns if span.generated]
    return [0.0, *np.cumsum(rewards).tolist()]


def _divisor(rollouts: Sequence[Rollout], scores: np.ndarray, normalize_std: bool, eps: float) -> float:
    """1 where all scores are equal: there the rewards alone differ."""
    graded = np.array([_graded(rollout) for rollout in rollouts], dtype=np.bool_)
    if not normalize_std or graded.sum() < 2:
        return 1.0
    std = float(np.std(scores[graded], ddof=1))
    return std + eps if std > 0 else 1.0


def _graded(rollout: Rollout) -> bool:
    grade = rollout[0].grade
    return grade is not None and not grade.ungraded
