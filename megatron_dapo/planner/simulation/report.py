"""Tables and JSON of simulations."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.planner.simulation.run import Simulation
from megatron_dapo.planner.simulation.sweep import Variant

COLUMNS = ("step", "collecting", "× limit", "utilisation", "tok/s", "waste", "staleness")


def cells(variant: Variant) -> list[str]:
    """What the columns of the table show for one variant."""
    found = variant.simulation
    if found is None:
        return [""] * len(COLUMNS)
    speed = found.mean("tokens") * variant.parts / found.mean("collecting")
    return [
        f"{found.step_seconds:,.0f} s", f"{found.mean('collecting'):,.0f} s", f"{found.over_limit:.2f}",
        f"{found.utilisation:.0%}", f"{speed:,.0f}", f"{found.waste:.0%}",
        f"{found.mean('mean_staleness'):.2f} (at most {max(step.max_staleness for step in found.steps)})",
    ]  # fmt: skip


def label(variant: Variant) -> str:
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in variant.values.items()) or "as configured"


def print_variants(variants: list[Variant], console: Console) -> None:
    first = next((variant for variant in variants if variant.simulation), None)
    if first is not None and first.simulation is not None:
        _print_set_up(first.simulation, first.parts, console)
    table = Table(title="Simulated steps", title_justify="left", title_style="bold")
    table.add_column("setting", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=column != "staleness")
    ranked = sorted(variants, key=lambda v: v.simulation.step_seconds if v.simulation else float("inf"))
    for variant in ranked:
        table.add_row(label(variant), *cells(variant))
    with console.capture() as capture:
        console.print(table)
    console.file.write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")
    for variant in variants:
        if variant.problem:
            console.print(f"· {label(variant)}: {variant.problem}", highlight=False)
    console.print(
        "× limit: seconds of collecting a batch over those of engines that are always full, for the same trained "
        "tokens and yield. Utilisation: of the whole step. Waste: tokens in dropped groups. Staleness: of trained "
        "tokens, in weight versions.",
        highlight=False,
    )


def _print_set_up(found: Simulation, parts: int, console: Console) -> None:
    setting, work = found.setting, found.setting.work
    part = f" (one of {parts} equal parts of the fleet was simulated)" if parts > 1 else ""
    console.print(
        f"{setting.fleet.servers * parts} servers × {setting.fleet.max_running} running, {work.prompts * parts} groups "
        f"× {work.samples_per_prompt} samples of {work.mean_response} tokens (sigma {work.sigma:.2f}, at most "
        f"{work.max_response}), {work.kept:.0%} kept; training {setting.training_seconds:,.0f} s, weight update "
        f"{setting.sync_seconds:,.1f} s; {len(found.steps)} steps, the last {len(found.counted)} count{part}",
        highlight=False,
    )


def variants_json(variants: list[Variant]) -> list[dict[str, Any]]:
    return [_json(variant) for variant in variants]


def _json(variant: Variant) -> dict[str, Any]:
    found = variant.simulation
    if found is None:
        return {"setting": variant.values, "problem": variant.problem}
    return {
        "setting": variant.values,
        "step_seconds": found.step_seconds,
        "collecting_seconds": found.mean("collecting"),
        "limit_seconds": found.limit,
        "over_limit": found.over_limit,
        "utilisation": found.utilisation,
        "waste": found.waste,
        "kept": found.mean("kept"),
        "mean_staleness": found.mean("mean_staleness"),
        "max_staleness": max(step.max_staleness for step in found.steps),
        "training_seconds": found.setting.training_seconds,
        "sync_seconds": found.setting.sync_seconds,
        "parts": variant.parts,
    }
