"""`megatron-dapo train`: joins the job it is started in (torchrun, srun), or starts ranks on this machine itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.config import Config, ConfigError, ModelShape, check_config, check_world, dump_config
from megatron_dapo.errors import UserError
from megatron_dapo.policy.gpu_count import gpu_count


def run_training(config: Config, *, dry_run: bool = False) -> int:
    """Validates everything that can be validated without training, then trains or resumes; returns the exit code."""
    from megatron_dapo.policy.fork_ranks import run_ranks
    from megatron_dapo.policy.runtime import Rendezvous

    place = Rendezvous.from_environment()
    in_job = place.world_size > 1
    ranks = place.world_size if in_job else local_ranks(config)
    shape = check_run(config, ranks)
    if place.rank == 0:
        print_plan(config, shape, ranks)
    if dry_run:
        if place.rank == 0:
            write_resolved(config)
        return 0
    try:
        if in_job or ranks == 1:
            return _train(place if in_job else None, config, shape)
        return max(run_ranks(ranks, _train, config, shape, timeout=None))
    except UserError as error:
        # The configuration was fine: what fails now may not fail again, and a launcher reads that from the code.
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return 1


def _train(place: Any, config: Config, shape: ModelShape) -> int:
    from megatron_dapo.trainer.loop import train

    return train(config, shape, place)


def local_ranks(config: Config) -> int:
    """As configured; or every GPU; or, without a GPU, what the layout needs."""
    return config.trainer.ranks or gpu_count() or config.policy.model_ranks


def check_run(config: Config, ranks: int) -> ModelShape:
    """Everything that would fail later and can be known now."""
    if not config.policy.model:
        raise ConfigError("policy.model is empty: name the HF directory of the model to train")
    if not config.data.path:
        raise ConfigError("data.path is empty: name the prompts to train on")
    for key, path in (("data.path", config.data.path), ("evaluate.data.path", config.evaluate.data.path)):
        looks_local = path.endswith((".jsonl", ".json", ".parquet")) or path.startswith((".", "/"))
        if path and looks_local and not Path(path).exists():
            raise ConfigError(f"{key}: {path} does not exist")
    check_world(config.policy, ranks)
    shape = check_config(config, ranks)
    assert shape is not None
    return shape


def print_plan(config: Config, shape: ModelShape, ranks: int) -> None:
    policy, trainer, rollout = config.policy, config.trainer, config.rollout
    data_parallel = ranks // policy.model_ranks
    resume = sorted(Path(trainer.run_dir, "checkpoints").glob("step_*")) if os.path.isdir(trainer.run_dir) else []
    rows = {
        "run": f"{trainer.run_dir} ({'resumes' if resume else 'new'}), {trainer.steps} steps",
        "model": f"{policy.model}, {shape.architecture}, {shape.layers} layers × {shape.hidden}, {policy.precision}",
        "layout": f"{ranks} ranks = TP {policy.tensor_parallel} × PP {policy.pipeline_parallel} × CP "
        f"{policy.context_parallel} × DP {data_parallel}" + (f", EP {policy.expert_parallel}" if shape.is_moe else ""),
        "step": f"{trainer.prompts_per_step} prompts × {rollout.samples_per_prompt} samples, "
        f"{trainer.updates_per_step} updates, up to {rollout.max_response_tokens} tokens",
        "engine": rollout.engine,
        "loss": f"{config.algorithm.objective}, {config.algorithm.aggregation}, clip −{config.algorithm.clip_low} "
        f"+{config.algorithm.clip_high}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(f"[bold]{name}[/]", text)
    Console(file=sys.stderr).print(table)


def write_resolved(config: Config) -> None:
    target = Path(config.trainer.run_dir) / "config.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dump_config(config))
    print(f"valid; the resolved configuration is in {target}")
