"""A file that grows by whole blocks: a block is in the file completely or not at all, also on a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
