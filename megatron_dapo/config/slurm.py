"""`slurm`: the job that `megatron-dapo slurm` writes and submits: its nodes, its limits, and what surrounds the run."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_dapo.config.base import Section

# What sbatch --time takes: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})|UNLIMITED|INFINITE", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SlurmConfig(Section):
    partition: str | None = Field(None, description="Where the job runs, as sinfo names it; null: the default one.")
    account: str | None = Field(None, description="Who pays, as sacctmgr names it; null: your default account.")
    qos: str | None = Field(None, description="Quality of service, with its own limits; null: the account's default.")
    reservation: str | None = Field(None, description="Run inside this reservation; null: in none.")
    job_name: str = Field("", description="What squeue shows; empty: the name of the run directory.")
    time: str = Field("24:00:00", description="Time limit, as sbatch takes it; a run may be longer than it.")
    extra: list[str] = Field(default_factory=list, description="More sbatch options, e.g. --constraint=h100.")

    mode: Literal["colocated", "disaggregated"] = Field(
        "colocated",
        description="colocated: engines on the trainer's nodes. disaggregated: engine_nodes of the nodes only serve.",
    )
    nodes: int = Field(1, ge=1, description="All nodes of the job.")
    engine_nodes: int = Field(0, ge=0, description="Of these: nodes that only serve engines (disaggregated).")
    gpus_per_node: int = Field(8, ge=0, description="GPUs of each node that the job gets; 0: a cluster without GPUs.")
    tasks_per_node: int | None = Field(None, ge=1, description="Trainer ranks; null: one per GPU, or one per node.")
    cpus_per_task: int | None = Field(
        None, ge=1, description="Cores for each trainer rank; null: what the cluster gives (exclusive: all it has)."
    )
    memory: str | None = Field(None, description="Per node, e.g. 0 (all of it) or 900G.")
    exclusive: bool = Field(True, description="No other job on these nodes.")
    router: bool = Field(False, description="sglang-router in front of the servers.")
    router_port: int = Field(29000, ge=1024, le=65535, description="Port of sglang-router on the first engine node.")

    signal_seconds: int = Field(600, ge=1, description="This long before the limit the run saves and is queued again.")
    restarts: int = Field(20, ge=0, description="Times that the job may start again: time limit, crash, lost node.")
    crashes: int = Field(2, ge=1, description="Crashes in a row without a new checkpoint after which it gives up.")
    end_seconds: int = Field(120, ge=1, description="When one rank has ended, the others have this long.")

    setup: list[str] = Field(default_factory=list, description="Shell lines before anything runs, e.g. module load.")
    python: str = Field("", description="Python that has megatron-dapo; empty: this one, python3 in a container.")
    environment: dict[str, str] = Field(default_factory=dict, description="Exported to all processes, e.g. NCCL_*.")
    container_image: str | None = Field(None, description="pyxis/enroot: run everything inside this image.")
    container_mounts: list[str] = Field(
        default_factory=list,
        description="What the container sees, as HOST:CONTAINER[:flags]; empty: the folder you submit "
        "from and the run directory.",
    )
    container_arguments: list[str] = Field(default_factory=list, description="More pyxis options of srun.")

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: object) -> object:
        # YAML 1.1 reads 24:00:00 without quotes as a number of base 60, and nobody means 86400 minutes.
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(f"found the number {value}: put the time in quotes, e.g. '24:00:00' or '{value}'")
        if isinstance(value, str) and not TIME.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a time: use hours:minutes:seconds or days-hours, e.g. '24:00:00', '7-0'"
            )
        return value

    @model_validator(mode="after")
    def _nodes(self) -> SlurmConfig:
        if self.mode == "disaggregated":
            if self.engine_nodes == 0:
                raise ValueError("mode is disaggregated but engine_nodes is 0: nobody would serve; set it to 1 or more")
            if self.engine_nodes >= self.nodes:
                raise ValueError(
                    f"engine_nodes is {self.engine_nodes} of {self.nodes} nodes, which leaves none to train on: "
                    "raise nodes"
                )
        elif self.engine_nodes:
            raise ValueError(f"engine_nodes is {self.engine_nodes} but mode is colocated: set mode to disaggregated")
        return self

    @model_validator(mode="after")
    def _lines(self) -> SlurmConfig:
        for line in self.extra:
            if not line.startswith("-") or "\n" in line:
                raise ValueError(f"extra has {line!r}: expected sbatch options, one per entry, e.g. --constraint=h100")
        wrong = [name for name in self.environment if not NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"environment has {wrong[0]!r}, which is no name of a variable")
        if self.container_mounts and not self.container_image:
            raise ValueError("container_mounts without container_image: name the image")
        return self

    @property
    def trainer_nodes(self) -> int:
        return self.nodes - self.engine_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def ranks(self) -> int:
        return self.trainer_nodes * self.ranks_per_node
