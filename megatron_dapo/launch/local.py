"""`megatron-dapo train`: joins the job it is started in (torchrun, srun), or starts ranks on this machine.

Everything that can be checked without training is checked first, by rank 0, and is exit code 2 when it fails: a
launcher does not repeat that. An error after that is exit code 1, because it may not occur again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.checkpoints.folder import SETTINGS, check_resume
from megatron_dapo.config import Config, ConfigError, ModelShape, check_config, dump_config
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.console import importing, waiting
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.trainer.run_lock import RunLock

if TYPE_CHECKING:
    from megatron_dapo.data import RunData
    from megatron_dapo.trainer.preflight import Setup

SETUP_ERROR = "setup_error"  # in the log folder; the batch script does not queue a job again that has it


def run_training(config: Config, *, dry_run: bool = False) -> int:
    """Checks the set-up, then trains or resumes; returns the exit code."""
    with importing("torch"):
        from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks

    rendezvous = Rendezvous.from_environment()
    in_job = rendezvous.world_size > 1
    ranks = rendezvous.world_size if in_job else planned_ranks(config) if dry_run else local_ranks(config)
    if not in_job and not dry_run:  # which may be for another machine
        place_servers(config, ranks)
    shape = check_run(config, ranks)
    changed = check_resume(config, shape)
    # Before ranks are forked, which share it. With GPUs each rank imports for itself: an import that initialized CUDA
    # here would leave it unusable in every rank.
    if not dry_run and (in_job or ranks == 1 or gpu_count() == 0):
        with importing("Megatron-Core"):
            import_trainer(driver=rendezvous.rank == 0)
    data = None  # the prompts: rank 0 has them
    if rendezvous.rank == 0:
        # Ranks are forked from this process: threads of tokenizers or plugins must not be in it.
        with waiting("checking the model's files and reading the prompts"):
            setup = _check_setup(config, shape, forked=not in_job and ranks > 1 and not dry_run)
        rehearsed = rehearse_setup(config, setup) if dry_run else []
        data = setup.data
        print_plan(config, shape, ranks)
        print("\n".join([setup.report(), *rehearsed]), file=sys.stderr)
        for line in config.warnings:
            print(f"warning: {line}", file=sys.stderr)
        for line in changed:
            print(f"changed since this run was last started: {line}", file=sys.stderr)
    if dry_run:
        if rendezvous.rank == 0:
            write_resolved(config)
        return 0
    # The lock is of the process that lives as long as the run: rank 0 in a job, else this one.
    with RunLock(config.trainer.run_dir) if rendezvous.rank == 0 else contextlib.nullcontext() as lock:
        try:
            if in_job or ranks == 1:
                return _train(rendezvous if in_job else None, config, shape, lock, data)
            return max(run_ranks(ranks, _train, config, shape, lock, data, timeout=None))
        except ConfigError as error:  # found in the checkpoint that is resumed
            _leave_for_batch_script(config, error)
            raise
        except UserError as error:
            print(f"megatron-dapo: {error}", file=sys.stderr)
            return 1


def import_trainer(*, driver: bool) -> None:
    """What every rank needs, and what rank 0 (`driver`) needs besides."""
    from megatron_dapo.trainer import loop  # noqa: F401

    if driver:
        from transformers import AutoTokenizer  # noqa: F401


def _train(rendezvous: Any, config: Config, shape: ModelShape, lock: RunLock | None, data: RunData | None) -> int:
    from megatron_dapo.trainer.loop import train

    return train(config, shape, rendezvous, lock, data)


def local_ranks(config: Config) -> int:
    """As configured; else one per GPU that the servers leave; without GPUs, as many as the layout needs."""
    if config.trainer.ranks:
        return config.trainer.ranks
    needed, gpus, taken = config.policy.model_ranks, gpu_count(), server_gpus(config)
    return (max(gpus - taken, 0) // needed * needed if taken else gpus) or needed


def server_gpus(config: Config) -> int:
    """Of this machine, that its servers need for themselves."""
    servers = config.rollout.servers
    starts = config.rollout.engine == "sglang" and servers.device == "cuda" and not servers.urls
    chosen = "CUDA_VISIBLE_DEVICES" in servers.environment or "--base-gpu-id" in " ".join(servers.arguments)
    own = starts and servers.need_own_gpus and not servers.share_base and not chosen
    return servers.count * servers.tensor_parallel if own else 0


def place_servers(config: Config, ranks: int) -> None:
    """Behind the trainer's GPUs, if they need their own."""
    needed = server_gpus(config)
    if not needed or not (gpus := gpu_count()):
        return
    if ranks + needed > gpus:
        raise ConfigError(
            f"the trainer has {ranks} ranks and the servers need {needed} GPUs of their own, but this machine has "
            f"{gpus}: set rollout.servers.share_gpus to true (they use the GPUs alternately), lower trainer.ranks, or "
            "limit the servers with --mem-fraction-static in rollout.servers.arguments"
        )
    config.rollout.servers.demand(first_gpu=ranks)


def planned_ranks(config: Config) -> int:
    """Of a dry run, which may be of a job on other machines: as configured; else the trainer's part of the job."""
    slurm = config.slurm
    gpus = (slurm.nodes - slurm.engine_nodes) * slurm.gpus_per_node if slurm.nodes > 1 else 0
    return config.trainer.ranks or gpus or local_ranks(config)


def check_run(config: Config, ranks: int, shape: ModelShape | None = None) -> ModelShape:
    """The configuration against the model's config.json, or `shape`, and the number of ranks. Opens no other file."""
    if not config.policy.model:
        raise ConfigError("policy.model is empty: name a HF directory, or a model of the hub, to train")
    if not config.data.files:
        raise ConfigError("data.path is empty: name the prompts to train on")
    for key, section in (("data", config.data), ("evaluate.data", config.evaluate.data)):
        for path in (file.path for file in section.files.values()):
            looks_local = path.endswith((".jsonl", ".json", ".parquet", ".csv", ".gz")) or path.startswith((".", "/"))
            if looks_local and not Path(path).exists() and not set("*?[") & set(path):
                raise ConfigError(f"{key}.{'sources' if section.sources else 'path'}: {path} does not exist")
    shape = check_config(config, ranks, shape)
    assert shape is not None
    return shape


def _check_setup(config: Config, shape: ModelShape, forked: bool) -> Setup:
    """`preflight.check_setup`; in a Slurm job an error is also left in the log folder for the batch script."""
    from megatron_dapo.processes.fork_ranks import run_in_fork
    from megatron_dapo.trainer.preflight import check_setup

    try:
        return run_in_fork(check_setup, config, shape) if forked else check_setup(config, shape)
    except UserError as error:
        _leave_for_batch_script(config, error)
        raise


def rehearse_setup(config: Config, setup: Setup) -> list[str]:
    """The rest of a dry run: what was tried, one line each."""
    from megatron_dapo.trainer.rehearsal import rehearse
    from megatron_dapo.types import printable

    if setup.unknown_hosts:
        raise ConfigError("; ".join(setup.unknown_hosts))
    with waiting("rehearsing a step"):
        return list(map(printable, rehearse(config, setup.data)))  # a prompt may have escape sequences


def _leave_for_batch_script(config: Config, error: UserError) -> None:
    from megatron_dapo.trainer.watchdog import log_folder

    folder = log_folder(config.trainer.run_dir)
    if "SLURM_PROCID" in os.environ and folder.is_dir():
        (folder / SETUP_ERROR).write_text(f"{error}\n")


def print_plan(config: Config, shape: ModelShape, ranks: int) -> None:
    policy, trainer, rollout = config.policy, config.trainer, config.rollout
    data_parallel = ranks // policy.model_ranks
    resume = sorted(Path(trainer.run_dir, "checkpoints").glob("step_*[0-9]")) if os.path.isdir(trainer.run_dir) else []
    lines = {
        "run": f"{trainer.run_dir} ({'resumes' if resume else 'new'}), {trainer.steps} steps",
        "model": f"{policy.model}, {shape.architecture}, {shape.layers} layers × {shape.hidden}, {policy.precision}",
        "layout": f"{ranks} rank{'s' * (ranks > 1)} = TP {policy.tensor_parallel} × PP {policy.pipeline_parallel} × CP "
        f"{policy.context_parallel} × DP {data_parallel}" + _experts(policy, shape) + _stages(policy, shape),
        "step": f"{trainer.prompts_per_step} prompts × {rollout.samples_per_prompt} samples, "
        f"{trainer.updates_per_step} updates, up to {rollout.max_response_tokens} tokens",
        "engine": rollout.engine,
        "loss": f"{config.algorithm.objective}, {config.algorithm.aggregation}, clip −{config.algorithm.clip_low} "
        f"+{config.algorithm.clip_high}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    for name, text in lines.items():
        table.add_row(name, text)
    Console(file=sys.stderr, markup=False, emoji=False).print(table)


def _experts(policy: PolicyConfig, shape: ModelShape) -> str:
    etp = policy.expert_tensor_parallel
    return (f", EP {policy.expert_parallel}" + (f" × ETP {etp}" if etp > 1 else "")) if shape.is_moe else ""


def _stages(policy: PolicyConfig, shape: ModelShape) -> str:
    """The layers of each pipeline stage, where they differ."""
    stages = policy.stage_layers(shape.layers) or []
    return f", stages of {', '.join(map(str, stages))} layers" if len(set(stages)) > 1 else ""


def check_not_its_own_output(config: Config, file: Path) -> None:
    """A run writes config.yaml into its directory: not over the file that it is started with."""
    target = Path(config.trainer.run_dir, "config.yaml")
    if not target.exists() or not target.samefile(file) or target.with_name(SETTINGS).exists():
        return
    if file.read_text() != dump_config(config):
        raise ConfigError(
            f"trainer.run_dir is the folder of {file}, which the run would replace by its resolved configuration: name "
            "another directory, or rename the file"
        )


def write_resolved(config: Config) -> None:
    """Never over a config.yaml that is there: it may be the run's, or the user's."""
    run_dir, text = Path(config.trainer.run_dir), dump_config(config)
    target = run_dir / "config.yaml"
    if target.exists() and target.read_text() != text:
        target = run_dir / "config.dry-run.yaml"
    target.write_text(text)
    print(f"valid; the resolved configuration is in {target}")
