"""Says what a command is waiting for before a run has its console: imports, downloads, reading the data.

On a terminal it is shown at once and disappears when it is done. Elsewhere a line is printed only if it takes long, so
that the output of a short command stays as it is.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

FIRST, EVERY = 10.0, 60.0  # seconds until a line is printed where there is no terminal


@contextmanager
def waiting(doing: str, stream: TextIO | None = None) -> Iterator[None]:
    """The thread that prints has ended when this is left: what follows may fork."""
    stream = stream or sys.stderr
    if stream.isatty():
        from rich.console import Console

        with Console(file=stream).status(f"{doing} …"):
            yield
        return
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        pause = FIRST
        while not done.wait(pause):
            with suppress(OSError, ValueError):
                print(f"megatron-dapo: {doing}, for {time.monotonic() - started:.0f} s", file=stream, flush=True)
            pause = EVERY

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
