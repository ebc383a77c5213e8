"""Checks of a job before it is submitted. Each error says what to change.

The checks of the configuration come first and need no cluster. Then the cluster is asked for its partitions and, at
the end, with `sbatch --test-only`, which knows limits, accounts and QoS.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.config import Config, ConfigError, ModelShape
from megatron_dapo.config.slurm import check_not_ours
from megatron_dapo.errors import UserError
from megatron_dapo.launch.local import check_run
from megatron_dapo.launch.slurm_script import Job, seconds_of

Ask = Callable[..., subprocess.CompletedProcess[str]]
LOCAL_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp", "/run")


class SlurmError(UserError):
    """Slurm is absent, does not reply, or refuses."""


def ask(*command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs a Slurm command. A missing or hanging command is an error; the caller reads the exit code."""
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]} is not installed here: run this on a machine that can submit jobs")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not reply within {timeout:g} s: is the Slurm controller up?") from None


def check_job(job: Job) -> ModelShape:
    """The checks of the configuration, which need no cluster."""
    config = job.config
    if config.trainer.ranks and config.trainer.ranks != config.slurm.ranks:
        raise ConfigError(
            f"trainer.ranks is {config.trainer.ranks}, but the job has {config.slurm.trainer_nodes} trainer nodes × "
            f"{config.slurm.ranks_per_node} tasks = {config.slurm.ranks} ranks: leave trainer.ranks out"
        )
    shape = check_run(config, config.slurm.ranks)
    _check_time(config)
    _check_engines(job)
    _check_environment_file(config)
    if job.seeds and len(job.components) > 1:
        raise ConfigError("Slurm has no arrays of heterogeneous jobs: submit each seed, or leave out "
                          "slurm.engine_partition and slurm.head_partition")  # fmt: skip
    if job.seeds and job.chained:
        raise ConfigError("--seeds and --chain cannot be combined: chain the seeds one by one")
    return shape


def _check_environment_file(config: Config) -> None:
    name = config.slurm.environment_file
    if not name:
        return
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"slurm.environment_file: {path} does not exist: write lines NAME=value into it")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"slurm.environment_file: others can read {path}, which is for secrets: chmod 600 {path}")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#") and not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", line):
            raise ConfigError(f"slurm.environment_file: line {number} of {path} is not NAME=value")
        try:
            check_not_ours(line.partition("=")[0])
        except ValueError as error:
            raise ConfigError(f"slurm.environment_file: line {number} of {path}: {error}") from None


def _check_time(config: Config) -> None:
    slurm = config.slurm
    if slurm.signal_seconds >= seconds_of(slurm.time):
        raise ConfigError(
            f"slurm.signal_seconds is {slurm.signal_seconds}, but the time limit is {slurm.time}: the run would be "
            "asked to save as soon as it starts; raise slurm.time or lower slurm.signal_seconds"
        )


def _check_engines(job: Job) -> None:
    slurm, rollout = job.config.slurm, job.config.rollout
    if slurm.mode == "disaggregated" and not job.starts_servers:
        why = "rollout.servers.urls names external servers" if rollout.servers.urls else "the engine is embedded"
        raise ConfigError(
            f"slurm.engine_nodes is {slurm.engine_nodes}, but {why}, so these nodes would be idle: set slurm.mode to "
            "colocated and slurm.engine_nodes to 0, or rollout.engine to sglang without urls"
        )
    _check_memory(job)
    if slurm.router and not job.starts_servers:
        raise ConfigError("slurm.router needs servers that this job starts on more than one node: remove it")
    if not job.starts_servers:
        return
    if job.servers_per_node < 1:
        raise ConfigError(
            f"rollout.servers.tensor_parallel is {rollout.servers.tensor_parallel}, but a node has "
            f"{slurm.gpus_per_node} GPUs: a server must fit on one node"
        )
    if rollout.weights.transport == "tensor" and not rollout.servers.share_gpus:
        raise ConfigError(
            "rollout.weights.transport is tensor, which needs engines on the trainer's GPUs: set "
            "rollout.servers.share_gpus to true, or use disk or distributed"
        )
    if rollout.weights.transport == "tensor" and rollout.weights.keep_snapshot:
        raise ConfigError(
            "rollout.weights.transport is tensor and keep_snapshot is true, but on several nodes no rank has all "
            "weights: set rollout.weights.keep_snapshot to false (a restarted server then gets its weights with the "
            "next update)"
        )
    needs_disk = rollout.weights.transport == "disk" or rollout.weights.keep_snapshot
    folder = Path(job.folder, rollout.weights.directory)
    if needs_disk and any(folder.is_relative_to(local) for local in LOCAL_FOLDERS if not _is_below(job.run_dir, local)):
        raise ConfigError(
            f"rollout.weights.directory is {rollout.weights.directory}, which the engines on other nodes cannot see: "
            f"use a shared directory, e.g. {job.run_dir / 'weights'}"
        )


def _check_memory(job: Job) -> None:
    """By default a server takes nearly all memory of a GPU."""
    slurm, rollout = job.config.slurm, job.config.rollout
    if rollout.engine != "sglang" or rollout.servers.urls or not slurm.gpus_per_node:
        return
    if slurm.mode == "disaggregated" and rollout.servers.share_gpus:
        raise ConfigError(
            "rollout.servers.share_gpus is on, but slurm.mode is disaggregated: the engines have GPUs of their own; "
            "remove share_gpus"
        )
    limited = any(argument.startswith("--mem-fraction-static") for argument in rollout.servers.arguments)
    if slurm.mode == "colocated" and not rollout.servers.share_gpus and not limited:
        raise ConfigError(
            "slurm.mode is colocated, and the engines would take nearly all memory of the trainer's GPUs: set "
            "rollout.servers.share_gpus to true (they use the GPUs alternately), or limit the engines with "
            "--mem-fraction-static in rollout.servers.arguments"
        )


def _is_below(path: Path, folder: str) -> bool:
    """Whether the run directory is in the same local folder: then the job is a test on one machine."""
    return path.is_relative_to(folder)


def check_cluster(config: Config, ask: Ask = ask) -> None:
    """Every partition exists, or the cluster has a default one."""
    reply = ask("sinfo", "-h", "-o", "%P")
    if reply.returncode:
        raise SlurmError(f"sinfo failed: {_reason(reply.stderr)}; start this command where Slurm's commands work")
    names = reply.stdout.split()
    known = ", ".join(name.rstrip("*") for name in names) or "none"
    wanted = config.slurm.partition
    if wanted is None and not any(name.endswith("*") for name in names):
        raise ConfigError(f"slurm.partition is empty and the cluster has no default partition: choose one of {known}")
    slurm = config.slurm
    for key in ("partition", "engine_partition", "head_partition"):
        wanted = getattr(slurm, key)
        missing = [name for name in (wanted or "").split(",") if name and name not in {n.rstrip("*") for n in names}]
        if missing:
            raise ConfigError(f"slurm.{key}: this cluster has no partition {missing[0]}; it has: {known}")


def _reason(text: str) -> str:
    """The last line, which names the error that ended the command."""
    return text.strip().rpartition("\n")[2] or "no reply"


def offered_gpu_request(config: Config, ask: Ask = ask) -> str:
    """How this cluster takes a request for GPUs: gpus-per-node (the cons_tres plugin), gres, or none where its nodes
    have no GPUs as generic resources."""
    slurm = config.slurm
    if slurm.gpu_request != "auto" or not slurm.gpus_per_node:
        return "gpus-per-node" if slurm.gpu_request == "auto" else slurm.gpu_request
    where = [f"--partition={name}" for name in (slurm.partition,) if name]
    reply = ask("sinfo", "-h", "-o", "%G", *where)
    if reply.returncode:
        raise SlurmError(f"sinfo failed: {_reason(reply.stderr)}; set slurm.gpu_request")
    if not re.search(r"(^|,)gpu(:|\()", reply.stdout, re.MULTILINE):
        if not slurm.exclusive:
            raise ConfigError(
                f"slurm.gpus_per_node is {slurm.gpus_per_node}, but Slurm manages no GPUs in this partition, so other "
                "jobs could use the same ones: set slurm.exclusive to true, or slurm.partition to one with GPUs"
            )
        return "none"
    reply = ask("scontrol", "show", "config")
    return "gpus-per-node" if reply.returncode or "cons_tres" in reply.stdout else "gres"


def check_submission(script: Path, ask: Ask = ask) -> str:
    """Asks Slurm about the script without submitting it. Returns when and where the job would start."""
    reply = ask("sbatch", "--test-only", str(script))
    said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in reply.stderr.splitlines())
    if reply.returncode:
        raise SlurmError(f"Slurm would refuse the job: {said.removeprefix('allocation failure: ')} (script: {script})")
    return said
