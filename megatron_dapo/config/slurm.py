"""`slurm`: how a job is submitted."""

from __future__ import annotations

from pydantic import Field

from megatron_dapo.config.base import Section


class SlurmConfig(Section):
    partition: str | None = None
    account: str | None = None
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(8, ge=0)
    time: str = "24:00:00"
