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
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from megatron_dapo.config import Config
from megatron_dapo.errors import UserError
from megatron_dapo.planner.assumptions import GROUP_SHARE, LENGTH_SIGMA

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """`mean` includes the responses that are cut off at `longest`. `sigma` 0: all responses have the mean length.
    `pareto` above 0: a Pareto distribution with this index instead of a log-normal one; 1 to 2 are heavy tails."""

    mean: float
    longest: int
    sigma: float = LENGTH_SIGMA
    group_share: float = GROUP_SHARE  # of the variance of log(length) that samples of a prompt have in common
    pareto: float = 0.0

    @cached_property
    def mu(self) -> float:
        """The mean of log(length) before the cut (Pareto: of its least value), found by bisection."""
        low, high = 0.0, math.log(self.longest) + 8 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(middle, 1) < self.mean else (low, middle)
        return low

    def _moment(self, mu: float, power: int) -> float:
        """E[min(X, longest)^power]."""
        s, end = self.sigma, math.log(self.longest)
        if self.pareto:
            least, index = math.exp(mu), self.pareto
            if least >= self.longest:
                return float(self.longest**power)
            above = self.longest**power * (least / self.longest) ** index
            order = power - index if abs(power - index) > 1e-6 else 1e-6
            return float(above + index * least**index * (self.longest**order - least**order) / order)
        inside = math.exp(power * mu + power * power * s * s / 2) * _NORMAL.cdf((end - mu - power * s * s) / s)
        return float(inside + self.longest**power * (1 - _NORMAL.cdf((end - mu) / s)))

    @property
    def constant(self) -> bool:
        return (self.sigma <= 0 and not self.pareto) or self.mean >= 0.999 * self.longest

    def at(self, normal: float) -> float:
        """The length at a value of the standard normal distribution, before the cut."""
        if self.pareto:
            return math.exp(min(self.mu - math.log(max(1e-300, _NORMAL.cdf(-normal))) / self.pareto, 700.0))
        return math.exp(self.mu + self.sigma * normal)

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
        return [max(1, round(min(self.longest, self.at(shared + own * random_.gauss(0, 1))))) for _ in range(size)]


_lengths = lru_cache(maxsize=64)(Lengths)  # each finds its `mu` once


class Typical(NamedTuple):
    """What was measured with a model and a data set: tokens of prompts and responses, and the share of kept groups."""

    model: str  # part of its name
    data: str  # part of the file's name, in lower case
    prompt: int
    response: int
    kept: float
    source: str


# The first match counts. Responses grow during a run: these are means over it.
TYPICAL = (
    Typical("Qwen2.5-32B", "dapo-math", 256, 2700, 0.5, "DAPO, figures: 750 tokens at first, 4500 in the end"),
    Typical("1.5B", "gsm8k", 150, 285, 0.6, "this project on an H200: yield from 0.82 to 0.47 in 15 steps"),
    Typical("Qwen3-235B", "openmathinstruct", 118, 5700, 0.5, "NeMo-RL, at most 8192"),
    Typical("Qwen3-32B", "openmathinstruct", 104, 3250, 0.5, "NeMo-RL, at most 4096"),
    Typical("Qwen3-30B", "openmathinstruct", 103, 3200, 0.5, "NeMo-RL, at most 4096"),
    Typical("Llama-3.1-8B", "openmathinstruct", 130, 1060, 0.5, "NeMo-RL, at most 4096"),
)


def typical_of(config: Config) -> Typical | None:
    """For the model and the first data file."""
    data = next((Path(file.path).name.lower() for file in config.data.files.values()), "")
    model, longest = config.policy.model, config.rollout.max_response_tokens
    found = [item for item in TYPICAL if item.model in model and item.data in data.replace("_", "-")]
    return found[0] if found and found[0].response < longest else None


def log_prob_passes(config: Config) -> int:
    """Forward passes over the batch before the updates: of the old policy and of the reference."""
    return int(config.recomputes_old_logprobs) + bool(config.algorithm.kl.coefficient)


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
    pareto: float = 0.0  # above 0: index of a Pareto distribution of the lengths

    def __post_init__(self) -> None:
        for name, value, most in (
            ("--mean-prompt", self.mean_prompt, self.max_prompt),
            ("--mean-response", self.mean_response, self.max_response),
        ):
            if not 1 <= value <= most:
                raise UserError(f"{name} is {value}, but must be between 1 and the configured maximum of {most}")
        if not 0 < self.kept <= 1:
            raise UserError(f"--kept is {self.kept}: the share of kept groups must be above 0 and at most 1")
        if not 0 <= self.sigma <= 3:
            raise UserError(f"--sigma is {self.sigma}: expected 0 (equal lengths) to 3, usually {LENGTH_SIGMA}")
        if not (self.pareto == 0 or 1 < self.pareto <= 20):
            raise UserError(
                f"--pareto is {self.pareto}: expected an index above 1; 1.2 is a very heavy tail, 3 a light one"
            )

    @classmethod
    def of(
        cls,
        config: Config,
        mean_prompt: int | None = None,
        mean_response: int | None = None,
        kept: float | None = None,
        sigma: float | None = None,
        pareto: float | None = None,
    ) -> Workload:
        rollout, trainer, typical = config.rollout, config.trainer, typical_of(config)
        usual = (256, max(1, rollout.max_response_tokens // 4), 0.5)
        prompt, response, share = (typical.prompt, typical.response, typical.kept) if typical else usual
        return cls(
            prompts=trainer.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt,
            updates=trainer.updates_per_step,
            mean_prompt=min(rollout.max_prompt_tokens, prompt) if mean_prompt is None else mean_prompt,
            mean_response=response if mean_response is None else mean_response,
            max_prompt=rollout.max_prompt_tokens,
            max_response=rollout.max_response_tokens,
            kept=(share if rollout.dynamic_sampling else 1.0) if kept is None else kept,
            log_prob_passes=log_prob_passes(config),
            sigma=LENGTH_SIGMA if sigma is None else sigma,
            pareto=pareto or 0.0,
        )

    @property
    def lengths(self) -> Lengths:
        return _lengths(self.mean_response, self.max_response, self.sigma, pareto=self.pareto)

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
    def attended_length(self) -> float:
        """E[L²] / E[L] of whole sequences: the length that the average token's sequence has."""
        prompt, response = self.mean_prompt, self.mean_response
        return (prompt**2 + 2 * response * (prompt + self.lengths.held)) / (prompt + response)

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_response
