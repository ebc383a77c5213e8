"""Tables and JSON of simulations, and a trace: engines and trainer over time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from rich.console import Console

from megatron_dapo.observe import timeline
from megatron_dapo.planner.report import make_table, print_table
from megatron_dapo.planner.simulation.run import Simulation, Variant

COLUMNS = (">step", ">collecting", ">× limit", ">utilisation", ">tok/s", ">waste", "staleness")


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
    _print_set_up(*next((v.simulation, v.parts) for v in variants if v.simulation), console)
    table = make_table("Simulated steps", "setting", *COLUMNS)
    ranked = sorted(variants, key=lambda v: v.simulation.step_seconds if v.simulation else float("inf"))
    for variant in ranked:
        table.add_row(label(variant), *cells(variant))
    print_table(table, console)
    for variant in variants:
        if variant.problem:
            console.print(f"· {label(variant)}: {variant.problem}")
    console.print(
        "× limit: seconds of collecting a batch over those of engines that are always full, for the same trained "
        "tokens and yield. Utilisation: of the whole step. Waste: tokens in dropped groups. Staleness: of trained "
        "tokens, in weight versions."
    )


def _print_set_up(found: Simulation, parts: int, console: Console) -> None:
    setting, work = found.setting, found.setting.work
    part = f" (one of {parts} equal parts of the fleet was simulated)" if parts > 1 else ""
    spread = f"Pareto {work.pareto:g}" if work.pareto else f"sigma {work.sigma:.2f}"
    critic = f", critic {setting.critic_seconds:,.0f} s beside the next batch" if setting.critic_seconds else ""
    console.print(
        f"{setting.fleet.servers * parts} servers × {setting.fleet.max_running} running, {work.prompts * parts} groups "
        f"× {work.samples_per_prompt} samples of {work.mean_response} tokens ({spread}, at most "
        f"{work.max_response}), {work.kept:.0%} kept; training {setting.training_seconds:,.0f} s, weight update "
        f"{setting.sync_seconds:,.1f} s{critic}; {len(found.steps)} steps, the last {len(found.counted)} count{part}"
    )
    if said := setting.incidents.describe():
        console.print(f"incidents: {said}")


def variant_json(variant: Variant) -> dict[str, Any]:
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
        "critic_seconds": found.setting.critic_seconds,
        "parts": variant.parts,
    }


def events(variants: list[Variant]) -> Iterator[dict[str, Any]]:
    """The trainer's phases and the running sequences of every server, as the traces of a run have them. Times are
    microseconds since the start."""
    tracks = count(1)
    for variant in variants:
        if (found := variant.simulation) is None:
            continue
        trainer = next(tracks)
        yield timeline.track_event(trainer, f"{label(variant)}: trainer")
        for phase in found.phases:
            yield timeline.phase_event(trainer, phase.name, round(phase.start * 1e6), round(phase.end * 1e6))
        for number, (points, server) in enumerate(zip(found.trace, tracks, strict=False)):
            yield timeline.track_event(server, f"{label(variant)}: server {number}")
            for seconds, running in points:
                yield timeline.running_event(server, round(seconds * 1e6), running)
