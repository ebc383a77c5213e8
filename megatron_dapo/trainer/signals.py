"""How a run is asked to stop: SIGTERM and SIGUSR1, at any moment. Imports nothing heavy, so it can come first.

While a run is being set up there is nothing to save: it ends at once, with the code that means "start me again". From
then on a signal is noted, and the loop looks at safe points.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

REQUEUE = 75  # EX_TEMPFAIL: start me again; whatever there was to save is saved
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """Somebody asked the run to stop; it saves and ends with REQUEUE."""


class StopSignal:
    """Notes the signals."""

    def __init__(self) -> None:
        self.received = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


@contextlib.contextmanager
def end_at_once() -> Iterator[None]:
    """Inside, until a StopSignal takes over, a signal ends this process at once. SIGUSR2 asks for stacks, which the
    watchdog writes: before there is one it is ignored."""
    if threading.current_thread() is not threading.main_thread():  # only it may
        yield
        return
    previous: dict[int, Any] = {number: signal.signal(number, _end) for number in SIGNALS}
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    print(f"asked to stop ({name}) while nothing had to be saved: ending", file=sys.stderr, flush=True)
    os._exit(REQUEUE)
