"""`megatron-dapo init`: a configuration for a model, prompts and a number of GPUs, with the layout that `plan` chooses.

Small machines get a small recipe, from 16 GPUs on the published one. Everything that is not written is a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, ConfigError, check_config, parse_config
from megatron_dapo.config.base import dump_yaml, leaves
from megatron_dapo.config.importing import nested, write_or_print
from megatron_dapo.config.load import apply_overrides
from megatron_dapo.planner.hardware import cluster_of
from megatron_dapo.planner.models import model_shape
from megatron_dapo.planner.plan import Plan, make_plan
from megatron_dapo.planner.search import KEYS
from megatron_dapo.planner.workload import Workload

GPUS_PER_NODE = 8
LARGE = 16  # GPUs for the published recipe
SMALL: dict[str, Any] = {
    "trainer.prompts_per_step": 64,
    "trainer.mini_batch_prompts": 32,
    "trainer.checkpoint.every": 20,
    "rollout.samples_per_prompt": 8,
    "rollout.max_prompt_tokens": 1024,
    "rollout.max_response_tokens": 2048,
    "algorithm.overlong.cache_length": 512,
    "policy.optimizer.warmup_steps": 5,
    "trainer.steps": 200,
}
SHORTER = (2048, 1024, 512)  # longest responses that are tried, if a model does not fit


def run(model: str, data: str, gpus: int, gpu: str, slurm: bool, output: str | None, settings: list[str]) -> int:
    """Writes the file, or prints it."""
    found, plan = planned(model, data, gpus, gpu, settings)
    name = Path(model.partition("@")[0]).name.lower()
    found.setdefault("trainer.run_dir", f"runs/{name}")
    file = output or "run.yaml"
    start = f"megatron-dapo {'slurm' if slurm or found.get('slurm.nodes', 1) > 1 else 'train'} {file}"
    lines = [f"# Made by `megatron-dapo init` for {model} on {_machine(gpus, gpu)}."]
    if plan is not None and plan.chosen is not None:
        memory = plan.chosen.trainer.fullest.total / 2**30
        lines.append(f"# Predicted: {plan.step_seconds:.0f} s a step, {memory:.0f} GiB a GPU (megatron-dapo plan).")
    lines.append(f"# Check it with `megatron-dapo train {file} --dry-run`; start it with `{start}`.")
    write_or_print("\n".join([*lines, dump_yaml(apply_overrides(nested(found), settings))]), output)
    if output:
        print(f"wrote {output}; next: megatron-dapo train {output} --dry-run")
    return 0


def planned(model: str, data: str, gpus: int, gpu: str, settings: list[str]) -> tuple[dict[str, Any], Plan | None]:
    """The settings that differ from the defaults, by dotted key, and the plan that they follow."""
    recipe: dict[str, Any] = {"policy.model": model, "data.path": data, "algorithm.overlong.penalty": "soft"}
    per_node = _given("slurm.gpus_per_node", settings) or min(gpus, GPUS_PER_NODE)
    recipe |= (SMALL if gpus < LARGE else {}) | _machine_settings(gpus, per_node)
    if given := _given("rollout.max_response_tokens", settings):
        recipe["algorithm.overlong.cache_length"] = max(1, given // 4)
    config = _config(recipe, settings)
    shape = model_shape(config.policy.model)
    room = shape.max_positions - config.rollout.max_prompt_tokens
    lengths = [length for length in SHORTER if length <= room] or SHORTER[-1:]
    for longest in lengths if gpus < LARGE and given is None else (None,):
        if longest is not None:
            recipe |= {"rollout.max_response_tokens": longest, "algorithm.overlong.cache_length": longest // 4}
        config = _config(recipe, settings)
        if not gpus:
            check_config(config, shape=shape)
            return recipe, None
        cluster = cluster_of(config.slurm, gpu, gpus)
        plan = make_plan(config, shape, cluster, Workload.of(config), choose=True)
        if not plan.fits and not config.policy.model_fields_set.isdisjoint(KEYS):  # may leave less memory free
            plan = make_plan(config, shape, cluster, Workload.of(config))
        if plan.fits and plan.chosen is not None:
            recipe |= plan.chosen.changes(config)
            if plan.chosen.engine is not None and gpus == per_node:
                recipe["rollout.servers.count"] = gpus // plan.chosen.engine.tensor_parallel
            check_config(_config(recipe, settings), cluster.trainer_gpus, shape)
            return recipe, plan
    raise ConfigError(
        f"{model} does not fit on {_machine(gpus, gpu)}: {'; '.join(plan.problems)}. Use more GPUs, a smaller "
        "model, or LoRA (policy.lora, docs/lora.md)"
    )


def _config(recipe: dict[str, Any], settings: list[str]) -> Config:
    return parse_config(apply_overrides(nested(recipe), settings))


def _given(key: str, settings: list[str]) -> int | None:
    """The whole number that the settings give this key."""
    value = dict(leaves(apply_overrides({}, settings))).get(key)
    return value if isinstance(value, int) else None


def _machine_settings(gpus: int, per_node: int) -> dict[str, Any]:
    """Trainer and engines share all GPUs; without one, the embedded engine."""
    if not gpus:
        return {
            "rollout.engine": "embedded", "policy.precision": "fp32", "trainer.prompts_per_step": 8,
            "trainer.mini_batch_prompts": 4, "policy.micro_batch_tokens": 4096, "slurm.gpus_per_node": 0,
        }  # fmt: skip
    if gpus % per_node:
        raise ConfigError(f"--gpus is {gpus}: name a multiple of the {per_node} in a node (slurm.gpus_per_node)")
    found: dict[str, Any] = {
        "rollout.engine": "sglang", "rollout.servers.share_gpus": True, "rollout.weights.transport": "tensor",
        "slurm.nodes": gpus // per_node, "slurm.gpus_per_node": per_node,
    }  # fmt: skip
    if gpus > per_node:
        found["rollout.weights.keep_snapshot"] = False
    return found


def _machine(gpus: int, gpu: str) -> str:
    return f"{gpus} × {gpu}" if gpus else "CPU cores"
