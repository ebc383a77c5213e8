"""`megatron-dapo ablate CONFIG...`: DAPO's changes switched on and off in real training runs.

Designs: the paper's order (naive GRPO, then the changes one by one), all 16 combinations of the four changes, or
leave-one-out. Every combination is trained once per seed. A run that is part of several designs is trained once. The
results are table.json and ablation.html, made of whatever has finished.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.ablation.designs import Design, effects, variants
from megatron_dapo.ablation.results import load_results, make_table, write_ablation_page
from megatron_dapo.ablation.runs import Job, Outcome, run_jobs
from megatron_dapo.arguments import table_console
from megatron_dapo.config import Config, load_config
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically


def run_ablation(
    config_files: Sequence[str],
    settings: Sequence[str],
    seeds: int,
    out: Path,
    *,
    design: Design = "order",
    jobs: int = 1,
    minutes: float | None = None,
    discard: bool = False,
) -> int:
    """Trains what is missing and writes the results. 0 if every run has finished, else 1."""
    several = len(config_files) > 1  # each has a folder in `out`
    tasks = {out / Path(file).stem if several else out: file for file in config_files}
    if len(tasks) < len(config_files):
        raise UserError(f"expected files with different names, found {', '.join(config_files)}")
    configs = {task: _checked(file, settings) for task, file in tasks.items()}
    planned = plan(tasks, configs, settings, design, seeds)
    console, numbers = table_console(), itertools.count(1)

    def report(outcome: Outcome) -> None:
        number = next(numbers)
        if not outcome.skipped:
            text = f"FAILED, {outcome.problem}" if outcome.problem else f"{outcome.seconds:.0f} s"
            console.print(f"[{number}/{len(planned)}] {outcome.job}: {text}", highlight=False, markup=False)

    outcomes = run_jobs(planned, jobs, report, minutes=minutes, discard=discard)
    for task, config in configs.items():
        _write_results(task, config, design, seeds, console)
    return _summarise(outcomes, console)


def plan(
    tasks: dict[Path, str], configs: dict[Path, Config], settings: Sequence[str], design: Design, seeds: int
) -> list[Job]:
    """All runs in order. The tasks alternate, and all combinations get a seed before any gets the next one, so that an
    ablation that is stopped early compares equal numbers of seeds. The paper's order is kept. The other designs start
    with the full recipe, and a grid with all seeds of leave-one-out."""
    found = []
    for task, config in configs.items():
        first = {row.folder for row in variants(config, "leave-one-out" if design == "grid" else design)}
        rows = variants(config, design)
        for number, variant in enumerate(rows if design == "order" else rows[::-1]):
            for seed in range(seeds):
                job = Job(tasks[task], (*settings, *variant.settings), task, variant.folder, seed)
                found.append(((variant.folder not in first, seed, number), job))
    return [job for _, job in sorted(found, key=lambda item: item[0])]


def _checked(file: str, settings: Sequence[str]) -> Config:
    config = load_config(file, settings)
    if not config.evaluate.during_training:
        raise UserError("an ablation compares evaluation scores: set evaluate.data.path and evaluate.every")
    if config.algorithm.clip_high <= config.algorithm.clip_low:
        raise UserError(
            f"{file}: algorithm.clip_high is {config.algorithm.clip_high:g}, expected above clip_low "
            f"({config.algorithm.clip_low:g}): otherwise there is no clip-higher to switch off"
        )
    return config


def _write_results(task: Path, config: Config, design: Design, seeds: int, console: Console) -> None:
    rows = variants(config, design)
    runs, seconds = load_results(task, [row.folder for row in rows], range(seeds))
    if not any(runs.values()):
        return
    table = make_table(task.name, design, rows, effects(design, config), runs, len(rows) * seeds, seconds)
    write_atomically(task / "table.json", json.dumps(table, allow_nan=False) + "\n")
    write_ablation_page(table, task / "ablation.html")
    console.print(scores_table(table))
    console.print(effects_table(table))
    console.print(f"written: {task / 'table.json'}, {task / 'ablation.html'}", soft_wrap=True)


def _summarise(outcomes: Sequence[Outcome], console: Console) -> int:
    failed = [outcome for outcome in outcomes if outcome.problem]
    skipped = sum(outcome.skipped for outcome in outcomes)
    trained = len(outcomes) - len(failed) - skipped
    console.print(f"{trained} runs trained, {skipped} finished before, {len(failed)} not finished", highlight=False)
    for outcome in failed:
        console.print(f"  {outcome.job}: {outcome.problem}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        console.print("run the same command again to continue")
    return 1 if failed else 0


def with_interval(found: dict[str, Any], kind: str) -> str:
    """`74.1% [71.5%, 76.2%]`"""
    shown = ("{:.1%}" if kind == "percent" else "{:.4g}").format
    ends = "" if found["low"] is None else f" [{shown(found['low'])}, {shown(found['high'])}]"
    return shown(found["mean"]) + ends


def scores_table(table: dict[str, Any]) -> Table:
    shown = Table(title=f"{table['title']}: held-out avg@k at the end, mean and 95 % confidence interval over seeds")
    with_paper = any(row["paper"] is not None for row in table["combinations"])
    for column in ("", "here", "seeds", *(["paper (AIME 2024, 32B)"] if with_paper else [])):
        shown.add_column(column, justify="left" if not column else "right")
    for row in table["combinations"]:
        score = row["values"].get("held_out")
        cells = [row["name"], with_interval(score, "percent") if score else "–", str(len(row["seeds"]))]
        shown.add_row(*cells, *([f"{row['paper']:.0f}"] if with_paper else []))
    return shown


def effects_table(table: dict[str, Any]) -> Table:
    """Rows are measures, columns are changes."""
    shown = Table(title="effect of each change: mean difference, 95 % confidence interval, * if it excludes 0")
    shown.add_column("")
    for effect in table["effects"]:
        shown.add_column(effect["label"], justify="right")
    for measure in table["measures"]:
        cells = []
        for effect in table["effects"]:
            found = effect["measures"].get(measure["id"])
            star = "*" if found and found["verdict"] in ("higher", "lower") else ""
            cells.append(with_interval(found, measure["format"]) + star if found else "–")
        shown.add_row(measure["label"], *cells)
    return shown
