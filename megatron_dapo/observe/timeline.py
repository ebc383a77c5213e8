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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.files import write_atomically
from megatron_dapo.observe.console import Console

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
    text = json.dumps({"traceEvents": list(events(trace)), "displayTimeUnit": "ms"}, separators=(",", ":"))
    write_atomically(path, text, fsync=False)
    return path


def events(trace: Trace) -> Iterable[dict[str, Any]]:
    """Chrome trace events. Times are microseconds since the epoch."""
    offset = time.time() - time.monotonic()

    def micro(seconds: float) -> int:
        return round((seconds + offset) * 1e6)

    yield _name(TRAINER, "trainer, rank 0")
    for span in trace.phases:
        yield {
            "ph": "X", "pid": TRAINER, "tid": 1, "cat": "phase", "name": span.name, "ts": micro(span.start),
            "dur": max(1, micro(span.end) - micro(span.start)),
        }  # fmt: skip
    for pid, (engine, requests) in enumerate(sorted(trace.requests.items()), start=TRAINER + 1):
        yield _name(pid, f"engine {engine}")
        for number, span in enumerate(requests):
            common = {"cat": "request", "id": f"{pid}.{number}", "pid": pid, "tid": 1, "name": span.name}
            yield {**common, "ph": "b", "ts": micro(span.start), "args": {"tokens": span.tokens}}
            yield {**common, "ph": "e", "ts": micro(span.end)}
        for moment, running in running_requests(requests):
            yield {
                "ph": "C", "pid": pid, "tid": 1, "name": "running requests", "ts": micro(moment),
                "args": {"running": running},
            }  # fmt: skip


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": name}}


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
    try:
        found: list[dict[str, Any]] = json.loads(traces[step].read_text())["traceEvents"]
        return {"step": step, **_summary(found)}
    except (OSError, ValueError, KeyError, TypeError):
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


# Timed phases of a step: each second is counted once, so the phases and `other` add up to the step.


class Phase:
    """A part of a step that is being timed."""

    def __init__(self, name: str, show: Callable[[Callable[[Console], None]], None] = lambda draw: None) -> None:
        self.name, self._show = name, show
        self.started = time.monotonic()
        self.inner = 0.0  # seconds of nested phases, which are counted there

    def update(self, done: float, total: float, text: str = "") -> None:
        """Shows how far the phase is."""
        self._show(lambda console: console.progress(self.name, done, total, text))

    def note(self, text: str) -> None:
        """Shows what the phase is doing or waiting for now."""
        self._show(lambda console: console.note(self.name, text))


class Stopwatch:
    """Seconds by phase since the last lap. Phases may nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stack: list[Phase] = []
        self._lap_started: float | None = None

    def enter(self, phase: Phase) -> None:
        if self._lap_started is None:
            self._lap_started = phase.started
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        self._credit(phase, time.monotonic())
        self._stack.remove(phase)

    def _credit(self, phase: Phase, now: float) -> None:
        """Adds the elapsed time to this phase and subtracts it from the enclosing one."""
        elapsed, outer = now - phase.started, self._stack.index(phase) - 1
        self._seconds[phase.name] = self._seconds.get(phase.name, 0.0) + elapsed - phase.inner
        if outer >= 0:
            self._stack[outer].inner += elapsed
        phase.started, phase.inner = now, 0.0

    def lap(self) -> dict[str, float]:
        """`time/<phase>`, `time/other` and `time/step` since the last lap or, the first time, the first phase."""
        now = time.monotonic()
        for phase in reversed(self._stack):  # still open: the time so far belongs to this lap
            self._credit(phase, now)
        for phase in self._stack:
            phase.inner = 0.0
        total = 0.0 if self._lap_started is None else now - self._lap_started
        other = max(0.0, total - sum(self._seconds.values()))
        found = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds, self._lap_started = {}, now
        return found | {"time/other": other, "time/step": total}
