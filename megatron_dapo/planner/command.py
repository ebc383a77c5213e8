"""`megatron-dapo plan`: reads the configuration and the model's config.json and prints the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_dapo.arguments import print_json, table_console
from megatron_dapo.config import load_config
from megatron_dapo.planner.advice import advise
from megatron_dapo.planner.hardware import Cluster, cluster_of
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.models import model_shape
from megatron_dapo.planner.modes import Mode, compare_modes
from megatron_dapo.planner.plan import make_plan, task_of
from megatron_dapo.planner.report import plan_json, print_modes, print_plan
from megatron_dapo.planner.search import KEYS
from megatron_dapo.planner.workload import Workload


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
    shape = model_shape(loaded.policy.model)
    cluster = cluster_of(loaded.slurm, **hardware)
    work = Workload.of(loaded, **estimates)
    if compare:
        return _compare(compare_modes(loaded, shape, cluster, work, mfu, layers), cluster, top, as_json)
    choose = config is None and loaded.policy.model_fields_set.isdisjoint(KEYS)
    plan = make_plan(loaded, shape, cluster, work, mfu, layers, choose)
    task = task_of(loaded, shape, cluster, work, mfu, layers)
    plan = replace(plan, advice=advise(loaded, plan, task))
    if as_json:
        print_json(plan_json(plan, top))
    else:
        print_plan(plan, table_console(), top)
    return 0 if plan.fits else 1


def _compare(modes: list[Mode], cluster: Cluster, top: int, as_json: bool) -> int:
    """Exit code 1: no division of the GPUs fits."""
    if as_json:
        keys = ("engine_gpus", "transport", "staleness", "server_tensor_parallel", "max_running", "phases", "seconds")
        print_json([{key: getattr(mode, key) for key in keys} for mode in modes[:top]])
    else:
        print_modes(modes[:top], cluster, table_console())
    return 0 if modes else 1
