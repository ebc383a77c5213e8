"""What an advantage estimator reads, and the two sums over tokens that estimators share. numpy, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

COLUMNS = 256  # sequences at a time: at 32k tokens each, 64 MB


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

    @property
    def lengths(self) -> Ints:
        """[rollouts]: generated tokens."""
        return np.bincount(self.rollout_of[self.generated], minlength=len(self.rewards))

    def generated_rewards(self, *, final: Bools | None = None) -> Doubles:
        """[generated tokens]: rewards of turns where they were earned, the rest of a rollout's reward at its last
        token. `final` [rollouts], False: without that rest."""
        turns = np.zeros(len(self.generated)) if self.turn_rewards is None else self.turn_rewards
        rest = self.rewards - np.bincount(self.rollout_of, turns, minlength=len(self.rewards))
        found, lengths = turns[self.generated], self.lengths
        counted = (lengths > 0) if final is None else (lengths > 0) & final
        found[np.cumsum(lengths)[counted] - 1] += rest[counted]
        return found

    def spread(self, of_generated: Doubles) -> Doubles:
        """[responses]: values of generated tokens, 0 at the others."""
        found = np.zeros(len(self.generated))
        found[self.generated] = of_generated
        return found


def whitened(advantages: Doubles, mask: Bools, eps: float) -> Doubles:
    """Mean 0 and unbiased std 1 over the tokens in `mask`; 0 where they are all equal."""
    counted = advantages[mask]
    if not counted.size or counted.max() == counted.min():
        return np.zeros_like(advantages)
    return (advantages - counted.mean()) / (counted.std(ddof=1) + eps)


def discounted_sums(values: Doubles, lengths: Ints, factors: Doubles) -> Doubles:
    """Σ_k factor^k · values[t + k] over the rest of each sequence, [tokens]. `factors`: [sequences].

    Sequences of similar length are columns of one table, so that a step of the recursion is one row of it.
    """
    found = np.empty_like(values)
    starts, order = np.cumsum(lengths) - lengths, np.argsort(lengths, kind="stable")
    for some in np.split(order, range(COLUMNS, len(order), COLUMNS)):
        rows = np.arange(lengths[some].max(initial=0))[:, None]
        inside = rows < lengths[some]
        places = np.where(inside, starts[some] + rows, 0)
        table = np.where(inside, values[places], 0.0) if values.size else np.zeros_like(places, float)
        for row in range(len(table) - 2, -1, -1):
            table[row] += factors[some] * table[row + 1]
        found[places[inside]] = table[inside]
    return found
