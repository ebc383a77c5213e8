"""Copies tensors from one checkpoint's files to another's, block by block, on several threads.

The writers (`formats/`) fix the place of every byte before the first one is copied (`TensorWrite`). `FileParts` fills
any range of a file: where the source has the same bytes in the same order, they are copied as they are, else rows are
read and converted. Every value is checked: tensors with values that are not finite are collected.

Threads take the blocks of all files in order. What is not in the page cache is read past it, small parts excepted: the
kernel reads those while earlier blocks are filled. Blocks are written past the page cache, too: that needs an eighth of
the CPU time of a buffered write here, and leaves nothing for the final flush. File systems that cannot do this are read
and written as usual. Memory holds two blocks per thread, whatever the size of the model; safetensors and torch.save
would need whole tensors. benchmarks/convert.py prints the speed beside `cp`. A finished file is on disk and has a mark,
so that the next run after a kill keeps it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron_dapo.files import Dtype, StoredTensor
from megatron_dapo.weights.destination import CopyGroup
from megatron_dapo.weights.formats.readers import ALIGN, CheckpointReader, bytes_of
from megatron_dapo.weights.formats.torch_zip import TensorArchive
from megatron_dapo.weights.mapping import WeightsError

_CACHED = 2**20  # bytes that are read and checked at a time: they fit the cache of a core
BLOCK = 8 * 2**20  # a multiple of ALIGN
ALONE = CopyGroup()
_BYTE = Dtype("uint8")
_LIBC = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


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
    dtype: Dtype
    ranges: tuple[RowRange, ...]
    archive: TensorArchive | None = None


@dataclass(slots=True)
class OutputFile:
    path: Path
    size: int
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [at, at + nbytes) of a file: `data`, or `rows` of the source, which may be the bytes `stored`."""

    at: int
    nbytes: int
    data: bytes = b""
    rows: RowRange | None = None
    dtype: Dtype = _BYTE
    stored: StoredTensor | None = None


@dataclass(slots=True)
class FileParts:
    """The content of one output file. What no part covers is zero."""

    source: CheckpointReader
    file: OutputFile
    writes: Sequence[TensorWrite]
    not_finite: set[str] = field(default_factory=set)
    _parts: list[_Part] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = [_Part(0, len(self.file.head), self.file.head)] if self.file.head else []
        for write in sorted(self.writes, key=lambda write: write.offset):
            self._parts += self._tensor(write)
        self._starts = [part.at for part in self._parts]

    def _tensor(self, write: TensorWrite) -> Iterator[_Part]:
        archive, at = write.archive, write.offset
        if archive:
            yield _Part(at, len(archive.head), archive.head)
            at += archive.data_offset
        for rows in write.ranges:
            start = rows.start
            for count, stored in self.source.spans(rows.name, rows.start, rows.count):
                row = self.source.rows(rows.name, start, 1).shape if stored is None else stored.shape
                width = math.prod(row[1:]) * write.dtype.itemsize
                same = stored if stored is not None and stored.dtype == write.dtype else None
                yield _Part(at, count * width, b"", RowRange(rows.name, start, count), write.dtype, same)
                start, at = start + count, at + count * width
        if archive:
            end = write.offset + archive.data_offset + archive.nbytes
            if at != end:
                raise WeightsError(f"{write.ranges[0].name}: ends at byte {at}, expected {end}; please report this")
            yield _Part(at, len(archive.tail), archive.tail)

    def _inside(self, start: int, end: int) -> Iterator[tuple[_Part, int, int]]:
        """The parts of a byte range, and which of their bytes are in it."""
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._parts)):
            part = self._parts[index]
            if part.at >= end:
                return
            low, high = max(start, part.at) - part.at, min(end, part.at + part.nbytes) - part.at
            if low < high:
                yield part, low, high

    def prefetch(self, start: int, end: int) -> None:
        """Ask the kernel to read what the range needs from disk, without waiting; not what `fill` reads directly."""
        for part, low, high in self._inside(start, end):
            if part.stored is not None and not self.source.reads_direct(found := bytes_of(part.stored, low, high)):
                self.source.prefetch(found.file, found.offset, found.nbytes)

    def fill(self, view: memoryview, start: int, scratch: memoryview) -> int:
        """Fill `view` with bytes [start, start + len(view)) of the file. Returns how many of them are weights.

        `scratch`: aligned memory for direct reads, ALIGN bytes longer than `view`.
        """
        filled, weights = start, 0
        for part, low, high in self._inside(start, start + len(view)):
            at = part.at + low
            _clear(view[filled - start : at - start])
            if part.rows is None:
                view[at - start : at - start + high - low] = part.data[low:high]
            else:
                raw = self._read_direct(part, low, high, scratch)
                for first in range(low, high, _CACHED):
                    last, begin = min(high, first + _CACHED), part.at + first - start
                    place = view[begin : begin + last - first]
                    self._fill_rows(part, part.rows, first, last, place, raw[first - low : last - low])
                weights += high - low
            filled = part.at + high
        _clear(view[filled - start :])
        return weights

    def _read_direct(self, part: _Part, low: int, high: int, scratch: memoryview) -> memoryview:
        """Bytes [low, high) of a part in the scratch memory; none if they are cached or not those of the source."""
        if part.stored is None:
            return scratch[:0]
        begin = self.source.read_direct(bytes_of(part.stored, low, high), scratch, 0)
        return scratch[:0] if begin is None else scratch[begin : begin + high - low]

    def _fill_rows(self, part: _Part, rows: RowRange, low: int, high: int, view: memoryview, raw: memoryview) -> None:
        """Bytes [low, high) of a part. `raw`: the same if they have been read, else empty."""
        item = part.dtype.itemsize
        if part.stored is not None and low % item == high % item == 0:
            if raw:
                view[:] = raw
            else:
                self.source.read_into(part.stored, low, view)
            finite = all_finite(view, part.dtype)
        else:  # other values than the file's, or an element across the end of a block
            width = part.nbytes // rows.count
            first, last = low // width, -(-high // width)
            values = self.source.converted(rows.name, rows.start + first, last - first, part.dtype)
            view[:] = values[low - first * width : high - first * width]
            finite = all_finite(values, part.dtype)
        if not finite:
            self.not_finite.add(self.source.where(rows.name))


def _clear(view: memoryview) -> None:
    if view:
        view[:] = bytes(len(view))


# The bits of infinity. Larger ones, without the sign, are NaN.
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}


def all_finite(data: memoryview, dtype: Dtype) -> bool:
    """The largest bits belong to a positive value, read as integers with a sign, and to a negative one without."""
    if dtype not in _INFINITY:
        return True
    size, infinity = dtype.itemsize, _INFINITY[dtype]
    bits, sign = np.frombuffer(data, f"i{size}"), 1 << (8 * size - 1)
    return int(bits.max(initial=0)) < infinity and int(bits.view(f"u{size}").max(initial=0)) < sign | infinity


def default_workers() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0))))


def run_blocks(
    blocks: Sequence[T], workers: int, prefetch: Callable[[T], None], new_worker: Callable[[], Callable[[T], None]]
) -> None:
    """Threads take the blocks in order, while the kernel reads what later ones need (`prefetch`). `new_worker` makes
    the function that handles the blocks of one thread."""
    ahead, numbers = 2 * workers, iter(range(len(blocks)))  # the threads share the iterator

    def work() -> None:
        handle = new_worker()
        for number in numbers:
            for block in blocks[number + ahead : number + ahead + 1]:
                prefetch(block)
            handle(blocks[number])

    for block in blocks[:ahead]:
        prefetch(block)
    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(work) for _ in range(workers)]):
                done.result()
        finally:
            deque(numbers, maxlen=0)  # after an error or Ctrl-C, nothing is left to take


def copy_tensors(
    source: CheckpointReader,
    writes: Sequence[TensorWrite],
    files: Sequence[OutputFile],
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
    finished: Path | None = None,
    group: CopyGroup = ALONE,
) -> tuple[list[str], int]:
    """Write and fsync this process's files (`group`). Returns the tensors (with their files) that hold values that are
    not finite, and how many files an interrupted run had finished.

    `progress` is told how many bytes of weights are written. `finished`: a folder in which a mark is left for each file
    that is on disk. A file that has its mark already is read and compared with the source instead of written; a block
    that differs is written again.
    """
    mine: dict[int, list[TensorWrite]] = {i: [] for i in range(len(files)) if group.owns(i)}
    for write in writes:
        if write.file in mine:
            mine[write.file].append(write)
    contents = [FileParts(source, files[i], found) for i, found in mine.items()]
    count = workers or default_workers()
    job = _Job(contents, progress, finished)
    try:
        run_blocks(job.blocks, count, job.prefetch, job.new_worker)
    except OSError as error:
        raise WeightsError(f"{files[0].path.parent}: cannot write ({error.strerror or error})") from error
    finally:
        job.close()
    return sorted(set().union(*(file.not_finite for file in contents))), job.kept


class _Job:
    """Opens files when their first block comes, and finishes them after the last."""

    def __init__(self, contents: Sequence[FileParts], progress: Callable[[int], None], finished: Path | None) -> None:
        self.kept = 0
        self.blocks = [(i, at) for i, c in enumerate(contents) for at in range(0, max(1, c.file.size), BLOCK)]
        self._contents = contents
        self._progress = progress
        self._finished = finished
        self._lock = threading.Lock()
        self._done = 0
        self._left = [max(1, -(-c.file.size // BLOCK)) for c in contents]
        self._open: dict[int, int] = {}
        self._compare: set[int] = set()  # files that an interrupted run has finished

    def prefetch(self, block: tuple[int, int]) -> None:
        number, at = block
        self._contents[number].prefetch(at, at + BLOCK)

    def new_worker(self) -> Callable[[tuple[int, int]], None]:
        size = -(-BLOCK // ALIGN) * ALIGN
        return partial(self._run, memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size + ALIGN)))

    def _run(self, buffer: memoryview, scratch: memoryview, block: tuple[int, int]) -> None:
        number, at = block
        content = self._contents[number]
        with self._lock:
            fd = self._descriptor(number)
        length = min(BLOCK, content.file.size - at)
        data = buffer[: -(-length // ALIGN) * ALIGN]  # the end of the file is cut off afterwards
        weights = content.fill(data, at, scratch)
        if number not in self._compare or os.pread(fd, length, at) != bytes(data[:length]):
            _write(fd, data, at)
        with self._lock:
            self._done += weights
            self._progress(self._done)
            self._left[number] -= 1
            last = self._left[number] == 0
        if last:
            self._finish(number)

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            return self._open[number]
        file = self._contents[number].file
        mark = self._mark(number)
        keep = mark is not None and mark.exists() and file.path.exists() and file.path.stat().st_size == file.size
        if keep:
            self._compare.add(number)
            self.kept += 1
            self._open[number] = os.open(file.path, os.O_RDWR)
        else:
            if mark is not None:
                mark.unlink(missing_ok=True)
            self._open[number] = fd = _create(file.path)
            _reserve(fd, file.size)
        return self._open[number]

    def _finish(self, number: int) -> None:
        """The file is complete: flush it, close it, leave its mark."""
        with self._lock:
            fd = self._open.pop(number)
        try:
            os.ftruncate(fd, self._contents[number].file.size)
            os.fsync(fd)
        finally:
            os.close(fd)
        if (mark := self._mark(number)) is not None:
            mark.touch()

    def _mark(self, number: int) -> Path | None:
        return None if self._finished is None else self._finished / f"{self._contents[number].file.path.name}.done"

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


def _create(path: Path) -> int:
    """A new file for direct writes, where the file system has them."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _reserve(fd: int, size: int) -> None:
    """Allocate the file's blocks. A full disk is found now, and concurrent writes do not fragment the file.

    This calls the kernel directly: where the file system cannot allocate, posix_fallocate would write every block.
    """
    if not size or _LIBC.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
        return
    if ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, size)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        try:
            written = os.pwrite(fd, data, at)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # this file system wants another alignment
            continue
        data, at = data[written:], at + written
