"""The report: one HTML file that shows one run or compares several, and needs no network.

Style, script and data are inside the file. Its content security policy allows this one script and no requests, so
nothing that a model writes into a response can run or send anything. Texts are embedded as JSON and shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_dapo import __version__
from megatron_dapo.config.base import leaves
from megatron_dapo.files import write_atomically
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.figures import Figure, figures_of
from megatron_dapo.observe.runs import ReportError, Run, config_differences, load_runs
from megatron_dapo.observe.transcripts import Transcript, recorded_steps

STEPS_WITH_SAMPLES = 24
SAMPLES_PER_STEP = 64
TOKENS_SHOWN = 40_000  # with their values
LONGEST_TEXT = 20_000
SUMMARY = (
    ("Reward", "reward/mean", "number"),
    ("Accuracy, all sampled", "reward/accuracy_all", "percent"),
    ("Accuracy, trained", "reward/accuracy", "percent"),
    ("Entropy", "train/entropy", "number"),
    ("Response length", "rollout/length_trained", "count"),
    ("Filter yield", "rollout/filter_yield", "percent"),
    ("Mismatch KL", "train/mismatch_kl", "number"),
)


def write_report(run_dirs: Sequence[str | Path], output: str | Path) -> Path:
    """Writes the page to `output` and returns its path."""
    runs = load_runs(run_dirs)
    target = Path(output)
    if target.is_dir():
        raise ReportError(f"{target} is a directory: name the HTML file to write, for example {target / 'report.html'}")
    data = payload(runs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page_of(data).encode())
    except (OSError, ValueError) as error:
        raise ReportError(f"{target}: the report cannot be written: {error}") from None
    return target


def page_of(data: dict[str, Any], *, live: bool = False) -> str:
    """The page as text. A live page asks the server that it came from for newer data."""
    scripts = ["chart.js", "samples.js", "report.js", *(["watch.js"] if live else [])]
    return fill_page(data["title"], scripts, ["report.css"], data, connect="connect-src 'self'; " if live else "")


def fill_page(title: str, scripts: Sequence[str], styles: Sequence[str], data: Any, *, connect: str = "") -> str:
    """report.html with these files of page/ and this data inside. Only this script may run."""
    script = "".join(map(_asset, scripts))
    parts = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "CONNECT": connect,
        "STYLE": "".join(map(_asset, styles)),
        "DATA": embed_json(data),
        "SCRIPT": script,
    }
    page = _asset("report.html")
    pieces = page.split("@@")  # text and placeholders alternate; values are not searched for placeholders
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("megatron_dapo.observe") / "page" / name).read_text(encoding="utf-8")


def embed_json(value: Any) -> str:
    """JSON that cannot close the script element around it: ASCII, without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(runs: Sequence[Run], *, live: bool = False) -> dict[str, Any]:
    """`live`: without samples, which the page asks for when they are looked at."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(run.name for run in runs)
    return {
        "title": title,
        "version": __version__,
        "runs": [_run(run) | ({} if live else _samples(run)) for run in runs],
        "sections": [
            {"title": section, "figures": [_figure(figure) for figure in figures]}
            for section, figures in figures_of(runs).items()
        ],
        "differences": [
            {"key": key, "values": values} for key, values in config_differences([run.config for run in runs])
        ],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """`asdict` would copy every number."""
    runs = [[{name: getattr(series, name) for name in series.__slots__} for series in run] for run in figure.runs]
    return {name: getattr(figure, name) for name in figure.__slots__} | {"runs": runs}


def _run(run: Run) -> dict[str, Any]:
    steps = [record.step for record in run.steps]
    return {
        "name": run.name,
        "steps": len(steps),
        "last_step": max([*steps, *(r.step for r in run.evaluations)], default=0),
        "seconds": sum(value for value in run.series("time/step")[1] if value - value == 0),
        "about": about(run),
        "timeline": run.timeline,
        "summary": _summary(run),
        "findings": [{"step": f.step, "rule": f.rule, "seen": f.seen, "causes": f.causes} for f in run.findings],
        "warnings": run.warnings,
        "config": [[key, value] for key, value in run.config.items()],
        "sample_steps": recorded_steps(run.samples),
        "restarts": [record.step for record in run.steps if "time/start" in record.metrics][1:],
        "axes": _axes(run),
    }


def _axes(run: Run) -> dict[str, list[float]]:
    """Tokens and hours since the beginning after some of the steps; the page interpolates."""
    tokens = [r.metrics.get("train/batch_tokens", r.metrics.get("train/tokens", 0.0)) for r in run.steps]
    hours = [r.metrics.get("time/step", 0.0) / 3600 for r in run.steps]
    kept = range(0, len(run.steps), max(1, len(run.steps) // 1000))
    sums = zip(("tokens", "hours"), np.nan_to_num([tokens, hours], posinf=0, neginf=0).cumsum(axis=1), strict=True)
    found = {name: [float(f"{values[i]:.6g}") for i in kept] for name, values in sums}
    return {"steps": [run.steps[i].step for i in kept], **found}


def _samples(run: Run) -> dict[str, Any]:
    """A bounded number of samples, and the history of their prompts, for a page without a server."""
    left, found = TOKENS_SHOWN, []
    for step in spread(recorded_steps(run.samples), STEPS_WITH_SAMPLES):
        arrays = transcripts.read_arrays(run.samples, step) if left > 0 else {}
        for item in transcripts.read(run.samples, [step])[:SAMPLES_PER_STEP]:
            values = transcripts.token_values(arrays, item.place) if item.tokens <= left else None
            left -= item.tokens if values else 0
            found.append(sample_view(item) | {"values": values})
    return {"samples": found, "histories": transcripts.histories(run.samples, {item["prompt_id"] for item in found})}


def _summary(run: Run) -> list[dict[str, Any]]:
    """First and last value, each a mean over up to five steps; evaluations are not averaged."""
    shown = list(SUMMARY)
    scores = [name for name in run.metrics if name.startswith("eval/") and "avg@" in name]
    shown += [(name.removeprefix("eval/"), name, "percent") for name in scores if name.split("@")[1].isdigit()]
    found = []
    for label, metric, form in shown:
        points = [(step, value) for step, value in zip(*run.series(metric), strict=True) if value - value == 0]
        if points:
            width = 1 if metric.startswith("eval/") else max(1, min(5, len(points) // 4))
            values = [value for _, value in points]
            found.append({
                "label": label, "format": form, "start": fmean(values[:width]), "end": fmean(values[-width:]),
                "start_steps": [points[0][0], points[width - 1][0]],
            })  # fmt: skip
    return found


def about(run: Run) -> list[tuple[str, str]]:
    """What was trained, on what, with what and when. Entries without information are left out."""
    config, starts = run.config, run.starts
    first, last = (starts[0], starts[-1]) if starts else ({}, {})
    data = [value for key, value in config.items() if key == "data.path" or key == "data.sources"]
    found = {
        "model": config.get("policy.model", ""),
        "data": ", ".join(value for value in data if value not in ("", "[]", "null")),
        "commit": _distinct(starts, "commit"),
        "versions": ", ".join(f"{name} {number}" for name, number in leaves(last.get("versions", {})) if name),
        "hardware": _distinct(starts, "hardware"),
        "started": str(first.get("started", "")),
        "last change": run.last_change,
        "starts": f"{len(starts)}, the last at {last.get('started')}" if len(starts) > 1 else "",
    }
    return [(label, text) for label, text in found.items() if text]


def _distinct(starts: Sequence[dict[str, Any]], key: str) -> str:
    """A run may be resumed with another commit or on other hardware."""
    return ", then ".join(dict.fromkeys(str(start[key]) for start in starts if start.get(key)))


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` steps at even distances, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def sample_view(item: Transcript) -> dict[str, Any]:
    """As the explorer shows it."""
    return asdict(item) | {"prompt": _shortened(item.prompt), "text": _shortened(item.text)}


def _shortened(text: str) -> str:
    """Beginning and end of a very long text; samples/ has the whole text."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    note = f"[… {len(text) - 2 * half} characters are left out here; samples/ has them …]"
    return f"{text[:half]}\n\n{note}\n\n{text[-half:]}"
