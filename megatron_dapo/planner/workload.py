"""The samples of one step and their lengths. Mean lengths are estimates that the user can replace.

Response lengths are log-normal, cut off at the longest allowed response, with a given mean. Long responses occupy an
engine longer than short ones, so the sequences that an engine holds at some moment are longer than the average
response: their mean context is E[L²] / 2 E[L].
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from megatron_dapo.config import Config
from megatron_dapo.planner.assumptions import GROUP_SHARE, LENGTH_SIGMA
from megatron_dapo.planner.hardware import PlanError

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


@dataclass(frozen=True, slots=True)
class Workload:
    """`mean_*` are averages over samples; `kept` is the share of sampled groups that dynamic sampling keeps."""

    prompts: int  # groups that a step trains on
    samples_per_prompt: int
    updates: int
    mean_prompt: int
    mean_response: int
    max_prompt: int
    max_response: int
    kept: float = 1.0
    log_prob_passes: int = 0
    sigma: float = LENGTH_SIGMA  # of the logarithm of response lengths; 0: all are equal

    def __post_init__(self) -> None:
        for name, value, most in (
            ("--mean-prompt", self.mean_prompt, self.max_prompt),
            ("--mean-response", self.mean_response, self.max_response),
        ):
            if not 1 <= value <= most:
                raise PlanError(f"{name} is {value}, but must be between 1 and the configured maximum of {most}")
        if not 0 < self.kept <= 1:
            raise PlanError(f"--kept is {self.kept}: the share of kept groups must be above 0 and at most 1")
        if not 0 <= self.sigma <= 3:
            raise PlanError(f"--sigma is {self.sigma}: expected 0 (equal lengths) to 3, usually {LENGTH_SIGMA}")

    @classmethod
    def of(
        cls,
        config: Config,
        mean_prompt: int | None = None,
        mean_response: int | None = None,
        kept: float | None = None,
        sigma: float | None = None,
    ) -> Workload:
        rollout, trainer = config.rollout, config.trainer
        updates = trainer.updates_per_step
        reference = 1 if config.algorithm.kl.coefficient else 0
        return cls(
            prompts=trainer.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt,
            updates=updates,
            mean_prompt=min(rollout.max_prompt_tokens, 256) if mean_prompt is None else mean_prompt,
            mean_response=max(1, rollout.max_response_tokens // 4) if mean_response is None else mean_response,
            max_prompt=rollout.max_prompt_tokens,
            max_response=rollout.max_response_tokens,
            kept=(0.5 if rollout.dynamic_sampling else 1.0) if kept is None else kept,
            log_prob_passes=int(config.recomputes_old_logprobs) + reference,
            sigma=LENGTH_SIGMA if sigma is None else sigma,
        )

    @property
    def lengths(self) -> Lengths:
        return lengths_of(self.mean_response, self.max_response, self.sigma)

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples // self.updates

    @property
    def generated(self) -> int:
        """Samples that the engines generate, including those that are not kept."""
        return round(self.samples / self.kept)

    @property
    def mean_length(self) -> int:
        return self.mean_prompt + self.mean_response

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_response
