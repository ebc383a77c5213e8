"""How a run is asked to stop: SIGTERM, SIGUSR1, SIGHUP (its terminal is gone) or Ctrl-C. Imports nothing heavy, so it
can be installed first.

While the run is being set up there is nothing to save: a signal ends the process at once. From then on `StopSignal`
records the signal, and the loop checks it where it can save. A second Ctrl-C does not wait for that: it ends the
process at once.
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

FAILED = 1
REQUEUE = 75  # EX_TEMPFAIL: everything there was to save is saved; start the run again
INTERRUPTED = 130  # the shell's code for Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Stopped(Exception):
    """The run was asked to stop. Every rank raises it at the same point; the run saves and ends with `exit_code`."""

    def __init__(self, doing: str, number: int) -> None:
        super().__init__(f"stopped ({signal.Signals(number).name}) while {doing}")
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


class StopSignal:
    """Records the signal that asks this process to stop; `number` is 0 until one has arrived."""

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            # A rank that a launcher forked ignores Ctrl-C: the launcher receives it too and sends SIGTERM.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == self.number == signal.SIGINT:
            _say("interrupted twice: ending without saving")
            os._exit(INTERRUPTED)
        if number == signal.SIGINT:
            _say("interrupted: saving at the next safe point; press Ctrl-C again to end at once without saving")
        self.number = number


@contextlib.contextmanager
def end_at_once() -> Iterator[None]:
    """Inside, until a StopSignal takes over, a signal ends this process at once. SIGUSR2 asks for stacks, which the
    watchdog writes; until there is one it is ignored."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or not ignored]
    previous: dict[int, Any] = {number: signal.signal(number, _end) for number in numbers}
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    _say(f"asked to stop ({signal.Signals(number).name}) while nothing had to be saved: ending")
    os._exit(exit_code(number))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(sys.stderr.fileno(), f"\nmegatron-dapo: {text}\n".encode())  # print may be interrupted in itself
