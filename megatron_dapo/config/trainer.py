"""`trainer`: how many steps, of what size, and what is saved."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_dapo.config.base import Section


class TrainerConfig(Section):
    run_dir: str = "runs/default"
    steps: int = Field(330, gt=0, description="Rollout steps; each makes prompts_per_step/mini_batch_prompts updates.")
    prompts_per_step: int = Field(512, gt=0)
    mini_batch_prompts: int = Field(32, gt=0, description="Prompts (groups) per optimizer update.")
    seed: int = 0

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> TrainerConfig:
        if self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of mini_batch_prompts "
                f"({self.mini_batch_prompts}), or the last update of every step is smaller than the others"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // self.mini_batch_prompts
