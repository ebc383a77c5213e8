"""Response lengths: log-normal, cut off at the longest allowed response, with a given mean.

Long responses occupy an engine longer than short ones, so the sequences that an engine holds at some moment are longer
than the average response: their mean context is E[L²] / 2 E[L].
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from megatron_dapo.planner.assumptions import GROUP_SHARE, LENGTH_SIGMA

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """`mean` includes the responses that are cut off at `longest`. `sigma` 0: all responses have the mean length."""

    mean: float
    longest: int
    sigma: float = LENGTH_SIGMA
    group_share: float = GROUP_SHARE  # of the variance of log(length) that samples of a prompt have in common

    @cached_property
    def mu(self) -> float:
        """The mean of log(length) before the cut, found by bisection."""
        low, high = 0.0, math.log(self.longest) + 8 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(middle, 1) < self.mean else (low, middle)
        return low

    def _moment(self, mu: float, power: int) -> float:
        """E[min(X, longest)^power] of a log-normal X."""
        s, end = self.sigma, math.log(self.longest)
        inside = math.exp(power * mu + power * power * s * s / 2) * _NORMAL.cdf((end - mu - power * s * s) / s)
        return float(inside + self.longest**power * (1 - _NORMAL.cdf((end - mu) / s)))

    @property
    def constant(self) -> bool:
        return self.sigma <= 0 or self.mean >= 0.999 * self.longest

    @cached_property
    def held(self) -> float:
        """Mean number of response tokens of a running sequence, over time."""
        if self.constant:
            return self.mean / 2
        return self._moment(self.mu, 2) / (2 * self._moment(self.mu, 1))

    @cached_property
    def truncated(self) -> float:
        """Share of responses that reach `longest`."""
        if self.constant:
            return float(self.mean >= 0.999 * self.longest)
        return 1 - _NORMAL.cdf((math.log(self.longest) - self.mu) / self.sigma)

    def above(self, length: float) -> float:
        """Share of responses longer than `length`."""
        if self.constant:
            return float(length < self.mean)
        return 0.0 if length >= self.longest else 1 - _NORMAL.cdf((math.log(length) - self.mu) / self.sigma)

    def group(self, size: int, random_: random.Random) -> list[int]:
        """Lengths of one prompt's samples."""
        if self.constant:
            return [max(1, round(self.mean))] * size
        shared = random_.gauss(0, 1) * math.sqrt(self.group_share)
        own = math.sqrt(1 - self.group_share)
        return [
            max(1, min(self.longest, round(math.exp(self.mu + self.sigma * (shared + own * random_.gauss(0, 1))))))
            for _ in range(size)
        ]


@lru_cache(maxsize=64)
def lengths_of(mean: float, longest: int, sigma: float) -> Lengths:
    return Lengths(mean, longest, sigma)
