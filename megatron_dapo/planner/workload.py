"""The samples of one step and their lengths. Mean lengths are estimates that the user can replace."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.planner.assumptions import LENGTH_SIGMA
from megatron_dapo.planner.hardware import PlanError
from megatron_dapo.planner.lengths import Lengths, lengths_of


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
