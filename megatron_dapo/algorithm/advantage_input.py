"""What an advantage estimator reads, and the two sums over tokens that estimators share. numpy, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """The rollouts of a step. A rollout is one response, or several samples of it that follow each other.

    Response arrays are [responses]: the response tokens of all rollouts, concatenated.
    """

    rewards: Doubles  # [rollouts]: the score, with the rewards of turns, and the length penalty
    groups: Ints  # [rollouts]: those of one prompt have the same number
    valid: Bools  # [rollouts]; False: left out of all statistics, because it is ungraded or masked
    truncated: Bools  # [rollouts]
    offsets: Ints  # [rollouts + 1]: where the tokens of each rollout start
    generated: Bools  # [responses]: by the policy; the others come from tools and users
    in_loss: Bools  # [responses]: those of the generated tokens that are trained on
    turn_rewards: Doubles | None = (
        None  # [responses]: a part of `rewards`, at the last token of the turn that earned it
    )
    values: Doubles | None = None  # [responses]: the critic's, of the state before each token

    @property
    def rollout_of(self) -> Ints:
        """[responses]: the rollout of each token."""
        return np.repeat(np.arange(len(self.rewards)), np.diff(self.offsets))

    def steps(self) -> Iterator[tuple[int, Ints, Doubles]]:
        """Of each rollout with a generated token: its number, the places of its generated tokens in response arrays,
        and their rewards: those of turns where they were earned, the rest of the rollout's at the last token."""
        for rollout, (start, end) in enumerate(pairwise(self.offsets.tolist())):
            places = start + np.flatnonzero(self.generated[start:end])
            if places.size:
                rewards = np.zeros(len(places)) if self.turn_rewards is None else self.turn_rewards[places]
                rewards[-1] += self.rewards[rollout] - rewards.sum()
                yield rollout, places, rewards


def whitened(advantages: Doubles, mask: Bools, eps: float) -> Doubles:
    """Mean 0 and unbiased std 1 over the tokens in `mask`; 0 where they are all equal."""
    counted = advantages[mask]
    if not counted.size or counted.max() == counted.min():
        return np.zeros_like(advantages)
    return (advantages - counted.mean()) / (counted.std(ddof=1) + eps)


def discounted_sums(values: Doubles, factor: float) -> Doubles:
    """Σ_k factor^k · values[t + k] over the rest of the sequence, [tokens].

    By doubling: with sums over 1, 2, 4, … tokens a sequence of n needs log₂ n operations on arrays, instead of n.
    """
    found, span, power = values.copy(), 1, factor
    while span < len(found) and power:
        found[:-span] += power * found[span:]
        span, power = 2 * span, power * power
    return found
