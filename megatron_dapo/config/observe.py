"""`observe`: what is shown and recorded in addition to metrics.jsonl, which is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
    warnings: bool = Field(True, description="Warn about unhealthy metrics and name likely causes (docs/diagnosis.md).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = Field(False, description="Event files in logs/tensorboard; needs the extra `tensorboard`.")
