"""The timeline of a step: when each phase ran and which requests each engine served, as a trace for ui.perfetto.dev.

`traces/step_N.json` covers the time from the record of step N−1 to the record of step N, which is the time that
`time/step` counts: the sync, evaluation and checkpoint after the previous step, then the rollout and the updates of
this one. Format: Chrome's trace events, which Perfetto and chrome://tracing open. Phases of rank 0 are one track; each
engine has a counter of running requests and one span per request.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.files import write_atomically
from megatron_dapo.observe.metrics_file import skipping

FOLDER = "traces"
MOST_POINTS = 400  # of an engine's curve in the report
TRAINER = 1  # pid of the trainer's track; engines follow


@dataclass(slots=True, frozen=True)
class Span:
    name: str
    start: float  # time.monotonic()
    end: float
    tokens: int = 0


@dataclass(slots=True)
class Trace:
    phases: list[Span] = field(default_factory=list)
    requests: dict[str, list[Span]] = field(default_factory=dict)  # by engine


class Timeline:
    """Collects spans from any thread; `take` returns those since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trace = Trace()

    def phase(self, name: str, start: float, end: float) -> None:
        with self._lock:
            self._trace.phases.append(Span(name, start, end))

    def request(self, engine: str, name: str, start: float, end: float, tokens: int) -> None:
        with self._lock:
            self._trace.requests.setdefault(engine or "engine", []).append(Span(name, start, end, tokens))

    def take(self) -> Trace:
        with self._lock:
            found, self._trace = self._trace, Trace()
        return found


def write_trace(run_dir: Path, step: int, trace: Trace) -> Path:
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.json"
    write_atomically(path, trace_text(events(trace)), fsync=False)
    return path


def trace_text(found: Iterable[dict[str, Any]]) -> str:
    return json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"}, separators=(",", ":"))


def events(trace: Trace) -> Iterable[dict[str, Any]]:
    """Chrome trace events. Times are microseconds since the epoch."""
    offset = time.time() - time.monotonic()

    def micro(seconds: float) -> int:
        return round((seconds + offset) * 1e6)

    yield track_event(TRAINER, "trainer, rank 0")
    for span in trace.phases:
        yield phase_event(TRAINER, span.name, micro(span.start), micro(span.end))
    for pid, (engine, requests) in enumerate(sorted(trace.requests.items()), start=TRAINER + 1):
        yield track_event(pid, f"engine {engine}")
        for number, span in enumerate(requests):
            common = {"cat": "request", "id": f"{pid}.{number}", "pid": pid, "tid": 1, "name": span.name}
            yield {**common, "ph": "b", "ts": micro(span.start), "args": {"tokens": span.tokens}}
            yield {**common, "ph": "e", "ts": micro(span.end)}
        for moment, running in running_requests(requests):
            yield running_event(pid, micro(moment), running)


def track_event(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": name}}


def phase_event(pid: int, name: str, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": 1, "cat": "phase", "name": name, "ts": start, "dur": max(1, end - start)}


def running_event(pid: int, moment: int, running: int) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "tid": 1, "name": "running requests", "ts": moment, "args": {"running": running}}


def running_requests(requests: Sequence[Span]) -> list[tuple[float, int]]:
    """The number of running requests after each change."""
    changes = sorted([(span.start, 1) for span in requests] + [(span.end, -1) for span in requests])
    found: list[tuple[float, int]] = []
    running = 0
    for moment, change in changes:
        running += change
        if found and found[-1][0] == moment:
            found.pop()
        found.append((moment, running))
    return found


def read_newest(run_dir: Path) -> dict[str, Any] | None:
    """The newest trace for the report: seconds from its start. None if there is no readable one."""
    traces = {
        int(m[1]): p for p in (run_dir / FOLDER).glob("step_*.json") if (m := re.fullmatch(r"step_(\d+)", p.stem))
    }
    if not traces:
        return None
    step = max(traces)
    with skipping(traces[step]):
        found = _summary(json.loads(traces[step].read_text())["traceEvents"])
        json.dumps(found, allow_nan=False)  # raises what the page could not contain
        return {"step": step, **found}
    return None


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    phases = [e for e in found if e["ph"] == "X"]
    times = [e["ts"] for e in phases] or [e["ts"] for e in found if e["ph"] == "C"]
    start = min(times, default=0)
    ends = [(e["ts"] + e.get("dur", 0) - start) / 1e6 for e in found if e["ph"] in "XC"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    engines = []
    for pid, name in names.items():
        points = [(max(0.0, (e["ts"] - start) / 1e6), e["args"]["running"]) for e in found
                  if e["ph"] == "C" and e["pid"] == pid]  # fmt: skip
        if points:
            every = max(1, len(points) // MOST_POINTS)
            kept = [*points[::every], points[-1]]
            engines.append({"name": name, "x": [round(x, 4) for x, _ in kept], "y": [y for _, y in kept]})
    return {
        "seconds": max(ends, default=0.0),
        "phases": [[e["name"], (e["ts"] - start) / 1e6, (e["ts"] - start + e["dur"]) / 1e6] for e in phases],
        "engines": engines,
    }
