"""`megatron-dapo plan`: reads the configuration and the model's config.json and prints the plan."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_dapo.arguments import table_console
from megatron_dapo.config import Config, ConfigError, ModelShape, load_config
from megatron_dapo.config.load import local_model
from megatron_dapo.planner.advice import advise
from megatron_dapo.planner.hardware import Cluster, PlanError, cluster_of
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.modes import Mode, compare_modes
from megatron_dapo.planner.plan import make_plan, shared_gpu
from megatron_dapo.planner.report import plan_json, print_modes, print_plan
from megatron_dapo.planner.search import Task
from megatron_dapo.planner.workload import Workload


def known_shape(name: str) -> ModelShape | None:
    """By the last part of a path or of a name on the hub, e.g. Qwen2.5-32B, Qwen/Qwen2.5-32B, models/Qwen2.5-32B.

    `models.json` has what decides the shape of the published Qwens, so that `plan` and `simulate` need no download. The
    models of a size with -Base, -Instruct or -Chat have the same shape."""
    last = Path(name.partition("@")[0]).name
    for candidate in (last, re.sub(r"-(Base|Instruct|Chat)$", "", last)):
        if candidate in _configs():
            return ModelShape.from_hf(_configs()[candidate], candidate)
    return None


@cache
def _configs() -> dict[str, dict[str, object]]:
    return json.loads((files("megatron_dapo.planner") / "models.json").read_text(encoding="utf-8"))


def run(
    config: str | None,
    set: list[str],
    model: str | None,
    hardware: dict[str, Any],
    estimates: dict[str, Any],
    mfu: float,
    layers: Layers,
    top: int,
    compare: bool,
    as_json: bool,
) -> int:
    """Exit code 0: the layout fits; without a layout, some layout does. 1: it does not. `hardware` and `estimates`: the
    arguments of `cluster_of` and of `Workload.of`."""
    loaded = load_config(config, [*set, *([f"policy.model={model}"] if model else [])])
    shape = model_shape(loaded)
    cluster = cluster_of(loaded.slurm, **hardware)
    work = Workload.of(loaded, **estimates)
    if compare:
        return _compare(compare_modes(loaded, shape, cluster, work, mfu, layers), cluster, top, as_json)
    choose = config is None and not any(item.startswith("policy.") for item in set)
    plan = make_plan(loaded, shape, cluster, work, mfu, layers, choose)
    task = Task(shape, work, cluster, mfu, layers, *shared_gpu(loaded, cluster))
    plan = replace(plan, advice=advise(loaded, plan, task))
    if as_json:
        print(json.dumps(plan_json(plan, top), indent=2))
    else:
        print_plan(plan, table_console(), top)
    return 0 if plan.fits else 1


def _compare(modes: list[Mode], cluster: Cluster, top: int, as_json: bool) -> int:
    """Exit code 1: no division of the GPUs fits."""
    if as_json:
        keys = ("engine_gpus", "staleness", "server_tensor_parallel", "max_running", "phases", "seconds")
        rows = [{key: getattr(mode, key) for key in keys} for mode in modes[:top]]
        print(json.dumps(rows, indent=2))
    else:
        print_modes(modes[:top], cluster, table_console())
    return 0 if modes else 1


def model_shape(config: Config) -> ModelShape:
    name = config.policy.model
    if not name:
        raise PlanError("no model is named: set policy.model, or give for example --model Qwen2.5-32B")
    try:
        directory = local_model(name, weights=False)
        found = Path(directory).is_dir()
    except ConfigError:  # not in the cache, and the hub cannot be reached or does not have it
        found = False
        if known_shape(name) is None:
            raise
    if found:
        return ModelShape.from_dir(directory)
    if (shape := known_shape(name)) is None:
        raise PlanError(
            f"policy.model: {name} is not a directory; plan needs a directory with the model's config.json "
            "(the weights are not read), a name on the hub, or a published Qwen, for example --model Qwen2.5-32B"
        )
    print(f"{name} is not here: the published config.json of that model is used", file=sys.stderr)
    return shape
