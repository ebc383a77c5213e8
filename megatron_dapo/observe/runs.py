"""Run directories: environment.json, which says what a run was computed with, and reading a run for the report.

environment.json has one entry per start of the run: date, versions, commit, hardware.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.config.base import leaves, parse_yaml
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.observe import timeline, transcripts
from megatron_dapo.observe.console import STATUS, duration, percent, read_status
from megatron_dapo.observe.diagnosis import Finding, Watch
from megatron_dapo.observe.metrics_file import EVAL, STEP, Record, filter_yield, read_records, skipping, update_speed
from megatron_dapo.observe.transcripts import Transcript
from megatron_dapo.types import printable

WARNINGS_SHOWN = 200
TAIL = 1 << 18  # bytes of metrics.jsonl
SILENT_AFTER = 120.0  # seconds without a sign of life; the longest part of a step that reports nothing
OWN_KEYS = ("trainer.run_dir", "slurm.job_name")  # differ between any two runs
ENVIRONMENT = "environment.json"
CLOCK = "%Y-%m-%d %H:%M:%S %z"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")


class ReportError(UserError):
    """A run directory without anything to show; the message says what is missing."""


@dataclass(slots=True, frozen=True)
class Run:
    name: str
    steps: list[Record]
    evaluations: list[Record]
    config: dict[str, str]  # dotted key to text
    samples: Path  # the folder; its files are large and are read when they are shown
    findings: list[Finding]
    warnings: list[str]  # logs/warnings.log, and what could not be read
    starts: list[dict[str, Any]] = field(default_factory=list)  # environment.json
    timeline: dict[str, Any] | None = None  # of the newest step that has one
    last_change: str = ""  # when metrics.jsonl was last written

    @property
    def transcripts(self) -> list[Transcript]:
        """All of them."""
        return transcripts.read(self.samples)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric; steps without it are left out."""
        records = self.evaluations if metric.startswith("eval/") else self.steps
        found = [(r.step, r.metrics[metric]) for r in records if metric in r.metrics]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, in order of first appearance."""
        return list(dict.fromkeys(name for record in [*self.steps, *self.evaluations] for name in record.metrics))


def load_runs(directories: Sequence[str | Path], *, running: bool = False, metrics: bool = True) -> list[Run]:
    """`running`: the runs may not have finished a step, or not even started. Without `metrics` no large file is
    read."""
    if not directories:
        raise ReportError("no run directory was named")
    paths = [Path(directory) for directory in directories]
    names = distinct_names(paths)
    return [load_run(path, name, running=running, metrics=metrics) for path, name in zip(paths, names, strict=True)]


def load_run(directory: Path, name: str, *, running: bool = False, metrics: bool = True) -> Run:
    file = directory / "metrics.jsonl"
    if not directory.is_dir():
        raise ReportError(f"{directory}: no such directory")
    if not file.exists() and not running:
        raise ReportError(f"{directory}: not a run directory, it has no metrics.jsonl")
    warnings = read_warnings(directory)[-WARNINGS_SHOWN:]
    records = read_records(file, warnings) if file.exists() and metrics else []
    steps = [_with_derived(record) for record in records if record.kind == STEP]
    evaluations = [record for record in records if record.kind == EVAL]
    if not steps and not evaluations and not running:
        raise ReportError(f"{file} holds no finished step yet: wait for the first one")
    watch = Watch()
    return Run(
        name=name,
        steps=steps,
        evaluations=evaluations,
        config=_config(directory / "config.yaml"),
        samples=directory / "samples",
        findings=[finding for record in steps for finding in watch.observe(record.step, record.metrics)],
        warnings=warnings,
        starts=read_environment(directory),
        timeline=timeline.read_newest(directory),
        last_change=time.strftime(CLOCK, time.localtime(file.stat().st_mtime)) if records else "",
    )


def _with_derived(record: Record) -> Record:
    derived = {
        "rollout/filter_yield": filter_yield(record.metrics),
        "train/tokens_per_second": update_speed(record.metrics),
    }
    found = {name: value for name, value in derived.items() if value is not None}
    return Record(record.step, record.kind, {**found, **record.metrics})


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The names of the directories, with as many parents as needed to distinguish them."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:  # the same directory twice
            names[i] = f"{name} ({seen[name]})"
    return names


def config_differences(configs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Keys whose values differ between runs, with the value of each run; "—" if a run does not have the key."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values_of = [(key, [config.get(key, "—") for config in configs]) for key in keys]
    return [(key, values) for key, values in values_of if len(set(values)) > 1]


def is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").exists() or (directory / "logs" / STATUS).exists()


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """The run directories in this folder and `depth` levels below it, by name."""
    if is_run(folder):
        return [folder]
    if depth < 0:
        return []
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    return [run for path in inside for run in find_runs(path, depth - 1)]


def named_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """All runs in these folders. A name is the path inside the folder: a run that starts later changes no other's."""
    several = len(folders) > 1
    return {
        str(Path(name if several or run == folder else "", run.relative_to(folder))): run
        for name, folder in zip(distinct_names(folders), folders, strict=True)
        for run in find_runs(folder)
    }


def current_status(directory: Path) -> dict[str, Any]:
    """What the run does now. `silent`: seconds since the last sign of life, if there should have been one."""
    status = read_status(directory) or {"state": "not started", "phases": []}
    age = time.time() - status.get("updated", 0.0)
    for phase in status["phases"]:
        phase["seconds"] = max(0.0, time.time() - phase.pop("since"))
    return status | {"silent": age if status["state"] == "running" and age > SILENT_AFTER else None}


def last_records(file: Path) -> dict[str, Record]:
    """The newest record of each kind among the last ones, without reading the whole file."""
    found: dict[str, Record] = {}
    with suppress(OSError), file.open("rb") as lines:
        start = lines.seek(max(0, file.stat().st_size - TAIL))
        for line in filter(bytes.strip, lines.read().split(b"\n")[start > 0 : -1]):  # complete lines
            with skipping(f"{file}, a line near its end"):
                record = Record.from_line(line.decode())
                found[record.kind] = record
    return found


def overview(runs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """One row per run: what `megatron-dapo runs` and the list of `watch` show, newest sign of life first."""
    configs = [_config(directory / "config.yaml") for directory in runs.values()]
    differences = [(key, values) for key, values in config_differences(configs) if key not in OWN_KEYS]
    rows = []
    for i, (name, directory) in enumerate(runs.items()):
        status, last = current_status(directory), last_records(directory / "metrics.jsonl").get(STEP)
        metrics, warnings = last.metrics if last else {}, read_warnings(directory)
        silent = status["silent"]
        rows.append({
            "name": name, "path": str(directory),
            "state": f"no sign of life for {duration(silent)}" if silent else status["state"],
            "step": max(status.get("step", 0), last.step if last else 0), "total": status.get("total"),
            "remaining": status.get("remaining") if status["state"] == "running" and not silent else None,
            "accuracy": metrics.get("reward/accuracy_all"),
            "updated": status.get("updated", 0.0), "warning": warnings[-1] if warnings else "",
            "settings": {key: values[i] for key, values in differences},
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["updated"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal: a line per run, and below it the last warning and the settings that differ."""
    lines = []
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        steps = f"step {row['step']}/{row['total'] or '?'}"
        eta = f"ETA {duration(row['remaining'])}" if row["remaining"] else ""
        cells = [row["name"].ljust(width), steps.ljust(15), eta.ljust(10), percent(row["accuracy"]).rjust(6)]
        lines.append(printable("  ".join([*cells, " ".join(str(row["state"]).split())])).rstrip())
        details = {"warning": row["warning"], "settings": "  ".join(f"{k}={v}" for k, v in row["settings"].items())}
        lines += [printable(f"    {name}: {text[:299]}{text[299:] and '…'}") for name, text in details.items() if text]
    return "\n".join(lines)


def _config(path: Path) -> dict[str, str]:
    """Flat. Empty if there is no readable config.yaml: the curves can be shown without it."""
    with skipping(path):
        return _cached_config(path, path.stat().st_mtime_ns)
    return {}


@lru_cache(maxsize=1000)  # a list of runs is asked for every few seconds
def _cached_config(path: Path, changed: int) -> dict[str, str]:
    return {key: _text(value) for key, value in leaves(parse_yaml(path.read_text(encoding="utf-8"))) if key}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def read_warnings(directory: Path) -> list[str]:
    """All lines of logs/warnings.log."""
    try:
        return (directory / "logs" / "warnings.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def describe(ranks: int = 1) -> dict[str, Any]:
    """Of this process."""
    versions = {"megatron-dapo": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "started": time.strftime(CLOCK), "commit": commit(), "versions": versions,
        "hardware": hardware(ranks), "ranks": ranks, "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip


def commit() -> str | None:
    """Of the checkout that this package is imported from, with "+changes" if files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def hardware(ranks: int) -> str:
    import torch

    if torch.cuda.is_available():
        return f"{ranks} × {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {ranks} rank{'s' if ranks > 1 else ''}"


def record_environment(run_dir: Path, ranks: int) -> None:
    """Appends the description of this start. A full disk or a damaged file does not end a run."""
    with suppress(OSError):
        write_atomically(
            run_dir / ENVIRONMENT,
            json.dumps([*read_environment(run_dir), describe(ranks)], indent=1) + "\n",
            fsync=False,
        )


def read_environment(run_dir: Path) -> list[dict[str, Any]]:
    with skipping(run_dir / ENVIRONMENT):
        found = json.loads((run_dir / ENVIRONMENT).read_text())
        return [entry for entry in found if isinstance(entry, dict)]
    return []
