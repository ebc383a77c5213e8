"""`observe`: what is shown and recorded besides metrics.jsonl, which is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.base import Section


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`. Offline runs are uploaded later with `wandb sync`."""

    mode: Literal["off", "online", "offline"] = Field(
        "off", description="off: nothing is sent. online: while the run goes on. offline: kept in logs/ to send later."
    )
    project: str = Field("megatron-dapo", description="The project that the run appears in.")
    entity: str | None = Field(None, description="User or team that owns the project; null: your default one.")
    name: str | None = Field(None, description="What the run is called there; null: the run directory's name.")
    group: str | None = Field(None, description="Runs with the same group are shown together, e.g. seeds; null: none.")
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")


class ObserveConfig(Section):
    console: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="auto: a live display on a terminal, one plain line per step elsewhere."
    )
    samples_every: int = Field(10, ge=0, description="Steps between two transcripts in samples/; 0: none.")
    samples_groups: int = Field(2, ge=1, description="Prompts in one transcript.")
    samples_answers: int = Field(4, ge=1, description="Answers to each of them; right and wrong ones take turns.")
    warnings: bool = Field(True, description="Say when a metric looks unhealthy, and why (docs/diagnosis.md).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = Field(False, description="Event files in logs/tensorboard; needs the extra `tensorboard`.")
