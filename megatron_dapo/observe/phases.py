"""Timed phases of a step: each second is counted once, so the phases and `other` add up to the step."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_dapo.observe.console import Console


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
