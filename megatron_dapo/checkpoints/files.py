"""Files of a checkpoint: written in parallel with a checksum, synced to disk, and checked before they are used.

`write_files` returns the size and CRC-32 of every file; `damaged_files` compares them with what is on disk. A CRC-32
finds every flipped bit and every damaged block of up to 32 bits, and other damage with probability 1 − 2⁻³². It is
computed on the bytes in memory while they are written, so it also covers the way to the disk. Writing, checksums and
reading release the GIL: one thread per file, next to a training loop.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo import fault_points
from megatron_dapo.errors import CheckpointError

BLOCK = 16 << 20
THREADS = 4


class Cancelled(Exception):
    """The save was given up before this file was complete."""


@dataclass(slots=True)
class CheckpointFile:
    """A file before it is written: `parts` follow each other. Tensors must be contiguous; they may be on a GPU."""

    name: str  # relative to the checkpoint's directory
    parts: list[bytes | Tensor]

    @property
    def size(self) -> int:
        return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must contain: its size and the CRC-32 of its bytes."""

    bytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "crc32": f"{self.crc32:08x}"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        return cls(int(value["bytes"]), int(value["crc32"], 16))


def write_files(
    folder: Path,
    files: Sequence[CheckpointFile],
    *,
    threads: int = THREADS,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, FileRecord]:
    """Writes and syncs all files below `folder`. After an error the others are given up, and it is raised as a
    CheckpointError that names the file and the space left. `cancelled` is asked before every block."""
    failed = threading.Event()

    def write(file: CheckpointFile) -> FileRecord:
        try:
            return _write(folder / file.name, file.parts, lambda: failed.is_set() or cancelled())
        except BaseException:
            failed.set()
            raise

    for parent in {(folder / file.name).parent for file in files}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="checkpoint") as pool:
        largest_first = sorted(files, key=lambda file: -file.size)
        pending = [(file, pool.submit(write, file)) for file in largest_first]
        errors = [error for _, future in pending if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error
        return {file.name: future.result() for file, future in pending}


def _write(path: Path, parts: Iterable[bytes | Tensor], cancelled: Callable[[], bool]) -> FileRecord:
    size, checksum = 0, 0
    try:
        fault_points.reach("checkpoint/write_file")
        with path.open("wb", buffering=0) as file:
            for part in parts:
                view = _bytes_of(part)
                for start in range(0, len(view), BLOCK):
                    if cancelled():
                        raise Cancelled(str(path))
                    block = view[start : start + BLOCK]
                    checksum = zlib.crc32(block, checksum)
                    _write_all(file, block)
                size += len(view)
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}{_space(path)}") from error
    return FileRecord(size, checksum)


def _write_all(file: Any, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def _bytes_of(part: bytes | Tensor) -> memoryview:
    if isinstance(part, bytes):
        return memoryview(part)
    flat = part.detach().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _space(path: Path) -> str:
    try:
        usage = shutil.disk_usage(path.parent)
    except OSError:
        return ""
    return f" ({usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free)"


def damaged_files(folder: Path, expected: Mapping[str, FileRecord], *, threads: int = THREADS) -> list[str]:
    """Reads the files and returns one line for each that is missing, unreadable or not as it was written."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        largest_first = sorted(expected.items(), key=lambda item: -item[1].bytes)
        found = pool.map(lambda item: _damage(folder / item[0], item[1]), largest_first)
        return [line for line in found if line]


def _damage(path: Path, expected: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path} has {size} bytes, {expected.bytes} were written"
        checksum, buffer = 0, bytearray(min(BLOCK, max(1, size)))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if checksum != expected.crc32:
        return f"{path} has CRC-32 {checksum:08x}, {expected.crc32:08x} was written: its contents have changed"
    return None
