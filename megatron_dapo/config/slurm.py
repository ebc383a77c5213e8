"""`slurm`: the job that `megatron-dapo slurm` writes and submits: nodes, limits, restarts, environment, container. No
value may hold a line break, since it could add a line to the batch script."""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_dapo.config.base import PathText, Section

# What sbatch --time takes: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})|UNLIMITED|INFINITE", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that the batch script, or the script of a pod, assigns: a value from `environment` would be lost.
ASSIGNED = """
ASKED ATTEMPT CODE CONTAINER DEADLINE ENGINES GROUP IFS JOB_BEFORE LEFT LOCAL_RANK LOGS MASTER_ADDR MASTER_PORT NODES
PIDS PROBES RANK RESTARTS ROUTER RUN SLOW SLURM_EXPORT_ENV SPARE TRAINER TRAINERS URLS USED WORLD_SIZE
began file index line local name node option pid saved start text used
"""
SCRIPT_VARIABLES = frozenset(ASSIGNED.split())
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class SlurmConfig(Section):
    partition: str | None = Field(None, description="Partition, as sinfo names it; null: the cluster's default.")
    account: str | None = Field(None, description="Account to charge, as sacctmgr names it; null: your default.")
    qos: str | None = Field(None, description="Quality of service, with its own limits; null: the account's default.")
    reservation: str | None = Field(None, description="Run inside this reservation; null: none.")
    job_name: str = Field("", description="What squeue shows; empty: the name of the run directory.")
    time: str = Field("24:00:00", description="Time limit, as sbatch takes it; the run may be longer than one limit.")
    extra: list[str] = Field(default_factory=list, description="More sbatch options, e.g. --constraint=h100.")

    mode: Literal["colocated", "disaggregated"] = Field(
        "colocated",
        description="colocated: engines on the trainer's nodes. disaggregated: engine_nodes of the nodes only serve.",
    )
    nodes: int = Field(1, ge=1, description="All nodes of the job.")
    engine_nodes: int = Field(0, ge=0, description="Nodes among them that only run engines (disaggregated).")
    gpus_per_node: int = Field(8, ge=0, description="GPUs of each node that the job gets; 0: a cluster without GPUs.")
    tasks_per_node: int | None = Field(
        None, ge=1, description="Trainer ranks on each node; null: one per GPU, or one per node without GPUs."
    )
    cpus_per_task: int | None = Field(
        None, ge=1, description="Cores for each trainer rank; null: the cluster's default (exclusive: all cores)."
    )
    memory: str | None = Field(
        None,
        description="Per node, e.g. 0 (all of it) or 900G; null: all of it if exclusive, else the cluster's default.",
    )
    exclusive: bool = Field(True, description="No other job on these nodes.")
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = Field(
        "auto",
        description="sbatch option that requests the GPUs. auto: what the cluster offers. none: Slurm does not manage "
        "the GPUs, and exclusive nodes have all of them.",
    )
    gpu_type: str | None = Field(None, description="Type of the GPUs, as sinfo -o %G names it, e.g. h100; null: any.")
    engine_partition: str | None = Field(
        None, description="Partition of the engine nodes, if it is another one; makes a heterogeneous job."
    )
    head_partition: str | None = Field(
        None,
        description="Partition of an additional CPU node for the batch script and the router; makes a heterogeneous "
        "job. Rank 0 stays on a trainer node, because it holds a part of the model.",
    )
    router: bool = Field(False, description="Put sglang-router in front of the servers.")
    router_port: int = Field(
        29000, ge=1024, le=65535, description="Port of sglang-router on the head node or the first engine node."
    )
    spare_nodes: int = Field(
        0, ge=0, description="Additional nodes of the job; those that the network check finds slow stay idle."
    )
    network_check: bool | None = Field(
        None,
        description="Measure all-reduce between the nodes before weights are loaded; null: with GPUs on several nodes.",
    )
    network_slow: float = Field(
        0.5, ge=0, lt=1, description="A node is slow below this share of the median node's bandwidth."
    )
    network_minimum: float = Field(0.0, ge=0, description="A node is also slow below this many GB/s; 0: no minimum.")

    signal_seconds: int = Field(
        600, ge=1, description="The run saves and is queued again this long before the time limit."
    )
    restarts: int = Field(
        20, ge=0, description="Restarts in a row (time limit, crash, lost node) before the job gives up."
    )
    restart_reset_seconds: int = Field(
        1800, ge=0, description="An attempt that saves a checkpoint this long after its start restores all restarts."
    )
    crashes: int = Field(2, ge=1, description="Crashes in a row without a new checkpoint before the job gives up.")
    end_seconds: int = Field(120, ge=1, description="Time that the other ranks have once one rank has ended.")

    mail_user: str | None = Field(None, description="Slurm sends e-mail here; null: none.")
    mail_type: str = Field(
        "END,FAIL,TIME_LIMIT", description="Events that Slurm reports to mail_user, as sbatch takes them."
    )
    webhook_env: str | None = Field(
        None,
        description="Environment variable with a URL; when the job ends for good, the script posts a JSON object with "
        "`text` to it.",
    )

    modules: list[str] = Field(default_factory=list, description="Environment modules to load first, e.g. cuda/13.0.")
    setup: list[str] = Field(default_factory=list, description="Shell lines to run first, after the modules.")
    python: PathText = Field("", description="Python with megatron-dapo; empty: this one, or python3 in a container.")
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Exported to all processes, e.g. NCCL_*. No secrets: they belong into environment_file.",
    )
    environment_file: PathText = Field(
        "",
        description="File of NAME=value lines that only you can read, for keys and tokens: it works at sites where "
        "jobs do not get the environment you submit from (--export=NONE).",
    )
    container_image: str | None = Field(None, description="Run all processes inside this container image.")
    container_runtime: Literal["pyxis", "apptainer", "singularity"] = Field(
        "pyxis", description="What runs the image: srun with pyxis/enroot, or a command on every node."
    )
    container_mounts: list[str] = Field(
        default_factory=list,
        description="Mounts of the container, as HOST:CONTAINER[:flags]; empty: the folder you submit "
        "from and the run directory.",
    )
    container_arguments: list[str] = Field(
        default_factory=list, description="More options of srun (pyxis) or of `apptainer exec`."
    )

    @field_validator("*", mode="after")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        for text in _texts(value):
            if CONTROL.search(text):
                raise ValueError(f"{text!r} has a line break or a control character: use one line, or several entries")
        return value

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: object) -> object:
        # YAML 1.1 reads an unquoted 24:00:00 as a base-60 number, and nobody means 86400 minutes.
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(f"found the number {value}: put the time in quotes, e.g. '24:00:00' or '{value}'")
        if isinstance(value, str) and not TIME.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a time: use hours:minutes:seconds or days-hours, e.g. '24:00:00', '7-0'"
            )
        return value

    @field_validator("extra", mode="after")
    @classmethod
    def _options(cls, value: list[str]) -> list[str]:
        for option in value:
            if not option.startswith("-"):
                raise ValueError(f"found {option!r}: expected sbatch options, one per entry, e.g. --constraint=h100")
            try:
                shlex.split(option)
            except ValueError as error:
                raise ValueError(f"{option!r} cannot be read as shell words: {error}") from None
        return value

    @field_validator("environment", mode="after")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            check_not_ours(name)
        return value

    @field_validator("webhook_env", mode="after")
    @classmethod
    def _webhook(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not the name of an environment variable; put the URL itself into one")
        check_not_ours(value or "")
        return value

    @model_validator(mode="after")
    def _nodes(self) -> SlurmConfig:
        if self.mode == "disaggregated":
            if self.engine_nodes == 0:
                raise ValueError(
                    "mode is disaggregated but engine_nodes is 0: no node would run engines; set it to 1 or more"
                )
            if self.engine_nodes >= self.nodes:
                raise ValueError(
                    f"engine_nodes is {self.engine_nodes} of {self.nodes} nodes, which leaves none to train on: "
                    "raise nodes"
                )
        elif self.engine_nodes:
            raise ValueError(f"engine_nodes is {self.engine_nodes} but mode is colocated: set mode to disaggregated")
        if self.container_mounts and not self.container_image:
            raise ValueError("container_mounts without container_image: name the image")
        if self.engine_partition and not self.engine_nodes:
            raise ValueError("engine_partition needs engine nodes: set mode to disaggregated and engine_nodes")
        if self.spare_nodes and (self.engine_partition or self.head_partition):
            raise ValueError("spare_nodes needs all nodes in one partition: remove it, or the other partitions")
        if self.spare_nodes and not self.checks_network:
            raise ValueError("spare_nodes would be idle without a network check: set network_check to true")
        if self.gpu_request == "none" and self.gpus_per_node and not self.exclusive:
            raise ValueError("gpu_request is none, so other jobs could use the same GPUs: set exclusive to true")
        return self

    @property
    def checks_network(self) -> bool:
        several = self.trainer_nodes > 1 or self.spare_nodes > 0
        return bool(self.gpus_per_node) and several if self.network_check is None else self.network_check

    @property
    def trainer_nodes(self) -> int:
        return self.nodes - self.engine_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def ranks(self) -> int:
        return self.trainer_nodes * self.ranks_per_node


def check_not_ours(name: str) -> None:
    if name in SCRIPT_VARIABLES or re.fullmatch(r"GROUP_\d", name):
        raise ValueError(f"{name} is a variable of the batch script: use another name")


def _texts(value: Any) -> list[str]:
    """Every text in a field's value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for text in item]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
