"""`rollout`: how answers are sampled, and the engines that sample them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.base import Section


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = Field(
        "sglang", description="embedded: transformers in this process (CPU, tests). sglang: SGLang servers."
    )
    samples_per_prompt: int = Field(16, ge=1, description="G: responses per prompt.")
    max_prompt_tokens: int = Field(2048, gt=0)
    max_response_tokens: int = Field(20480, gt=0)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    stop: list[str] = Field(default_factory=list)
    dynamic_sampling: bool = Field(True, description="Drop groups that group_filter rejects and sample others.")
    group_filter: str = Field(
        "accuracy",
        description="accuracy: keep 0 < correct < G. reward-range: keep max ≠ min of the scores. "
        "python:module.function: your own, Group -> (keep, reason) or bool.",
    )
