"""`megatron-dapo ablate CONFIG`: the paper's ablation as training runs: naive GRPO, then DAPO's changes one by one.

A variant is a list of settings on top of the given configuration. Each variant is trained once per seed, in a separate
process. An interrupted run is resumed and a finished one is not repeated. The table shows the measured scores.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_dapo.config import Config, load_config
from megatron_dapo.errors import UserError
from megatron_dapo.observe.metrics_file import read_records


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: tuple[str, ...]
    paper: float  # AIME 2024 avg@32 of the published 32B run, for comparison


def variants(config: Config) -> list[Variant]:
    """In the order of the paper's table. clip_high and the length penalty are taken from the configuration."""
    algorithm = config.algorithm
    penalty = "soft" if algorithm.overlong.penalty == "none" else algorithm.overlong.penalty
    steps: list[tuple[str, tuple[str, ...], float]] = [
        (
            "naive GRPO",
            (
                f"algorithm.clip_high={algorithm.clip_low}", "algorithm.aggregation=seq-mean-token-mean",
                "algorithm.overlong.filter=false", "algorithm.overlong.penalty=none",
                "rollout.dynamic_sampling=false",
            ),
            30,
        ),
        ("+ overlong filtering", ("algorithm.overlong.filter=true",), 36),
        ("+ clip-higher", (f"algorithm.clip_high={algorithm.clip_high}",), 38),
        ("+ soft overlong punishment", (f"algorithm.overlong.penalty={penalty}",), 41),
        ("+ token-level loss", ("algorithm.aggregation=token-mean",), 42),
        ("+ dynamic sampling", ("rollout.dynamic_sampling=true",), 50),
    ]  # fmt: skip
    found: list[Variant] = []
    total: tuple[str, ...] = ()
    for name, settings, paper in steps:
        total += settings
        found.append(Variant(name, total, paper))
    return found


def run_ablation(config_file: str, settings: Sequence[str], seeds: int, out: Path) -> int:
    """Trains every variant with every seed, writes table.json and ablation.png, and prints the table."""
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}: each variant needs at least one run")
    config = load_config(config_file, settings)
    if not config.evaluate.data.files or not config.evaluate.every:
        raise UserError("an ablation compares evaluation scores: set evaluate.data.path and evaluate.every")
    console = Console()
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for variant in variants(config):
        curves[variant.name] = []
        for seed in range(seeds):
            folder = out / variant.name.strip("+ ").replace(" ", "_") / f"seed_{seed}"
            console.print(f"{variant.name}, seed {seed} → {folder}", highlight=False)
            own = [f"trainer.seed={seed}", f"trainer.run_dir={folder}"]
            _train(config_file, [*settings, *variant.settings, *own], folder)
            curves[variant.name].append(evaluation_curve(folder))
    table = {name: [curve[-1][1] for curve in runs] for name, runs in curves.items()}
    (out / "table.json").write_text(json.dumps({"scores": table, "curves": curves}, indent=2) + "\n")
    draw(curves, out / "ablation.png")
    console.print(as_table(variants(config), table))
    console.print(f"written: {out / 'table.json'}, {out / 'ablation.png'}")
    return 0


def _train(config_file: str, settings: Sequence[str], folder: Path) -> None:
    """Trains in a separate process, so that runs cannot influence each other."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_dapo.cli", "train", config_file, "--set", "observe.console=plain"]
    for item in settings:
        command += ["--set", item]
    with (folder / "train.log").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise UserError(f"the run in {folder} ended with code {code}: see the end of {folder / 'train.log'}")


def evaluation_curve(run_dir: Path) -> list[tuple[int, float]]:
    """(step, avg@k) of every evaluation of a run; of several benchmarks, the first one's."""
    found = []
    for record in read_records(run_dir / "metrics.jsonl"):
        scores = [value for name, value in record.metrics.items() if re.fullmatch(r"eval/(.+/)?avg@\d+", name)]
        if scores:
            found.append((record.step, scores[0]))
    if not found:
        raise UserError(f"{run_dir} has no evaluation: evaluate.every must be at most trainer.steps")
    return found


def as_table(variants: Sequence[Variant], scores: dict[str, list[float]]) -> Table:
    seeds = len(next(iter(scores.values())))
    table = Table(title=f"avg@k at the end, mean ± standard deviation over {seeds} seeds")
    for column in ("", "here", "min", "max", "paper (AIME 2024, 32B)"):
        table.add_column(column, justify="left" if not column else "right")
    for variant in variants:
        values = scores[variant.name]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells = [f"{statistics.fmean(values):.1%} ± {spread:.1%}", f"{min(values):.1%}", f"{max(values):.1%}"]
        table.add_row(variant.name, *cells, f"{variant.paper:.0f}")
    return table


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """One line per variant: the mean over seeds, with the range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        columns = [[run[i][1] for run in runs] for i in range(len(steps))]
        (line,) = axes.plot(steps, [statistics.fmean(c) for c in columns], marker="o", markersize=3, label=name)
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
        )
    axes.set(xlabel="rollout step", ylabel="held-out avg@k", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
