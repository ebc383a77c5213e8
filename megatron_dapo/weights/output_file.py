"""What a converted file consists of: given bytes, and rows of the source's tensors.

The writers (`formats/`) fix the place of every byte before the first one is copied (`TensorWrite`). `FileParts` then
fills any range of a file: where the source has the same bytes in the same order, they are read straight to their
place, else rows are read and converted. Every value is checked: tensors with values that are not finite are collected.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dapo.files import StoredTensor
from megatron_dapo.weights.formats.mapped_file import torch_dtype
from megatron_dapo.weights.formats.torch_zip import TensorArchive
from megatron_dapo.weights.mapping import WeightsError

_CACHED = 2**20  # bytes that are read and checked at a time: they fit the cache of a core


class CheckpointReader(Protocol):
    """A checkpoint to copy from: HFReader or PieceReader."""

    path: Path

    def dtype(self, name: str) -> torch.dtype: ...
    def rows(self, name: str, start: int, count: int) -> Tensor: ...
    def read(self, name: str, start: int, count: int) -> Tensor: ...
    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]: ...
    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None: ...
    def prefetch(self, stored: StoredTensor, skip: int, nbytes: int) -> None: ...
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [at, at + nbytes) of a file: `data`, or `rows` of the source, which may be the bytes `stored`."""

    at: int
    nbytes: int
    data: bytes = b""
    rows: RowRange | None = None
    dtype: torch.dtype = torch.uint8
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
                same = stored if stored is not None and torch_dtype(stored) == write.dtype else None
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
        """Ask the kernel to read what the range needs from disk, without waiting."""
        for part, low, high in self._inside(start, end):
            if part.stored is not None:
                self.source.prefetch(part.stored, low, high - low)

    def fill(self, view: memoryview, start: int) -> int:
        """Fill `view` with bytes [start, start + len(view)) of the file. Returns how many of them are weights."""
        filled, weights = start, 0
        for part, low, high in self._inside(start, start + len(view)):
            at = part.at + low
            _clear(view[filled - start : at - start])
            if part.rows is None:
                view[at - start : at - start + high - low] = part.data[low:high]
            else:
                for first in range(low, high, _CACHED):
                    last, begin = min(high, first + _CACHED), part.at + first - start
                    self._fill_rows(part, part.rows, first, last, view[begin : begin + last - first])
                weights += high - low
            filled = part.at + high
        _clear(view[filled - start :])
        return weights

    def _fill_rows(self, part: _Part, rows: RowRange, low: int, high: int, view: memoryview) -> None:
        item = part.dtype.itemsize
        if part.stored is not None and low % item == high % item == 0:
            self.source.read_into(part.stored, low, view)
            found = torch.frombuffer(view, dtype=part.dtype)
        else:  # other values than the file's, or an element across the end of a block
            width = part.nbytes // rows.count
            first, last = low // width, -(-high // width)
            found = self.source.rows(rows.name, rows.start + first, last - first).to(part.dtype).contiguous()
            raw: Any = found.view(-1).view(torch.uint8).numpy()
            view[:] = memoryview(raw)[low - first * width : high - first * width]
        if not _all_finite(found):
            self.not_finite.add(self.source.where(rows.name))


def _clear(view: memoryview) -> None:
    if view:
        view[:] = bytes(len(view))


def _all_finite(data: Tensor) -> bool:
    """The sum is finite only if every term is, and takes half the time of aminmax. It may overflow; then look again."""
    if not data.is_floating_point() or math.isfinite(data.sum().item()):
        return True
    low, high = torch.aminmax(data)
    return math.isfinite(low.item()) and math.isfinite(high.item())
