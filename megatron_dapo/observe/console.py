"""The console: what a run prints. `Console` prints nothing; `PlainConsole` prints lines; `rich_console` redraws.

`StatusFile` writes the same to logs/status.json for `megatron-dapo watch`, at most once a second. A console never ends
a run: it goes silent when the terminal is gone. `waiting` and `importing` say what a command waits for before a run has
its console.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_dapo.files import write_atomically
from megatron_dapo.observe.metrics_file import filter_yield, finite, skipping, update_speed
from megatron_dapo.types import SamplerProgress, printable

STATUS = "status.json"
STATUS_EVERY = 1.0  # seconds between two writes
FIRST_LINE, NEXT_LINE = 10.0, 60.0  # seconds until `waiting` prints a line where there is no terminal


def step_summary(metrics: Mapping[str, float]) -> dict[str, str]:
    """Column title to text. Columns whose metrics are absent are left out. Reward and length are of the groups that are
    trained on, accuracy is of all sampled groups."""
    columns = {
        "reward (trained)": number(metrics.get("reward/mean")),
        "accuracy (all)": percent(metrics.get("reward/accuracy_all")),
        "entropy": number(metrics.get("train/entropy")),
        "length (trained)": number(metrics.get("rollout/length_trained"), 4),
        "yield": percent(filter_yield(metrics)),
        "grad": number(metrics.get("train/grad_norm")),
        "rollout tok/s": number(metrics.get("rollout/tokens_per_second")),
        "update tok/s": number(update_speed(metrics)),
        "time": duration(metrics.get("time/step")),
    }
    return {title: text for title, text in columns.items() if text}


def number(value: float | None, digits: int = 3) -> str:
    """Examples: 0.412, 12.3, 8.1k, 3e-06."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.{digits}g}{letter}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.{digits}g}".rstrip(".") if size < 10**digits else f"{value:.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}" if math.isfinite(share) else str(float(share))


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 100:
        return f"{minutes:.0f}min"
    return f"{int(hours)}h{int(minutes) % 60:02d}" if hours < 48 else f"{hours / 24:.1f}d"


class Console:
    """Prints nothing."""

    def phase_started(self, name: str) -> None: ...

    def phase_ended(self, name: str) -> None: ...

    def note(self, name: str, text: str) -> None:
        self.update(name, text)

    def progress(self, name: str, done: float, total: float, text: str) -> None:
        self.update(name, f"{done:g}/{total:g} {text}".rstrip(), done, total)

    def sampling(self, progress: SamplerProgress) -> None:
        self.update("rollout", sampling_text(progress), progress.kept, progress.needed)

    def update(self, name: str, text: str, done: float | None = None, total: float | None = None) -> None:
        """What a phase is doing now, and how far it is."""

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self, status: str) -> None: ...


class PlainConsole(Console):
    """Lines for a log file: one per step, and one a minute inside a long phase.

    Until the first step is done, each phase and note also gets a line when it starts, because starting takes minutes.
    A thread prints the line of a long phase, so it appears even when the phase reports nothing. Lines other than a
    step's begin with the time since the console was opened.
    """

    HEARTBEAT = 60.0
    CHECK_EVERY = 5.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._opened = self._last_line = time.monotonic()
        self._phases: dict[str, tuple[float, str]] = {}  # name to start and latest text, outermost first
        self._starting = True
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="console", daemon=True).start()

    def phase_started(self, name: str) -> None:
        self._phases.pop(name, None)  # so that it becomes the innermost one
        self._phases[name] = (time.monotonic(), "")
        if self._starting:
            self._say(f"[{self._elapsed()}] {name}")

    def phase_ended(self, name: str) -> None:
        self._phases.pop(name, None)

    def note(self, name: str, text: str) -> None:
        if self._starting:
            self._say(f"[{self._elapsed()}] {name}: {text}")
        self.update(name, text)

    def update(self, name: str, text: str, done: float | None = None, total: float | None = None) -> None:
        started, _ = self._phases.get(name, (time.monotonic(), ""))
        self._phases[name] = (started, text)
        self.print_long_phase()

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None:
        cells = [f"step {step}/{total}", *(f"{title} {text}" for title, text in step_summary(metrics).items())]
        if remaining:
            cells.append(f"ETA {duration(remaining)}")
        self._starting = False
        self._say("  ".join(cells))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(f"step {step} evaluation  {evaluation_text(metrics)}")

    def warn(self, message: str) -> None:
        self._say(f"WARNING: {message}")

    def line(self, text: str) -> None:
        self._say(f"[{self._elapsed()}] {text}")

    def close(self, status: str) -> None:
        self._closed.set()
        self._say(f"run {status}")
        try:
            self._stream.flush()
        except (OSError, ValueError):
            if self._stream is sys.stdout:  # Python would try again at exit, fail, and change the exit code to 120
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def print_long_phase(self) -> None:
        """Prints the innermost phase if nothing was printed for `HEARTBEAT` seconds."""
        now = time.monotonic()
        if now - self._last_line < self.HEARTBEAT:
            return
        for name, (started, text) in reversed(list(self._phases.items())):
            self._say(f"[{self._elapsed()}] {name} for {duration(now - started)}" + (f": {text}" if text else ""))
            break

    def _watch(self) -> None:
        while not self._closed.wait(self.CHECK_EVERY):
            with suppress(RuntimeError):  # the other thread changed the phases meanwhile
                self.print_long_phase()

    def _elapsed(self) -> str:
        return duration(time.monotonic() - self._opened)

    def _say(self, line: str) -> None:
        self._last_line = time.monotonic()
        with suppress(OSError, ValueError):  # the pipe's reader is gone, or the disk of a log file is full
            print(printable(line), file=self._stream, flush=True)


def sampling_text(progress: SamplerProgress) -> str:
    parts = [f"{progress.kept}/{progress.needed} groups"]
    parts += [f"{count} {reason}" for reason, count in progress.dropped.items() if count]
    parts += [f"{progress.running_requests} running", f"{number(progress.tokens_per_second)} tok/s"]
    return ", ".join(parts)


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Scores as percentages, other metrics as numbers; interval bounds are left to the report."""
    shown = {name.removeprefix("eval/"): v for name, v in metrics.items() if not name.endswith(("_low", "_high"))}
    return "  ".join(
        f"{name} {percent(v) if '@' in name or name.endswith('_rate') else number(v)}" for name, v in shown.items()
    )


class StatusFile(Console):
    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self._state: dict[str, Any] = {"state": "running", "pid": os.getpid(), "step": 0, "total": total}
        self._phases: dict[str, dict[str, Any]] = {}
        self._written = 0.0

    def phase_started(self, name: str) -> None:
        self._phases[name] = {"name": name, "since": time.time(), "text": ""}
        self._write()

    def phase_ended(self, name: str) -> None:
        self._phases.pop(name, None)
        self._write()

    def update(self, name: str, text: str, done: float | None = None, total: float | None = None) -> None:
        values = {"text": text} if done is None else {"text": text, "done": done, "total": total}
        self._phases[name] = {"name": name, "since": time.time(), **self._phases.get(name, {}), **values}
        self._write()

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None:
        self._state |= {"step": step, "total": total, "remaining": remaining}
        self._write(now=True)

    def close(self, status: str) -> None:
        self._state["state"] = status
        self._phases.clear()
        self._write(now=True)

    def _write(self, *, now: bool = False) -> None:
        moment = time.time()
        if not now and 0 <= moment - self._written < STATUS_EVERY:
            return
        self._written = moment
        state = {**self._state, "phases": list(self._phases.values()), "updated": moment}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(state), fsync=False)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """What `StatusFile` wrote; None if there is nothing of it."""
    path = run_dir / "logs" / STATUS
    with skipping(path):
        raw = json.loads(path.read_text())
        numbers = [name for name in ("step", "total", "remaining", "updated") if raw.get(name) is not None]
        phases = [{"name": str(p["name"]), "text": str(p["text"]), "since": finite(p["since"])} for p in raw["phases"]]
        return {"state": str(raw["state"]), "phases": phases, **{name: finite(raw[name]) for name in numbers}}
    return None


@contextmanager
def waiting(doing: str, stream: TextIO | None = None) -> Iterator[None]:
    """On a terminal it is shown at once and disappears when it is done. Elsewhere a line is printed only if it takes
    long, so that the output of a short command stays as it is. The thread that prints has ended when this is left: what
    follows may fork."""
    stream = stream or sys.stderr
    if stream.isatty():
        from rich.console import Console as Terminal

        with Terminal(file=stream).status(f"{doing} …"):
            yield
        return
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        pause = FIRST_LINE
        while not done.wait(pause):
            with suppress(OSError, ValueError):
                print(f"megatron-dapo: {doing}, for {time.monotonic() - started:.0f} s", file=stream, flush=True)
            pause = NEXT_LINE

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def importing(what: str) -> Iterator[None]:
    """For heavy imports. Garbage is not collected meanwhile: there is hardly any, and every search visits all that has
    been imported so far, a sixth of the time. Later searches leave out what was imported, also in forked ranks."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with waiting(f"importing {what}"):
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
