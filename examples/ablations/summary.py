"""The tables and the figure of a finished grid, from the table.json of each task.

    python examples/ablations/summary.py runs/ablation_grid                          # Markdown
    python examples/ablations/summary.py runs/ablation_grid --figure grid.png
    python examples/ablations/summary.py runs/ablation_grid --into examples/ablations/README.md benchmarks/RESULTS.md

For each task the effect of its change: over the grid (with minus without, averaged over the 8 settings of the others)
and leave-one-out (all changes minus all but this one), with 95 % intervals over seeds. Then the effect of every change
on the held-out score of every task.

A folder with a table.json of its own is one task for all four changes (gsm8k.yaml): each change has its measures there,
leave-one-out, and every run its values.

    python examples/ablations/summary.py runs/ablation_gsm8k --figure gsm8k.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dapo.ablation.command import with_interval
from megatron_dapo.ablation.designs import SWITCH_LABELS, Effect, effects
from megatron_dapo.ablation.results import Curve, Runs, band, effect_of, value_of
from megatron_dapo.config import parse_config

# The change that a task is for, and its measures. "by definition": the setting itself fixes the value with the change.
TASKS = {
    "entropy": ("clip-higher", {"entropy": "", "clipped_high": "", "held_out": ""}),
    "signal": ("dynamic sampling", {"effective_batch": "", "zero_advantage": "by definition", "held_out": ""}),
    "long_wrong": ("token-level loss", {"length_wrong": "", "long_token_weight": "by definition", "held_out": ""}),
    "truncated": (
        "overlong handling",
        {"held_out": "", "reward_noise": "", "length": "", "truncated_weight": "by definition"},
    ),
}
BEGIN, END = "<!-- grid: begin -->", "<!-- grid: end -->"


def find_effect(design: str, label: str) -> Effect:
    return next(effect for effect in effects(design, parse_config({})) if effect.label == label)  # type: ignore[arg-type]


def runs_of(table: dict[str, Any]) -> Runs:
    return {name: {int(seed): curves for seed, curves in found.items()} for name, found in table["runs"].items()}


def side_runs(effect: Effect, side: int, runs: Runs) -> dict[int, list[dict[str, Curve]]]:
    """By seed, the curves of one side of the pairs: those runs that the effect is computed from."""
    pairs = [pair for pair in effect.pairs if all(runs.get(name) for name in pair)]
    seeds = set.intersection(*(set(runs[name]) for pair in pairs for name in pair)) if pairs else set()
    return {seed: [runs[pair[side]][seed] for pair in pairs] for seed in sorted(seeds)}


def side_mean(effect: Effect, side: int, measure: str, runs: Runs) -> float | None:
    values = [value_of(measure, curves) for found in side_runs(effect, side, runs).values() for curves in found]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def shown(found: dict[str, Any] | None, kind: str) -> str:
    if found is None:
        return "–"
    return f"{with_interval(found, kind)} ({found['runs']} seed{'s' if found['runs'] > 1 else ''})"


def number(value: float | None, kind: str) -> str:
    return "–" if value is None else ("{:.1%}" if kind == "percent" else "{:.4g}").format(value)


def change_rows(task: str, change: str, table: dict[str, Any], designs: Sequence[str]) -> list[str]:
    """The measures of one change; `change` is a key of TASKS. An effect for each design."""
    label, measures = TASKS[change]
    runs, rows = runs_of(table), []
    known = {measure["id"]: measure for measure in table["measures"]}
    by_design = [find_effect(design, label) for design in designs]
    for name, note in measures.items():
        if name not in known:
            continue
        kind = known[name]["format"]
        means = " → ".join(number(side_mean(by_design[0], side, name, runs), kind) for side in (1, 0))
        found = [effect_of(effect, name, runs) for effect in by_design]
        verdict = note or (found[0]["verdict"] if found[0] else "no run")
        cells = (task, label, known[name]["label"].lower(), means, *(shown(one, kind) for one in found), verdict)
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def one_task(table: dict[str, Any]) -> str:
    """Leave-one-out of a task with all four changes: the measures of each change, then every run's values."""
    lines = ["| task | change | measure | without → with | effect | verdict |", "|---|---|---|---|---|---|"]
    lines += [row for change in TASKS for row in change_rows(table["title"], change, table, ["leave-one-out"])]
    measures = {measure["id"]: measure for measure in table["measures"]}
    lines += ["", "| combination | seeds | held-out before → after | " + " | ".join(
        measure["label"].lower() for name, measure in measures.items() if name != "held_out"
    ) + " |", "|---" * (len(measures) + 2) + "|"]  # fmt: skip
    for row in table["combinations"]:
        if not row["seeds"]:
            continue
        scores = row["bands"]["held_out"]["y"]
        values = [row["values"].get(name, {}).get("mean") for name in measures if name != "held_out"]
        kinds = [measure["format"] for name, measure in measures.items() if name != "held_out"]
        cells = (
            row["name"], str(len(row["seeds"])), f"{number(scores[0], 'percent')} → {number(scores[-1], 'percent')}",
            *(number(value, kind) for value, kind in zip(values, kinds, strict=True)),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    done = f"{table['finished']} of {table['planned']} runs, {table['seconds'] / 60:.1f} minutes in all."
    return "\n".join([*lines, "", done])


def markdown(tables: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| task | change | measure | without → with | effect in the grid | leave-one-out | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    designs = ["grid", "leave-one-out"]
    lines += [row for task, table in tables.items() for row in change_rows(task, task, table, designs)]
    lines += [
        "",
        "Effect on the held-out score, in the grid:",
        "",
        "| task | " + " | ".join(SWITCH_LABELS.values()) + " |",
    ]
    lines.append("|---" * (1 + len(SWITCH_LABELS)) + "|")
    for task, table in tables.items():
        cells = []
        for label in SWITCH_LABELS.values():
            found = effect_of(find_effect("grid", label), "held_out", runs_of(table))
            star = "*" if found and found["verdict"] in ("higher", "lower") else ""
            cells.append("–" if found is None else with_interval(found, "percent") + star)
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    finished, planned = (sum(table[name] for table in tables.values()) for name in ("finished", "planned"))
    minutes = sum(table["seconds"] for table in tables.values()) / 60
    return "\n".join([*lines, "", f"{finished} of {planned} runs, {minutes:.0f} minutes of one core in all."])


def mean_curves(effect: Effect, side: int, measure: str, runs: Runs) -> list[Curve]:
    """Of each seed, the mean curve of the runs on one side of the pairs."""
    by_seed = side_runs(effect, side, runs).values()
    means = [band(known) for found in by_seed if (known := [curves[measure] for curves in found if measure in curves])]
    return [{"x": mean["x"], "y": mean["y"]} for mean in means]


def draw(tables: dict[str, dict[str, Any]], path: Path, design: str = "grid") -> None:
    """A panel for each key of TASKS: the first measure of its change that has a curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(4 * len(tables), 3.4), layout="constrained", squeeze=False)
    for panel, (task, table) in zip(axes[0], tables.items(), strict=True):
        label, measures = TASKS[task]
        runs, effect = runs_of(table), find_effect(design, label)
        curves = {name for by_seed in runs.values() for found in by_seed.values() for name in found}
        few = {"held_out"} if design == "leave-one-out" else set()  # evaluated before the first and after the last step
        name = next(name for name in measures if name in curves - few)
        for side, text in ((0, f"with {label}"), (1, "without")):
            if not (curves := mean_curves(effect, side, name, runs)):
                continue
            curve = band(curves)
            (line,) = panel.plot(curve["x"], curve["y"], label=text)
            if None not in curve["low"]:
                panel.fill_between(curve["x"], curve["low"], curve["high"], alpha=0.2, color=line.get_color())
        title = next(measure["label"] for measure in table["measures"] if measure["id"] == name)
        panel.set(xlabel="rollout step", title=f"{table['title']}: {title.lower()}")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def put_into(page: Path, text: str) -> None:
    """Replaces what is between the two marks."""
    before, found, rest = page.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{page}: expected the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the --out of megatron-dapo ablate")
    parser.add_argument("--figure", type=Path, help="also draw the first measure of each task")
    parser.add_argument("--into", type=Path, nargs="+", default=[], help="pages that get the tables, between marks")
    args = parser.parse_args()
    files = {task: args.results / task / "table.json" for task in TASKS}
    tables = {task: json.loads(file.read_text()) for task, file in files.items() if file.exists()}
    design, alone = "grid", args.results / "table.json"
    if alone.exists():
        tables, design = dict.fromkeys(TASKS, json.loads(alone.read_text())), "leave-one-out"
    if not tables:
        folders = [args.results, *(file.parent for file in files.values())]
        print(f"no table.json in {', '.join(map(str, folders))}", file=sys.stderr)
        return 2
    text = markdown(tables) if design == "grid" else one_task(tables["entropy"])
    print(text)
    for page in args.into:
        put_into(page, text)
    if args.figure:
        draw(tables, args.figure, design)
    return 0


if __name__ == "__main__":
    sys.exit(main())
