"""Moves rows of tensors from one checkpoint's files to another's, block by block, on several threads.

Where every byte goes is decided before the first is moved, so threads never wait for each other and memory holds a few
blocks, whatever the size of the model. Each block is looked at once on its way: values that are not finite are noted.
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

from megatron_dapo.weights.formats.torch_zip import ItemLayout
from megatron_dapo.weights.sharding import WeightsError

BLOCK = 4 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


class Source(Protocol):
    """A checkpoint to read from: HFDirectory or TorchDistDirectory."""

    path: Path

    def dtype(self, name: str) -> torch.dtype: ...
    def rows(self, name: str, start: int, count: int) -> Tensor: ...
    def release(self, name: str, start: int, count: int) -> None: ...
    def where(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Take:
    """Rows [start, start + count) of a source tensor."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Item:
    """What is written in one go: rows of source tensors one after the other, at `offset` of file number `file`.

    `layout` is set for torch_dist items, whose data is wrapped.
    """

    file: int
    offset: int
    dtype: torch.dtype
    takes: tuple[Take, ...]
    layout: ItemLayout | None = None


@dataclass(slots=True)
class OutputFile:
    path: Path
    size: int
    head: bytes = b""


def default_workers() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0))))


def stream(
    source: Source,
    items: Sequence[Item],
    files: Sequence[OutputFile],
    *,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write all files completely and flush them to disk. Returns where values that are not finite were seen."""
    descriptors = [os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644) for file in files]
    job = _Job(source, descriptors, advance)
    try:
        for fd, file in zip(descriptors, files, strict=True):
            _reserve(fd, file.size)
            _write(fd, memoryview(file.head), 0)
        with ThreadPoolExecutor(workers or default_workers(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in pool.map(job.run, _by_turns(items)):
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


def _by_turns(items: Iterable[Item]) -> Iterable[Item]:
    """Items of all files in turn, so that several files are read and written at a time."""
    queues: dict[int, list[Item]] = {}
    for item in items:
        queues.setdefault(item.file, []).append(item)
    return (item for item in chain.from_iterable(zip_longest(*queues.values())) if item is not None)


class _Job:
    def __init__(self, source: Source, descriptors: list[int], advance: Callable[[int], None]) -> None:
        self.source, self.descriptors, self._advance = source, descriptors, advance
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.not_finite: set[str] = set()

    def run(self, item: Item) -> None:
        fd, at = self.descriptors[item.file], item.offset
        if item.layout:
            _write(fd, memoryview(item.layout.head), at)
            at += item.layout.data_offset
        for take in item.takes:
            for block in _blocks(self.source, take):
                if self.stop.is_set():
                    return
                data = self._read(block, item.dtype)
                _write(fd, data, at)
                _start_flush(fd, at, len(data))
                at += len(data)
                self.source.release(block.name, block.start, block.count)
                self._moved(len(data))
        if item.layout:
            planned = item.offset + item.layout.data_offset + item.layout.nbytes
            if at != planned:
                raise WeightsError(
                    f"{item.takes[0].name}: wrote up to byte {at}, planned {planned}; please report this"
                )
            _write(fd, memoryview(item.layout.tail), at)

    def _read(self, block: Take, dtype: torch.dtype) -> memoryview:
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
    """A sum is finite only if all its terms are, and takes half the time of a closer look. It may overflow, too."""
    if not data.is_floating_point() or math.isfinite(data.sum().item()):
        return True
    low, high = torch.aminmax(data)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _blocks(source: Source, take: Take) -> Iterable[Take]:
    """A take cut into runs of rows of about BLOCK bytes."""
    if take.count == 0:
        return
    one = source.rows(take.name, take.start, 1)
    step = max(1, BLOCK // max(1, one.numel() * one.dtype.itemsize))
    for start in range(take.start, take.start + take.count, step):
        yield Take(take.name, start, min(step, take.start + take.count - start))


def _reserve(fd: int, size: int) -> None:
    """Set a file's blocks aside: a full disk is noticed now, and threads that write all over it do not scatter it.

    The C library's posix_fallocate writes every block where the file system cannot do this; so this asks directly.
    """
    if not size or _LIBC.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
        return
    if ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, size)


def _start_flush(fd: int, at: int, length: int) -> None:
    """Ask the system to begin writing to disk, and do not wait: the flush at the end then finds little left to do."""
    if hasattr(_LIBC, "sync_file_range"):
        _LIBC.sync_file_range(fd, ctypes.c_longlong(at), ctypes.c_longlong(length), _BEGIN_WRITING)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
