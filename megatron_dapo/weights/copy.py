"""Copies tensors from one checkpoint's files to another's, block by block, on several threads.

The writers (`formats/`) fix the place of every byte before the first one is copied. Threads therefore never wait for
each other, and memory holds a few blocks whatever the size of the model. safetensors and torch.save would need whole
tensors in memory; benchmarks/convert.py prints this module's speed beside `cp` and its peak memory. Each block is
checked for values that are not finite.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dapo.weights.formats.torch_zip import TensorArchive
from megatron_dapo.weights.mapping import WeightsError

BLOCK = 4 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class CheckpointReader(Protocol):
    """A checkpoint to copy from: HFReader or TorchDistReader."""

    path: Path

    def dtype(self, name: str) -> torch.dtype: ...
    def rows(self, name: str, start: int, count: int) -> Tensor: ...
    def release(self, name: str, start: int, count: int) -> None: ...
    def where(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, start + count) of a source tensor."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """One tensor (or chunk of one) to write at `offset` of file number `file`: the given rows, in order.

    `archive` is set for torch_dist, which stores every chunk as a small zip archive.
    """

    file: int
    offset: int
    dtype: torch.dtype
    ranges: tuple[RowRange, ...]
    archive: TensorArchive | None = None


@dataclass(slots=True)
class OutputFile:
    path: Path
    size: int
    head: bytes = b""


def default_workers() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0))))


def copy_tensors(
    source: CheckpointReader,
    writes: Sequence[TensorWrite],
    files: Sequence[OutputFile],
    *,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write and fsync all files. Returns the tensors (with their files) that hold values that are not finite."""
    descriptors = [os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644) for file in files]
    job = _Job(source, descriptors, advance)
    try:
        for fd, file in zip(descriptors, files, strict=True):
            _reserve(fd, file.size)
            _write(fd, memoryview(file.head), 0)
        with ThreadPoolExecutor(workers or default_workers(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in pool.map(job.run, _round_robin(writes)):
                    assert done is None
                for done in pool.map(os.fsync, descriptors):
                    assert done is None
            except BaseException:
                job.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    except OSError as error:
        raise WeightsError(f"{files[0].path.parent}: cannot write ({error.strerror or error})") from error
    finally:
        for fd in descriptors:
            os.close(fd)
    return sorted(job.not_finite)


def _round_robin(writes: Iterable[TensorWrite]) -> Iterable[TensorWrite]:
    """Alternate between files, so that several files are read and written at a time."""
    queues: dict[int, list[TensorWrite]] = {}
    for write in writes:
        queues.setdefault(write.file, []).append(write)
    return (write for write in chain.from_iterable(zip_longest(*queues.values())) if write is not None)


class _Job:
    def __init__(self, source: CheckpointReader, descriptors: list[int], advance: Callable[[int], None]) -> None:
        self.source, self.descriptors, self._advance = source, descriptors, advance
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.not_finite: set[str] = set()

    def run(self, write: TensorWrite) -> None:
        fd, at = self.descriptors[write.file], write.offset
        if write.archive:
            _write(fd, memoryview(write.archive.head), at)
            at += write.archive.data_offset
        for rows in write.ranges:
            for block in _blocks(self.source, rows):
                if self.stop.is_set():
                    return
                data = self._read(block, write.dtype)
                _write(fd, data, at)
                _start_flush(fd, at, len(data))
                at += len(data)
                self.source.release(block.name, block.start, block.count)
                self._moved(len(data))
        if write.archive:
            end = write.offset + write.archive.data_offset + write.archive.nbytes
            if at != end:
                raise WeightsError(f"{write.ranges[0].name}: wrote up to byte {at}, expected {end}; please report this")
            _write(fd, memoryview(write.archive.tail), at)

    def _read(self, block: RowRange, dtype: torch.dtype) -> memoryview:
        rows = self.source.rows(block.name, block.start, block.count)
        data = rows.to(dtype).contiguous()
        if not _all_finite(data):
            with self._lock:
                self.not_finite.add(self.source.where(block.name))
        raw: Any = data.view(-1).view(torch.uint8).numpy()
        return memoryview(raw)

    def _moved(self, count: int) -> None:
        with self._lock:
            self._advance(count)


def _all_finite(data: Tensor) -> bool:
    """The sum is finite only if every term is, and takes half the time of aminmax. It may overflow; then look again."""
    if not data.is_floating_point() or math.isfinite(data.sum().item()):
        return True
    low, high = torch.aminmax(data)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _blocks(source: CheckpointReader, rows: RowRange) -> Iterable[RowRange]:
    """The range in pieces of about BLOCK bytes."""
    if rows.count == 0:
        return
    one = source.rows(rows.name, rows.start, 1)
    step = max(1, BLOCK // max(1, one.numel() * one.dtype.itemsize))
    for start in range(rows.start, rows.start + rows.count, step):
        yield RowRange(rows.name, start, min(step, rows.start + rows.count - start))


def _reserve(fd: int, size: int) -> None:
    """Allocate the file's blocks. A full disk is found now, and concurrent writes do not fragment the file.

    This calls the kernel directly: where the file system cannot allocate, posix_fallocate would write every block.
    """
    if not size or _LIBC.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
        return
    if ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, size)


def _start_flush(fd: int, at: int, length: int) -> None:
    """Ask the kernel to start writing to disk, without waiting: the final fsync then has little left to do."""
    if hasattr(_LIBC, "sync_file_range"):
        _LIBC.sync_file_range(fd, ctypes.c_longlong(at), ctypes.c_longlong(length), _BEGIN_WRITING)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
