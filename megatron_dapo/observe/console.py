"""What is shown while a run goes on. `Display` is the silent one; `PlainDisplay` writes one line per step.

A display never ends a run: when the terminal is gone it falls silent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, TextIO

from megatron_dapo.observe.formatting import duration, number, percent, step_row


class SamplingProgress(Protocol):
    """What is drawn of the sampler's `Progress`. Groups, except where the name says otherwise."""

    @property
    def needed(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...
    @property
    def running_requests(self) -> int: ...
    @property
    def finished_samples(self) -> int: ...
    @property
    def tokens_per_second(self) -> float: ...


class Display:
    """Shows nothing."""

    def phase_started(self, name: str) -> None: ...

    def phase_ended(self, name: str) -> None: ...

    def progress(self, name: str, done: float, total: float, text: str) -> None: ...

    def sampling(self, progress: SamplingProgress) -> None: ...

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...

    def close(self, status: str) -> None: ...


class PlainDisplay(Display):
    """Lines for a log file: one per step, and one a minute inside a long phase."""

    HEARTBEAT = 60.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last_line = time.monotonic()

    def progress(self, name: str, done: float, total: float, text: str) -> None:
        if self._due():
            self._say(f"  {name}: {done:g}/{total:g} {text}".rstrip())

    def sampling(self, progress: SamplingProgress) -> None:
        if self._due():
            self._say(f"  rollout: {sampling_text(progress)}")

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None:
        cells = [f"step {step}/{total}", *(f"{title} {text}" for title, text in step_row(metrics).items())]
        if remaining:
            cells.append(f"ETA {duration(remaining)}")
        self._say("  ".join(cells))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(f"step {step} evaluation  {evaluation_text(metrics)}")

    def warn(self, message: str) -> None:
        self._say(f"WARNING: {message}")

    def close(self, status: str) -> None:
        self._say(f"run {status}")

    def _due(self) -> bool:
        return time.monotonic() - self._last_line >= self.HEARTBEAT

    def _say(self, line: str) -> None:
        self._last_line = time.monotonic()
        with suppress(OSError, ValueError):  # the reader of our pipe is gone
            print(line, file=self._stream, flush=True)


def sampling_text(progress: SamplingProgress) -> str:
    parts = [f"{progress.kept}/{progress.needed} groups"]
    parts += [f"{count} {reason}" for reason, count in progress.dropped.items() if count]
    parts += [f"{progress.running_requests} running", f"{number(progress.tokens_per_second)} tok/s"]
    return ", ".join(parts)


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Scores as percentages, the rest as numbers; bounds of intervals are left to the report."""
    shown = {name.removeprefix("eval/"): v for name, v in metrics.items() if not name.endswith(("_low", "_high"))}
    return "  ".join(
        f"{name} {percent(v) if '@' in name or 'rate' in name else number(v)}" for name, v in shown.items()
    )
