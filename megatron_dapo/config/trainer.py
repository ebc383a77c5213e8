"""The sections `trainer`, `observe` and `slurm`: how a run is carried out, what it records, and its job."""

from __future__ import annotations

import math
import os
import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from megatron_dapo.config.base import PathText, Section

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _name_of_variable(name: str) -> str:
    if not NAME.fullmatch(name):  # it may be the URL itself, which is a secret
        raise ValueError("expected the name of an environment variable; put the URL itself into one")
    return name


Variable = Annotated[str, AfterValidator(_name_of_variable)]


class CheckpointConfig(Section):
    """What is saved and kept in the run directory's checkpoints/. A run that must end early saves as well."""

    every: int = Field(5, ge=0)
    """Save every N steps, and at the end; 0: only at the end."""
    at_end: bool = True
    """Save after the last step; false: a finished run leaves only its metrics."""
    keep: int | None = Field(2, ge=1)
    """Newest checkpoints of complete steps to keep; null: all."""
    keep_every: int = Field(0, ge=0)
    """Also keep the checkpoint of every N-th step, to go back to; 0: of none."""
    keep_best: bool = True
    """Also keep the checkpoint with the best `best_metric`."""
    best_metric: str = ""
    """Metric of the last evaluation or step; empty: the evaluation's avg@k, or else reward/accuracy_all."""

    def check(self) -> None:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(f"keep_every ({self.keep_every}) must be a multiple of every ({self.every})")


class GateConfig(Section):
    """Before the first update of a step, the trainer's log-probs of the sampled tokens must agree with the engine's.
    The limits are for the first batch. A later one may have ten times the mean gap, or 1 nat if it has tokens of older
    weights; a batch beyond that is sampled again, and after three such batches the run ends."""

    enabled: bool = True
    """Compare them in every step."""
    max_mean_gap: float = Field(0.05, ge=0)
    """Largest mean |trainer − engine| in nats. 0.05 suits bf16; with policy.true_on_policy both limits are 0."""
    max_gap: float = Field(5.0, ge=0)
    """Largest |trainer − engine| of a single token."""


class HeartbeatConfig(Section):
    """Each rank watches another one. If a rank hangs, all ranks write their stacks and exit with code 76."""

    every: float = Field(5.0, ge=0)
    """Seconds between two heartbeats of a rank; 0: no heartbeat."""
    silent: float = Field(300.0, gt=0)
    """Seconds without a heartbeat after which a rank counts as hanging."""
    stuck: float = Field(9000.0, gt=0)
    """Seconds without progress after which a rank counts as hanging. Progress is an update, a finished sample, a
    finished response of an evaluation, or a running weight update or engine start, which have their own time limits.
    Must be more than rollout.sampler.stall_timeout, whose error saves the run."""

    def check(self) -> None:
        if self.silent <= 2 * self.every:
            raise ValueError(
                f"silent ({self.silent:g}) must be more than two heartbeats (every is {self.every:g}): raise it"
            )


class TrainerConfig(Section):
    """Number and size of the steps, checkpoints, and the checks that end a run."""

    run_dir: PathText = "runs/default"
    """Directory of the run. An existing run in it is resumed."""
    ranks: int | None = Field(None, ge=1)
    """Ranks to start; null: one per GPU that servers leave, or as many as the layout needs."""
    steps: int = Field(330, gt=0)
    """Rollout steps; each makes prompts_per_step/mini_batch_prompts updates."""
    prompts_per_step: int = Field(512, gt=0)
    """Groups that one rollout step trains on."""
    mini_batch_prompts: int = Field(32, gt=0)
    """Prompts (groups) per optimizer update."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the order of the prompts, and the samples if the engine takes seeds."""
    old_logprobs: Literal["auto", "recompute", "engine"] = "auto"
    """Log-probs in the denominator of the ratio. recompute: the trainer's own, before the first update of a step.
    engine: the engine's, without that pass; train/mismatch_* is then measured by the first update of a step. auto:
    recompute if a step has more than one update, or if algorithm.off_policy reads them."""
    max_skipped_updates: int = Field(3, ge=0)
    """Updates in a row that may be skipped because of a NaN or infinity before the run ends."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    gate: GateConfig = GateConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()

    @field_validator("run_dir")
    @classmethod
    def _own_directory(cls, path: str) -> str:
        if os.path.normpath(path or ".") == ".":
            raise ValueError(f"found {path!r}: name a directory of its own for checkpoints, logs and config.yaml")
        return path

    def check(self) -> None:
        if self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of mini_batch_prompts "
                f"({self.mini_batch_prompts}), or the last update of every step is smaller than the others"
            )

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // self.mini_batch_prompts

    @property
    def kept_checkpoints(self) -> int:
        saved = self.checkpoint
        also = self.steps // saved.keep_every if saved.keep_every else 0
        return saved.keep + also if saved.keep else math.ceil(self.steps / (saved.every or self.steps))


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`. Offline runs are uploaded later with `wandb sync`."""

    mode: Literal["off", "online", "offline"] = "off"
    """off: nothing is sent. online: sent during the run. offline: kept in logs/ and sent later."""
    project: str = "megatron-dapo"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; null: your default one."""
    name: str | None = None
    """Name of the run; null: the name of the run directory."""
    group: str | None = None
    """Runs of one group are shown together, e.g. seeds; null: none."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""


class ObserveConfig(Section):
    """What is shown and recorded in addition to metrics.jsonl, which is always written."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """auto: rich on a terminal, plain elsewhere. rich: live progress. plain: a line per step."""
    samples_every: int = Field(10, ge=0)
    """Write samples to samples/ every N steps; 0: never."""
    samples_groups: int = Field(2, ge=0)
    """Prompts of a step that are written; 0: all."""
    samples_responses: int = Field(4, ge=0)
    """Responses per prompt; right and wrong ones alternate; 0: all of them."""
    samples_tokens: bool = False
    """Also write what the updates read of every token of these steps: log-probs of engine, proximal and new policy,
    entropy, advantage, mask. For coloured tokens and `megatron-dapo explain`; 25 bytes per token."""
    trace_every: int = Field(50, ge=0)
    """Write a timeline to traces/ every N steps, for ui.perfetto.dev; 0: never."""
    warnings: bool = True
    """Warn about unhealthy metrics and name likely causes (docs/diagnosis.md)."""
    webhook_env: Variable | None = None
    """Environment variable with a URL; every warning is posted to it as a JSON object with `text`, `run`, `step` and
    `rule`, and so is an end other than finished."""
    report: bool = True
    """Write report.html when the run ends."""
    aliases: list[Literal["verl", "prime-rl"]] = Field(default_factory=list)
    """Send metrics to wandb and TensorBoard also under the names of these tools (docs/monitoring.md)."""
    profile_steps: list[int] = Field(default_factory=list, max_length=2)
    """[first, last]: profile these steps (they count from 1) with torch.profiler on the ranks of profile_ranks; the
    traces are in profiles/. Empty: never."""
    profile_ranks: list[int] = Field([0])
    """Ranks that profile_steps profiles."""
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False
    """Event files in logs/tensorboard; needs the extra `tensorboard`."""
    tracker: str | None = None
    """python:module.Class: a custom tracker, for example for MLflow (docs/monitoring.md)."""

    def check(self) -> None:
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps is {steps}: expected [first, last], and 1 ≤ first ≤ last")


# What sbatch --time takes: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})|UNLIMITED|INFINITE", re.IGNORECASE)
# Variables that the batch script assigns: a value from `environment` would be lost.
ASSIGNED = """
ASKED ATTEMPT CODE CONTAINER ENGINES GROUP IFS JOB_BEFORE LOGS MASTER_ADDR MASTER_PORT NODES PROBES RESTARTS ROUTER
RUN SLOW SLURM_EXPORT_ENV SPARE TRAINER TRAINERS URLS USED
began file index line name node option saved start text used
"""
SCRIPT_VARIABLES = frozenset(ASSIGNED.split())
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_not_ours(name: str) -> str:
    if name in SCRIPT_VARIABLES or re.fullmatch(r"GROUP_\d", name):
        raise ValueError(f"{name} is a variable of the batch script: use another name")
    return name


class SlurmConfig(Section):
    """The job that `megatron-dapo slurm` writes and submits: nodes, limits, restarts, environment, container. No value
    may hold a line break, since it could add a line to the batch script."""

    partition: str | None = None
    """Partition, as sinfo names it; null: the cluster's default."""
    account: str | None = None
    """Account to charge, as sacctmgr names it; null: your default."""
    qos: str | None = None
    """Quality of service, with its own limits; null: the account's default."""
    reservation: str | None = None
    """Run inside this reservation; null: none."""
    job_name: str = ""
    """Name in squeue; empty: the name of the run directory."""
    time: str = "24:00:00"
    """Time limit, as sbatch takes it; the run may be longer than one limit."""
    extra: list[str] = Field(default_factory=list)
    """More sbatch options, e.g. --constraint=h100."""

    nodes: int = Field(1, ge=1)
    """All nodes of the job."""
    engine_nodes: int = Field(0, ge=0)
    """Nodes among them that only run engines; 0: engines run on the trainer's nodes (colocated)."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs that the job gets on each node; 0: a cluster without GPUs."""
    tasks_per_node: int | None = Field(None, ge=1)
    """Trainer ranks on each node; null: one per GPU, or one per node without GPUs."""
    cpus_per_task: int | None = Field(None, ge=1)
    """Cores for each trainer rank; null: the cluster's default (exclusive: all cores)."""
    memory: str | None = None
    """Per node, e.g. 0 (all of it) or 900G; null: all of it if exclusive, else the cluster's default."""
    exclusive: bool = True
    """No other job on these nodes."""
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = "auto"
    """sbatch option that requests the GPUs. auto: what the cluster offers. none: Slurm does not manage the GPUs, and
    exclusive nodes have all of them."""
    gpu_type: str | None = None
    """Type of the GPUs, as sinfo -o %G names it, e.g. h100; null: any."""
    engine_partition: str | None = None
    """Partition of the engine nodes, if it is another one; makes a heterogeneous job."""
    head_partition: str | None = None
    """Partition of an additional CPU node for the batch script and the router; makes a heterogeneous job. Rank 0 stays
    on a trainer node, because it holds a part of the model."""
    router: bool = False
    """Put sglang-router in front of the servers."""
    router_port: int = Field(29000, ge=1024, le=65535)
    """Port of sglang-router on the head node or the first engine node."""
    spare_nodes: int = Field(0, ge=0)
    """Additional nodes of the job; those that the network check finds slow stay idle."""
    network_check: bool | None = None
    """Measure all-reduce between the nodes before weights are loaded; null: with GPUs on several nodes."""
    network_slow: float = Field(0.5, ge=0, lt=1)
    """A node is slow below this share of the median node's bandwidth."""
    network_minimum: float = Field(0.0, ge=0)
    """A node is also slow below N GB/s; 0: no minimum."""

    signal_seconds: int = Field(600, ge=1)
    """Seconds before the time limit at which the run saves and is queued again."""
    restarts: int = Field(20, ge=0)
    """Restarts in a row (time limit, crash, lost node) before the job gives up."""
    restart_reset_seconds: int = Field(1800, ge=0)
    """An attempt that saves a checkpoint N seconds or more after its start resets the restart counter."""
    crashes: int = Field(2, ge=1)
    """Crashes in a row without a new checkpoint before the job gives up."""
    end_seconds: int = Field(120, ge=1)
    """Seconds that the other ranks have to end once one rank has ended."""

    mail_user: str | None = None
    """Slurm sends e-mail here; null: none."""
    mail_type: str = "END,FAIL,TIME_LIMIT"
    """Events that Slurm reports to mail_user, as sbatch takes them."""
    webhook_env: Annotated[Variable, AfterValidator(check_not_ours)] | None = None
    """Environment variable with a URL; when the job ends for good, the script posts a JSON object with `text` to it."""

    modules: list[str] = Field(default_factory=list)
    """Environment modules to load first, e.g. cuda/13.0."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines to run first, after the modules."""
    python: PathText = ""
    """Python with megatron-dapo; empty: this one, or python3 in a container."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Exported to all processes, e.g. NCCL_*. Do not put secrets here; use environment_file."""
    environment_file: PathText = ""
    """File of NAME=value lines that only you can read, for keys and tokens: it works at sites where jobs do not get the
    environment you submit from (--export=NONE)."""
    container_image: str | None = None
    """Run all processes inside this container image."""
    container_runtime: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    """What runs the image: srun with pyxis/enroot, or a command on every node."""
    container_mounts: list[str] = Field(default_factory=list)
    """Mounts of the container, as HOST:CONTAINER[:flags]; empty: the folder you submit from and the run directory."""
    container_arguments: list[str] = Field(default_factory=list)
    """More options for srun (pyxis) or `apptainer exec`."""

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

    def check(self) -> None:
        if self.engine_nodes >= self.nodes:
            raise ValueError(
                f"engine_nodes is {self.engine_nodes} of {self.nodes} nodes, which leaves none to train on: raise nodes"
            )
        if self.container_mounts and not self.container_image:
            raise ValueError("container_mounts without container_image: name the image")
        if self.engine_partition and not self.engine_nodes:
            raise ValueError("engine_partition needs engine nodes: set engine_nodes")
        if self.spare_nodes and (self.engine_partition or self.head_partition):
            raise ValueError("spare_nodes needs all nodes in one partition: remove it, or the other partitions")
        if self.spare_nodes and not self.checks_network:
            raise ValueError("spare_nodes would be idle without a network check: set network_check to true")
        if self.gpu_request == "none" and self.gpus_per_node and not self.exclusive:
            raise ValueError("gpu_request is none, so other jobs could use the same GPUs: set exclusive to true")

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


def _texts(value: Any) -> list[str]:
    """Every text in a field's value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for text in item]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
