"""Tables and JSON of simulations, and a picture: engines and trainer over time, in one HTML file without scripts."""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.files import write_atomically
from megatron_dapo.planner.simulation.run import Simulation, Variant

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
        "parts": variant.parts,
    }


WIDTH, LEFT, ROW, BINS = 1160, 80, 18, 240
MOST_PICTURES, MOST_SERVERS = 12, 32
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Simulated runs · megatron-dapo</title>
<style>{style}
main {{ padding-top: 20px; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 4px 12px; text-align: right; border-bottom: 1px solid var(--line); }}
td:first-child, th:first-child {{ text-align: left; }}
figure.card {{ margin: 16px 0; overflow-x: auto; }}
svg text {{ fill: var(--muted); font-size: 11px; }}
.engine {{ fill: var(--c0); }} .wait {{ fill: var(--grid); }} .train {{ fill: var(--c2); }} .sync {{ fill: var(--c1); }}
.step {{ stroke: var(--muted); stroke-dasharray: 2 3; }} .track {{ fill: var(--grid); }}
</style>
</head>
<body><main>
<h1>Simulated runs</h1>
<p class="muted">The sampler on a virtual clock. Blue: a server's running sequences as a share of its slots.
Green: training. Orange: weight update. Dashed: the end of a step.</p>
{table}
{figures}
</main></body>
</html>
"""


def write_page(variants: list[Variant], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(variants).encode())


def render(variants: list[Variant]) -> str:
    style = (files("megatron_dapo.observe") / "page" / "report.css").read_text(encoding="utf-8")
    done = [variant for variant in variants if variant.simulation is not None]
    done.sort(key=lambda variant: variant.simulation.step_seconds if variant.simulation else 0.0)
    rows = "".join(_row([label(variant), *cells(variant)], "td") for variant in done)
    table = f'<div class="card"><table>{_row(["setting", *COLUMNS], "th")}{rows}</table></div>'
    longest = max((v.simulation.seconds for v in done[:MOST_PICTURES] if v.simulation), default=1.0)
    figures = "".join(
        f'<figure class="card"><figcaption><h3>{html.escape(label(variant))}</h3></figcaption>'
        f"{gantt(variant.simulation, longest)}</figure>"
        for variant in done[:MOST_PICTURES]
        if variant.simulation is not None
    )
    return PAGE.format(style=style, table=table, figures=figures)


def _row(values: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"


def gantt(found: Simulation, longest: float) -> str:
    """One row per server, and one for the trainer; all pictures of a page have the same time axis."""
    traces = found.trace[:MOST_SERVERS]
    scale = (WIDTH - LEFT - 10) / longest
    height = ROW * (len(traces) + 1) + 30
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="engines and trainer over time">'
    ]
    for number, trace in enumerate(traces):
        parts.append(_server(trace, number, found, scale))
    y = ROW * len(traces) + 4
    parts.append(f'<text x="0" y="{y + 12}">trainer</text>')
    for bar in found.bars:
        width = max(0.5, (bar.ended - bar.began) * scale)
        parts.append(
            f'<rect class="{bar.name}" x="{LEFT + bar.began * scale:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{ROW - 4}">'
            f"<title>{bar.name}: {bar.ended - bar.began:,.0f} s</title></rect>"
        )
    bottom = y + ROW
    for step in found.steps:
        x = LEFT + step.ended * scale
        parts.append(f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
    for tenth in range(11):
        seconds = longest * tenth / 10
        parts.append(f'<text x="{LEFT + seconds * scale:.0f}" y="{bottom + 14}">{seconds:,.0f} s</text>')
    return "".join(parts) + "</svg>"


def _server(trace: list[tuple[float, int]], number: int, found: Simulation, scale: float) -> str:
    """A server's occupancy: cells whose opacity is the mean share of its slots that are running."""
    y = ROW * number
    width = found.seconds / BINS * scale
    track = f'<rect class="track" x="{LEFT}" y="{y}" width="{found.seconds * scale:.1f}" height="{ROW - 4}"/>'
    drawn = [f'<text x="0" y="{y + 12}">server {number}</text>', track]
    for index, running in enumerate(occupancy(trace, found.seconds, BINS)):
        share = running / found.setting.fleet.max_running
        if share > 0.004:
            x = LEFT + index * width
            drawn.append(
                f'<rect class="engine" x="{x:.1f}" y="{y}" width="{width + 0.3:.1f}" height="{ROW - 4}" '
                f'opacity="{min(1.0, share):.2f}"/>'
            )
    return "".join(drawn)


def occupancy(trace: list[tuple[float, int]], seconds: float, bins: int) -> list[float]:
    """Mean number of running sequences in each of `bins` equal parts of the time."""
    sums, width = [0.0] * bins, seconds / bins
    for (began, running), (ended, _) in zip(trace, [*trace[1:], (seconds, 0)], strict=True):
        while running and began < ended:
            index = min(bins - 1, int(began / width))
            until = min(ended, (index + 1) * width) if index < bins - 1 else ended
            if until <= began:  # rounding at the border of a part
                until = min(ended, (index + 2) * width)
            sums[index] += running * (until - began)
            began = until
    return [total / width for total in sums]
