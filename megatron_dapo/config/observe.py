"""`observe`: what is shown and recorded in addition to metrics.jsonl, which is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import Section


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`. Offline runs are uploaded later with `wandb sync`."""

    mode: Literal["off", "online", "offline"] = Field(
        "off", description="off: nothing is sent. online: sent during the run. offline: kept in logs/ and sent later."
    )
    project: str = Field("megatron-dapo", description="Project that the run belongs to.")
    entity: str | None = Field(None, description="User or team that owns the project; null: your default one.")
    name: str | None = Field(None, description="Name of the run; null: the name of the run directory.")
    group: str | None = Field(None, description="Runs of one group are shown together, e.g. seeds; null: none.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")


class ObserveConfig(Section):
    console: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="auto: rich on a terminal, plain elsewhere. rich: live progress. plain: a line per step."
    )
    samples_every: int = Field(10, ge=0, description="Write a transcript to samples/ every so many steps; 0: never.")
    samples_groups: int = Field(2, ge=1, description="Prompts in one transcript.")
    samples_responses: int = Field(4, ge=1, description="Responses per prompt; right and wrong ones alternate.")
    trace_every: int = Field(
        50, ge=0, description="Write a timeline to traces/ every so many steps, for ui.perfetto.dev; 0: never."
    )
    warnings: bool = Field(True, description="Warn about unhealthy metrics and name likely causes (docs/diagnosis.md).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    aliases: list[Literal["verl", "prime-rl"]] = Field(
        default_factory=list,
        description="Send metrics to wandb and TensorBoard also under the names of these tools (docs/monitoring.md).",
    )
    profile_steps: list[int] = Field(
        default_factory=list,
        max_length=2,
        description="[first, last]: profile these steps (they count from 1) with torch.profiler on the ranks of "
        "profile_ranks; the traces are in profiles/. Empty: never.",
    )
    profile_ranks: list[int] = Field([0], description="Ranks that profile_steps profiles.")
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = Field(False, description="Event files in logs/tensorboard; needs the extra `tensorboard`.")

    @model_validator(mode="after")
    def _steps_in_order(self) -> ObserveConfig:
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps is {steps}: expected [first, last], and 1 ≤ first ≤ last")
        return self
