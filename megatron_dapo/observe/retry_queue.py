"""Sends items to an output in order, and keeps the ones that fail: a full disk or a lost connection never ends a run.

`put` and `flush` do not raise the output's errors. The first failure is reported once, items are kept in memory (at
most `limit`, then the oldest are dropped, which is reported once, too), and everything is sent as soon as the output
works again, which is reported as well.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
LONGEST_PAUSE = 64


class RetryQueue(Generic[T]):
    """`pause`: after a failure so many items pass before the next attempt, twice as many after each further failure."""

    def __init__(
        self,
        name: str,
        send: Callable[[T], None],
        report: Callable[[str], None],
        *,
        limit: int,
        errors: type[Exception] = OSError,
        pause: int = 0,
    ) -> None:
        self.name, self._send, self._report = name, send, report
        self._limit, self._errors, self._first_pause = limit, errors, pause
        self.waiting: deque[T] = deque()
        self._failing = self._dropping = False
        self._pause, self._skip = pause, 0

    def put(self, item: T) -> None:
        self.waiting.append(item)
        if self._skip > 0:
            self._skip -= 1
        else:
            self.flush()
        if len(self.waiting) > self._limit:
            self.waiting.popleft()
            if not self._dropping:
                self._dropping = True
                self._report(f"{self.name}: more than {self._limit} items wait; the oldest are dropped from now on")

    def flush(self) -> bool:
        """Tries to send everything that waits; returns whether nothing is left."""
        sent = 0
        while self.waiting:
            try:
                self._send(self.waiting[0])
            except self._errors as error:
                self._failed(error)
                return False
            self.waiting.popleft()
            sent += 1
        if self._failing:
            self._failing = self._dropping = False
            self._pause = self._first_pause
            self._report(f"{self.name} works again; {sent} kept items were written")
        return True

    def _failed(self, error: Exception) -> None:
        self._skip, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if not self._failing:
            self._failing = True
            self._report(
                f"{self.name} failed: {type(error).__name__}: {error}. The run goes on; what could not be written is "
                "kept in memory and written when this works again"
            )


# A file that grows by whole blocks: a block is in the file completely or not at all, also on a full disk.


class AppendFile:
    """Opened, and created where needed, by the first write. With `sync` a block is on disk when `write` returns."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path, self._sync = path, sync
        self._fd: int | None = None
        self._damaged_at: int | None = None  # size before a block that failed and could not be removed

    def write(self, block: bytes) -> None:
        """Raises OSError and removes what was written of the block if it cannot be written completely."""
        fd = self._open()
        if self._damaged_at is not None:
            os.ftruncate(fd, self._damaged_at)
            self._damaged_at = None
        size = os.fstat(fd).st_size
        try:
            rest = memoryview(block)
            while rest:  # a nearly full disk takes a part of a block
                rest = rest[os.write(fd, rest) :]
            if self._sync:
                os.fsync(fd)
        except OSError:
            self._damaged_at = size
            with suppress(OSError):
                os.ftruncate(fd, size)
                self._damaged_at = None
            raise

    def truncate(self, size: int) -> None:
        """Keeps the first `size` bytes. Needs no free space."""
        fd = self._open()
        os.ftruncate(fd, size)
        self._damaged_at = None
        os.fsync(fd)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return self._fd
