"""`megatron-dapo doctor`: runs the checks and prints one line each. Exit code 1 when a check failed, else 0."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from megatron_dapo.arguments import print_json, table_console
from megatron_dapo.config import Config, ConfigError, ModelShape, load_config
from megatron_dapo.config.load import local_model
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.doctor import gpu, machine, software
from megatron_dapo.doctor.check import Check, Probe, examine
from megatron_dapo.errors import UserError
from megatron_dapo.planner.parameters import count_parameters, trained_parameters

INDENT = 21
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def probes(config: Config, named: bool) -> list[Probe]:
    """All checks for this configuration; `named` says whether the user gave one (defaults name no model)."""
    run_dir = Path(config.trainer.run_dir)
    shape_of = cache(_shape)  # asks the hub once
    shape = shape_of(config.policy.model)
    models = [config, config.of_critic] if config.uses_critic else [config]
    saved = sum(
        trained_parameters(trained, PolicyConfig(lora=model.policy.lora), 0).total
        for model in models if (trained := shape_of(model.policy.model))
    )  # fmt: skip
    size = 2 * count_parameters(shape).total if shape and config.rollout.weights.writes_files else 0
    servers = config.rollout.servers
    found = [
        Probe("python", software.python_version),
        Probe("packages", software.packages),
        Probe("lock", software.lock),
        Probe("apex", software.apex),
        Probe("gpu", gpu.gpu, 30),
        Probe("torch", gpu.torch_cuda, 120),
        Probe("attention", gpu.attention, 310),
        Probe("kernels", gpu.kernels, 130),
        Probe("run directory", partial(machine.run_directory, run_dir, config.slurm.nodes), 60),
        Probe("disk", partial(machine.free_disk, run_dir, saved, config.trainer.kept_checkpoints)),
        Probe("shared memory", machine.shared_memory),
        Probe("clock", partial(machine.clock_skew, run_dir)),
        Probe("limits", machine.limits),
        Probe("hf cache", machine.hf_cache),
        Probe("slurm", machine.slurm, 40),
    ]
    if config.rollout.engine == "sglang":
        found.append(Probe("ports", partial(machine.ports, servers.host, servers.port, servers.count)))
        found.append(Probe("weights", partial(machine.weights_directory, Path(config.rollout.weights.directory), size)))
        if named:
            found.append(Probe("sglang", partial(machine.serving_python, servers), 160))
    if named:
        found.append(Probe("bitwise resume", partial(machine.bitwise_resume, config)))
    if shape and shape.linear:
        found.append(Probe("delta rule", gpu.delta_rule, 130))
    if config.policy.model:
        found.append(Probe("model", partial(machine.model_directory, config.policy.model), 120))
    return found


def _shape(model: str) -> ModelShape | None:
    """None when no model is named or it cannot be read; the `model` check reports that."""
    try:
        return ModelShape.from_dir(local_model(model, weights=False)) if model else None
    except (ConfigError, OSError):
        return None


def run(
    config: str | None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
    timeout: float | None = None,
    only: str | None = None,
    make: Callable[[Config, bool], list[Probe]] = probes,
) -> int:
    if config and Path(config).is_dir():
        from megatron_dapo.doctor import run_directory  # imports torch

        found = run_directory.probes(Path(config), overrides)
    else:
        found = make(load_config(config, overrides), config is not None)
    checks: list[Check] = []
    console = table_console(markup=True)
    for probe in _choose(found, only):  # one after the other, so that none disturbs the measured write speed
        checks.append(examine(probe, timeout))
        if not as_json:
            print_check(checks[-1], console)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        count = {status: sum(check.status == status for check in checks) for status in STYLES}
        console.print(f"\n{count['ok']} ok, {count['warn']} warnings, {count['fail']} failed")
    return 1 if any(check.status == "fail" for check in checks) else 0


def _choose(found: list[Probe], only: str | None) -> list[Probe]:
    if not only:
        return found
    names = [name.strip() for name in only.split(",")]
    known = [probe.name for probe in found]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--only: no check is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [probe for probe in found if probe.name in names]


def print_check(check: Check, console: Console) -> None:
    style = STYLES[check.status]
    width = max(40, console.width - INDENT)
    found = textwrap.wrap(check.found, width) or [""]
    lines = [*found, *textwrap.wrap(check.remedy, width, initial_indent="→ ", subsequent_indent="  ")]
    console.print(f"[{style}]{check.status:<5}[/]{escape(check.name):<15} {escape(lines[0])}", soft_wrap=True)
    for line in lines[1:]:
        console.print(f"{'':<{INDENT}}{escape(line)}", soft_wrap=True)
