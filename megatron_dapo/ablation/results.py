"""The results of an ablation: curves of every run, means with confidence intervals, and the effect of each change.

A run is the unit of all intervals: a value per seed, then Student's t over the seeds. An effect is the mean over pairs
of combinations that differ in one change, formed within a seed, so that what a seed shares cancels out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.ablation.designs import DAPO, VAPO, Effect, Variant
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation.results import mean_interval
from megatron_dapo.files import write_atomically
from megatron_dapo.observe.metrics_file import EVAL, filter_yield, read_records
from megatron_dapo.observe.report import fill_page

CONFIDENCE = 0.95
Curve = dict[str, list[float]]  # x: steps, y: values
Curves = dict[str, Curve]


@dataclass(frozen=True, slots=True)
class Measure:
    """A curve. The value of a run is its mean over the last quarter of the steps, or what `at` says."""

    label: str
    note: str
    format: str
    metric: str = ""  # its name in metrics.jsonl; empty: computed below
    at: str = "last quarter"


MEASURES: dict[str, Measure] = {
    "reward": Measure("Reward", "mean over trained responses, penalties included", "number", "reward/mean"),
    "accuracy": Measure("Accuracy", "share of right responses among all sampled", "percent", "reward/accuracy_all"),
    "held_out": Measure("Held-out score", "avg@k", "percent", at="last evaluation"),
    "entropy": Measure("Entropy", "mean per token, in nats", "number", "train/entropy"),
    "clipped_high": Measure(
        "Clipped at the top", "share of tokens whose ratio the upper bound replaced", "percent",
        "train/clip_fraction_high",
    ),
    "length": Measure("Response length", "mean tokens per trained response", "number", "rollout/length_trained"),
    "yield": Measure("Yield", "share of judged groups that are trained on and have a signal", "percent"),
    "zero_advantage": Measure(
        "Zero-advantage groups", "share of trained groups", "percent", "reward/zero_advantage_share"
    ),
    "effective_batch": Measure("Effective batch", "trained groups with a signal", "number"),
    "truncated": Measure("Truncated", "share of trained responses", "percent", "rollout/truncated_share"),
    "truncated_weight": Measure(
        "Truncated in the loss", "share of |advantage| that truncated responses carry", "percent",
        "reward/truncated_advantage_share",
    ),
    "long_token_weight": Measure(
        "Weight of a long response's token", "longest quarter of responses, relative to the mean token", "number",
        "rollout/long_token_weight",
    ),
    "length_wrong": Measure("Length of wrong responses", "mean tokens", "number", "rollout/length_wrong"),
    "explained_variance": Measure(
        "Explained variance", "share of the returns' variance that the critic explains", "percent",
        "critic/explained_variance",
    ),
    "score": Measure(
        "Score in the loss", "mean over responses in the loss, without penalties", "number", "reward/score_in_loss"
    ),
    "reward_noise": Measure(
        "Reward noise", "standard deviation of the score in the loss between neighbouring steps", "number",
        at="whole run",
    ),
}  # fmt: skip


def read_curves(run_dir: Path) -> Curves:
    """The measures that the run has values for."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in MEASURES}
    for record in read_records(run_dir / "metrics.jsonl"):
        metrics = record.metrics
        if record.kind == EVAL:
            scores = [value for name, value in metrics.items() if re.fullmatch(r"eval/(.+/)?avg@\d+", name)]
            points["held_out"] += [(record.step, scores[0])] if scores else []  # of several benchmarks, the first
            continue
        found = {name: metrics.get(measure.metric) for name, measure in MEASURES.items() if measure.metric}
        zero, share = metrics.get("reward/zero_advantage_share", 0.0), filter_yield(metrics)
        found["effective_batch"] = metrics.get("rollout/groups_kept", math.nan) * (1 - zero)
        found["yield"] = None if share is None else share * (1 - zero)
        for name, value in found.items():
            if value is not None and math.isfinite(value):
                points[name].append((record.step, value))
    if not points["held_out"]:
        raise UserError(f"{run_dir} has no evaluation: evaluate.every must be at most trainer.steps")
    return {
        name: {"x": [step for step, _ in found], "y": [value for _, value in found]}
        for name, found in points.items()
        if found
    }


def value_of(name: str, curves: Mapping[str, Curve]) -> float | None:
    """A run's one number for a measure; None if it has none."""
    curve = curves.get("score" if name == "reward_noise" else name)
    if curve is None or not curve["y"]:
        return None
    values = curve["y"]
    if name == "held_out":
        return values[-1]
    if name == "reward_noise":
        squares = [(b - a) ** 2 for a, b in pairwise(values)]
        return math.sqrt(fmean(squares) / 2) if squares else None
    return fmean(values[-max(1, len(values) // 4) :])


Runs = dict[str, dict[int, Curves]]  # by combination and seed


def load_results(task: Path, combinations: Sequence[str], seeds: Sequence[int]) -> tuple[Runs, float]:
    """The stored curves of these runs, without those that have no result, and their seconds altogether."""
    runs: Runs = {name: {} for name in combinations}
    seconds = 0.0
    for name in combinations:
        for seed in seeds:
            file = task / "results" / name / f"seed_{seed}.json"
            if file.exists():
                stored = json.loads(file.read_text())
                runs[name][seed] = stored["curves"]
                seconds += stored["seconds"]
    return runs, seconds


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval as JSON values; without an interval if there are fewer than two values."""
    found = mean_interval(values, CONFIDENCE)
    low, high = found if found is not None else (None, None)
    return {"mean": fmean(values), "low": low, "high": high, "runs": len(values)}


def band(curves: Sequence[Curve]) -> dict[str, list[Any]]:
    """The mean over runs with its interval, at every step that all runs have."""
    common = sorted(set.intersection(*(set(curve["x"]) for curve in curves)))
    values = [dict(zip(curve["x"], curve["y"], strict=True)) for curve in curves]
    at = [interval([run[step] for run in values]) for step in common]
    columns = {"y": "mean", "low": "low", "high": "high"}
    return {"x": common} | {name: [_shown(point[key]) for point in at] for name, key in columns.items()}


def _shown(value: float | None) -> float | None:
    """Four digits: what a chart shows, in a third of the file."""
    return None if value is None else float(f"{value:.4g}")


def effect_of(effect: Effect, name: str, runs: Runs) -> dict[str, Any] | None:
    """The effect on one measure. Pairs with a combination that has no run are left out; of the others, only seeds that
    all their runs have are used. None without such a seed."""
    complete = [pair for pair in effect.pairs if all(runs.get(side) for side in pair)]
    if not complete:
        return None
    seeds = set.intersection(*(set(runs[side]) for pair in complete for side in pair))
    per_seed = []
    for seed in sorted(seeds):
        pairs = [[value_of(name, runs[side][seed]) for side in pair] for pair in complete]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if len(differences) == len(pairs):
            per_seed.append(fmean(differences))
    if not per_seed:
        return None
    found = interval(per_seed)
    return found | {"verdict": verdict(found), "pairs": len(complete), "per_seed": per_seed}


def verdict(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return "one seed: no interval"
    if found["low"] <= 0 <= found["high"]:
        return "no visible effect"
    return "higher" if found["mean"] > 0 else "lower"


def make_table(title: str, design: str, variants: Sequence[Variant], effects: Sequence[Effect], runs: Runs,
               planned: int, seconds: float) -> dict[str, Any]:  # fmt: skip
    """What table.json holds and the page shows."""
    present = {name for by_seed in runs.values() for curves in by_seed.values() for name in curves}
    if "score" in present:
        present.add("reward_noise")
    measures = [name for name in MEASURES if name in present]
    combinations = []
    for variant in variants:
        by_seed = runs.get(variant.folder, {})
        bands = {name: [curves[name] for curves in by_seed.values() if name in curves] for name in measures}
        values = {name: [value_of(name, curves) for curves in by_seed.values()] for name in measures}
        known = {name: [v for v in found if v is not None] for name, found in values.items()}
        combinations.append({
            "name": variant.name, "folder": variant.folder, "changes": sorted(variant.changes),
            "paper": variant.paper, "seeds": sorted(by_seed),
            "bands": {name: band(found) for name, found in bands.items() if found},
            "values": {name: interval(found) for name, found in known.items() if found},
        })  # fmt: skip
    return {
        "title": title, "design": design, "confidence": CONFIDENCE, "planned": planned,
        "finished": sum(len(by_seed) for by_seed in runs.values()), "seconds": round(seconds, 1),
        "measures": [
            {"id": name, "label": m.label, "note": m.note, "format": m.format, "at": m.at}
            for name, m in MEASURES.items() if name in measures
        ],
        "combinations": combinations,
        "effects": [
            {"label": effect.label, "pairs": len(effect.pairs),
             "measures": {name: found for name in measures if (found := effect_of(effect, name, runs)) is not None}}
            for effect in effects
        ],
        "runs": {name: {str(seed): curves for seed, curves in by_seed.items()} for name, by_seed in runs.items()},
    }  # fmt: skip


PANELS = ("reward", "accuracy", "held_out", "entropy", "length", "yield")


def write_ablation_page(table: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_ablation(table).encode())


def render_ablation(table: dict[str, Any]) -> str:
    """A switch for each of the recipe's changes, and the curves of the chosen combination among all others."""
    data = {name: value for name, value in table.items() if name != "runs"}  # the bands are enough for the page
    known = [measure["id"] for measure in table["measures"]]
    changes = {change for combination in table["combinations"] for change in combination["changes"]}
    recipe = DAPO if changes <= {part for parts in DAPO.switches.values() for part in parts} else VAPO
    data |= {
        "version": __version__,
        "switches": [{"id": id, "label": recipe.labels[id], "changes": parts} for id, parts in recipe.switches.items()],
        "panels": [name for name in PANELS if name in known],
        "more": [
            name for name in known if name not in PANELS and any(name in c["bands"] for c in data["combinations"])
        ],
    }
    title = f"Ablation: {table['title']}"
    return fill_page(title, ["chart.js", "ablation.js"], ["report.css", "ablation.css"], data)
