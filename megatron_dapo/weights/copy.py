"""Copies tensors from one checkpoint's files to another's, block by block, on several threads.

The writers (`formats/`) fix the place of every byte before the first one is copied. Threads therefore never wait for
each other, and memory holds a few blocks whatever the size of the model. safetensors and torch.save would need whole
tensors in memory; benchmarks/convert.py prints this module's speed beside `cp` and its peak memory. Each block is
checked for values that are not finite. A finished file is on disk and has a mark, so that the next run after a kill
keeps it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dapo.weights.copy_group import CopyGroup
from megatron_dapo.weights.formats.torch_zip import TensorArchive
from megatron_dapo.weights.mapping import WeightsError

BLOCK = 4 * 2**20
READ_AHEAD = 4  # blocks that a thread asks the kernel for in advance
ALONE = CopyGroup()
_LIBC = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class CheckpointReader(Protocol):
    """A checkpoint to copy from: HFReader or TorchDistReader."""

    path: Path

    def dtype(self, name: str) -> torch.dtype: ...
    def rows(self, name: str, start: int, count: int) -> Tensor: ...
    def prefetch(self, name: str, start: int, count: int) -> None: ...
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


@dataclass(slots=True)
class CopyResult:
    """Tensors (with their files) that hold values that are not finite; files that an interrupted run had finished."""

    not_finite: list[str]
    kept: int = 0


def default_workers() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0))))


def copy_tensors(
    source: CheckpointReader,
    writes: Sequence[TensorWrite],
    files: Sequence[OutputFile],
    *,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
    finished: Path | None = None,
    group: CopyGroup = ALONE,
) -> CopyResult:
    """Write and fsync this process's files (`group`).

    `finished`: a folder in which a mark is left for each file that is on disk. A file that has its mark already is
    read and compared with the source instead of written; a block that differs is written again.
    """
    count = workers or default_workers()
    job = _Job(source, files, advance, finished)
    queues: dict[int, list[TensorWrite]] = {i: [] for i in range(len(files)) if group.owns(i)}
    for write in writes:
        if group.owns(write.file):
            queues[write.file].append(write)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in pool.map(job.run, _in_windows(queues, count, job)):
                    assert done is None
            except BaseException:
                job.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    except OSError as error:
        raise WeightsError(f"{files[0].path.parent}: cannot write ({error.strerror or error})") from error
    finally:
        job.close()
    return CopyResult(sorted(job.not_finite), job.kept)


def _in_windows(queues: dict[int, list[TensorWrite]], width: int, job: _Job) -> Iterator[TensorWrite]:
    """A few files at a time, alternating between them: threads write to different files, and early files are
    finished early, so that an interrupted run has something to keep."""
    numbers = list(queues)
    for number in numbers:
        job.expect(number, len(queues[number]))
    for start in range(0, len(numbers), width):
        window = [queues[number] for number in numbers[start : start + width]]
        yield from (write for write in chain.from_iterable(zip_longest(*window)) if write is not None)


class _Job:
    """Opens files when their first tensor comes, and finishes them after the last."""

    def __init__(
        self,
        source: CheckpointReader,
        files: Sequence[OutputFile],
        advance: Callable[[int], None],
        finished: Path | None,
    ) -> None:
        self.source, self.files, self._advance, self._finished = source, files, advance, finished
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.not_finite: set[str] = set()
        self.kept = 0
        self._left: dict[int, int] = {}  # tensors of a file that are still to come
        self._open: dict[int, int] = {}
        self._compare: set[int] = set()  # files that an interrupted run has finished

    def expect(self, number: int, count: int) -> None:
        self._left[number] = count
        if count == 0:
            with self._lock:
                self._descriptor(number)
            self._finish(number)

    def run(self, write: TensorWrite) -> None:
        with self._lock:
            fd = self._descriptor(write.file)
        put = self._put_if_different if write.file in self._compare else _write
        at = write.offset
        if write.archive:
            put(fd, memoryview(write.archive.head), at)
            at += write.archive.data_offset
        blocks = [block for rows in write.ranges for block in _blocks(self.source, rows)]
        for block in blocks[:READ_AHEAD]:
            self.source.prefetch(block.name, block.start, block.count)
        for number, block in enumerate(blocks):
            if self.stop.is_set():
                return
            if number + READ_AHEAD < len(blocks):
                ahead = blocks[number + READ_AHEAD]
                self.source.prefetch(ahead.name, ahead.start, ahead.count)
            data = self._read(block, write.dtype)
            put(fd, data, at)
            _start_flush(fd, at, len(data))
            at += len(data)
            self.source.release(block.name, block.start, block.count)
            self._moved(len(data))
        if write.archive:
            end = write.offset + write.archive.data_offset + write.archive.nbytes
            if at != end:
                raise WeightsError(f"{write.ranges[0].name}: wrote up to byte {at}, expected {end}; please report this")
            put(fd, memoryview(write.archive.tail), at)
        with self._lock:
            self._left[write.file] -= 1
            last = self._left[write.file] == 0
        if last:
            self._finish(write.file)

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            return self._open[number]
        file = self.files[number]
        mark = self._mark(number)
        keep = mark is not None and mark.exists() and file.path.exists() and file.path.stat().st_size == file.size
        fd = os.open(file.path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o644)
        self._open[number] = fd
        if keep:
            self._compare.add(number)
            self.kept += 1
            self._put_if_different(fd, memoryview(file.head), 0)
        else:
            if mark is not None:
                mark.unlink(missing_ok=True)
            _reserve(fd, file.size)
            _write(fd, memoryview(file.head), 0)
        return fd

    def _finish(self, number: int) -> None:
        """The file is complete: flush it, close it, leave its mark."""
        with self._lock:
            fd = self._open.pop(number)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if (mark := self._mark(number)) is not None:
            mark.touch()

    def _mark(self, number: int) -> Path | None:
        return None if self._finished is None else self._finished / f"{self.files[number].path.name}.done"

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)

    @staticmethod
    def _put_if_different(fd: int, data: memoryview, at: int) -> None:
        if os.pread(fd, len(data), at) != bytes(data):
            _write(fd, data, at)

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
