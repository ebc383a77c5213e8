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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dapo.weights.copy_group import CopyGroup
from megatron_dapo.weights.formats.torch_zip import TensorArchive
from megatron_dapo.weights.mapping import WeightsError

BLOCK = 2**20  # fits the cache of a core: read, checked and written from there
READ_AHEAD = 16  # blocks that a thread asks the kernel for in advance
ALONE = CopyGroup()
FLUSH_BLOCKS = 8  # after so many blocks the kernel starts to write them to disk
_LIBC = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class CheckpointReader(Protocol):
    """A checkpoint to copy from: HFReader or TorchDistReader."""

    path: Path

    def dtype(self, name: str) -> torch.dtype: ...
    def rows(self, name: str, start: int, count: int) -> Tensor: ...
    def read(self, name: str, start: int, count: int) -> Tensor: ...
    def prefetch(self, name: str, start: int, count: int) -> None: ...
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
    schedule = _Schedule({i: deque() for i in range(len(files)) if group.owns(i)}, writes)
    job = _Job(source, files, advance, finished, schedule)
    count = workers or default_workers()
    try:
        for number in schedule.without_tensors:
            job.write_head(number)
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in [pool.submit(job.work) for _ in range(count)]:
                    done.result()
            except BaseException:
                job.stop.set()
                raise
    except OSError as error:
        raise WeightsError(f"{files[0].path.parent}: cannot write ({error.strerror or error})") from error
    finally:
        job.close()
    return CopyResult(sorted(job.not_finite), job.kept)


class _Schedule:
    """Which thread writes what. A thread stays with its file: two threads that write to one file wait for each other,
    and early files are finished early, so that an interrupted run has something to keep."""

    def __init__(self, queues: dict[int, deque[TensorWrite]], writes: Iterable[TensorWrite]) -> None:
        self._queues = queues
        for write in writes:
            if write.file in queues:
                queues[write.file].append(write)
        self._left = {number: len(queue) for number, queue in queues.items()}
        self.without_tensors = [number for number, queue in queues.items() if not queue]
        self._threads = dict.fromkeys(queues, 0)
        self._lock = threading.Lock()

    def next(self, current: int | None) -> TensorWrite | None:
        """The next tensor for a thread that has worked on file `current`; None when nothing is left."""
        with self._lock:
            if current is not None:
                if self._queues[current]:
                    return self._queues[current].popleft()
                self._threads[current] -= 1
            waiting = [number for number, queue in self._queues.items() if queue]
            if not waiting:
                return None
            number = min(waiting, key=lambda number: (self._threads[number], number))
            self._threads[number] += 1
            return self._queues[number].popleft()

    def is_last(self, number: int) -> bool:
        """One tensor of the file is written: whether it was the last."""
        with self._lock:
            self._left[number] -= 1
            return self._left[number] == 0


@dataclass(slots=True)
class _Put:
    """Writes to one file, one thread at a time; with `compare` only what is not there already."""

    fd: int
    turn: threading.Lock
    compare: bool = False

    def __call__(self, data: memoryview, at: int) -> None:
        if self.compare and os.pread(self.fd, len(data), at) == bytes(data):
            return
        with self.turn:
            _write(self.fd, data, at)


class _Job:
    """Opens files when their first tensor comes, and finishes them after the last."""

    def __init__(
        self,
        source: CheckpointReader,
        files: Sequence[OutputFile],
        advance: Callable[[int], None],
        finished: Path | None,
        schedule: _Schedule,
    ) -> None:
        self.source, self.files, self._advance, self._finished = source, files, advance, finished
        self._schedule = schedule
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.not_finite: set[str] = set()
        self.kept = 0
        self._open: dict[int, int] = {}
        self._turns = [threading.Lock() for _ in files]  # the kernel would let threads spin for a file
        self._compare: set[int] = set()  # files that an interrupted run has finished

    def work(self) -> None:
        """One thread: takes tensors until none is left or another thread has failed."""
        try:
            write = self._schedule.next(None)
            while write is not None and not self.stop.is_set():
                self.run(write)
                write = self._schedule.next(write.file)
        except BaseException:
            self.stop.set()
            raise

    def write_head(self, number: int) -> None:
        """A file that holds no tensor."""
        self._descriptor(number)
        self._finish(number)

    def run(self, write: TensorWrite) -> None:
        with self._lock:
            fd = self._descriptor(write.file)
        put = _Put(fd, self._turns[write.file], compare=write.file in self._compare)
        at = write.offset
        if write.archive:
            put(memoryview(write.archive.head), at)
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
            put(data, at)
            at += len(data)
            if number % FLUSH_BLOCKS == FLUSH_BLOCKS - 1:
                _start_flush(fd, at - FLUSH_BLOCKS * BLOCK, FLUSH_BLOCKS * BLOCK)
            self._moved(len(data))
        if write.archive:
            end = write.offset + write.archive.data_offset + write.archive.nbytes
            if at != end:
                raise WeightsError(f"{write.ranges[0].name}: wrote up to byte {at}, expected {end}; please report this")
            put(memoryview(write.archive.tail), at)
        if self._schedule.is_last(write.file):
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
            _Put(fd, self._turns[number], compare=True)(memoryview(file.head), 0)
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

    def _read(self, block: RowRange, dtype: torch.dtype) -> memoryview:
        rows = self.source.read(block.name, block.start, block.count)
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
