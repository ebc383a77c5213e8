"""Compares two checkpoints, HF or Megatron: names, shapes, dtypes and every value.

Both are read as HF tensors, through the same table as the conversion but through none of the code that writes files.
Threads read the same rows of both and compare their bytes: what is in the page cache in small parts, anything else past
it in large ones, which needs a third of the CPU time. Torch is imported only where these differ, or where a file
does not hold the rows as they are.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype, StoredTensor
from megatron_dapo.weights.copy import BLOCK, RowRange, default_workers, run_blocks
from megatron_dapo.weights.formats.megatron_reader import open_megatron
from megatron_dapo.weights.formats.readers import ALIGN, CheckpointReader, HFReader
from megatron_dapo.weights.locate import HF_FILES, Format, format_of, locate
from megatron_dapo.weights.mapping import HEAD, WeightsError, stored_mappings
from megatron_dapo.weights.side_files import carried_names, open_carried

if TYPE_CHECKING:
    from torch import Tensor

_CACHED = 2**19  # bytes of each that are compared at a time if they are in memory: both fit the cache of a core
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Entry:
    """One HF tensor of a checkpoint in either format: the rows of `ranges`, in order."""

    reader: CheckpointReader
    shape: tuple[int, ...]
    dtype: Dtype
    ranges: tuple[RowRange, ...]

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def parts(self, rows: RowRange) -> Iterator[tuple[RowRange, StoredTensor | None]]:
        """These rows of the HF tensor as rows of the checkpoint's own, and where a file holds them as they are."""
        at = 0
        for own in self.ranges:
            low, high = max(rows.start, at), min(rows.start + rows.count, at + own.count)
            if low < high:
                start = own.start + low - at
                for count, stored in self.reader.spans(own.name, start, high - low):
                    yield RowRange(own.name, start, count), stored
                    start += count
            at += own.count

    def reads_direct(self, rows: RowRange) -> bool:
        return any(stored is not None and self.reader.reads_direct(stored) for _, stored in self.parts(rows))

    def prefetch(self, rows: RowRange, *, mapped: bool) -> None:
        """`mapped`: the rows will be read through `values`, not `read`."""
        for _, stored in self.parts(rows):
            if stored is not None and (mapped or not self.reader.reads_direct(stored)):
                self.reader.prefetch(stored.file, stored.offset, stored.nbytes)

    def read(self, rows: RowRange, view: memoryview, *, direct: bool) -> int:
        """Reads the rows into the view, whose memory is aligned. Returns where they begin. `direct`: not all cached."""
        begin = end = 0
        for own, stored in self.parts(rows):
            size = own.count * self.width
            if stored is None:
                view[end : end + size] = self.reader.converted(own.name, own.start, own.count, self.dtype)
            elif not direct or (at := self.reader.read_direct(stored, view, end)) is None:
                self.reader.read_into(stored, 0, view[end : end + size])
            elif end == 0:
                begin = end = at
            else:
                view[end : end + size] = view[at : at + size]
            end += size
        return begin

    def values(self, rows: RowRange) -> Tensor:
        import torch

        return torch.cat([self.reader.rows(own.name, own.start, own.count) for own, _ in self.parts(rows)])


def _in_blocks(rows: RowRange, width: int, size: int) -> Iterator[RowRange]:
    """The rows, of `width` bytes each, in blocks of about `size` bytes."""
    step, end = max(1, size // max(1, width)), rows.start + rows.count
    return (RowRange(rows.name, at, min(step, end - at)) for at in range(rows.start, end, step))


@dataclass(slots=True)
class Comparison:
    """How much was compared, and one line per difference."""

    tensors: int = 0
    nbytes: int = 0
    differences: list[str] = field(default_factory=list)
    largest: float = 0.0

    @property
    def same(self) -> bool:
        return not self.differences


def verify(
    a: str | Path,
    b: str | Path,
    *,
    reference: str | Path | None = None,
    tolerance: float = 0.0,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Compare two checkpoints. With `tolerance` 0, dtypes and bits must be equal; else values may differ by it."""
    left_path, right_path = locate(a), locate(b)
    left_config, right_config = (
        _config_of(one, other, reference) for one, other in ((left_path, right_path), (right_path, left_path))
    )
    left, right = _open(left_path, left_config), _open(right_path, right_config)
    _add_tied_head(left, right, left_config)
    _add_tied_head(right, left, right_config)
    result = Comparison()
    for name in sorted(left.keys() ^ right.keys()):
        result.differences.append(f"{name}: only in {left_path if name in left else right_path}")
    blocks: list[RowRange] = []
    for name in (name for name in left if name in right):
        x, y = left[name], right[name]
        result.tensors += 1
        result.nbytes += math.prod(x.shape) * x.dtype.itemsize
        if x.shape != y.shape:
            result.differences.append(f"{name}: shape {x.shape} and {y.shape}")
        elif x.dtype != y.dtype and not tolerance:
            result.differences.append(f"{name}: dtype {x.dtype} and {y.dtype}")
        else:
            blocks += _in_blocks(RowRange(name, 0, x.shape[0] if x.shape else 1), x.width, BLOCK)
    job = _Job(left, right, tolerance, lambda done: progress(done, result.nbytes))
    run_blocks(blocks, workers or default_workers(), job.prefetch, job.new_worker)
    for name, (differing, largest) in job.found.items():
        result.largest = max(result.largest, largest)
        if largest > tolerance or (differing and not tolerance):
            size = math.prod(left[name].shape)
            result.differences.append(f"{name}: {differing} of {size} values differ, by at most {largest:.3g}")
    result.differences.sort()
    return result


@dataclass(slots=True)
class _Job:
    """Compares blocks of rows. `found` has the tensors that are not equal bit by bit: how many values differ, and the
    largest difference."""

    left: dict[str, Entry]
    right: dict[str, Entry]
    tolerance: float
    progress: Callable[[int], None]
    found: dict[str, tuple[int, float]] = field(default_factory=dict)
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prefetch(self, block: RowRange) -> None:
        a, b = self.left[block.name], self.right[block.name]
        a.prefetch(block, mapped=a.dtype != b.dtype)
        b.prefetch(block, mapped=a.dtype != b.dtype)

    def new_worker(self) -> Callable[[RowRange], None]:
        size = max([BLOCK, *(entry.width for entry in self.left.values())]) + 4 * ALIGN
        return partial(self._run, mmap.mmap(-1, size), mmap.mmap(-1, size))

    def _run(self, x: mmap.mmap, y: mmap.mmap, block: RowRange) -> None:
        a, b = self.left[block.name], self.right[block.name]
        same = a.dtype == b.dtype
        direct = a.reads_direct(block) or b.reads_direct(block)
        for rows in _in_blocks(block, a.width, BLOCK if direct else _CACHED):
            places = [_read(a, rows, x, direct=direct), _read(b, rows, y, direct=direct)] if same else []
            for part in _in_blocks(rows, a.width, _CACHED):
                skip, size = (part.start - rows.start) * a.width, part.count * a.width
                if not same or _LIBC.memcmp(*(place + skip for place in places), size):
                    self._add(block.name, *_difference(a.values(part), b.values(part), self.tolerance))
        with self._lock:
            self._done += block.count * a.width
            self.progress(self._done)

    def _add(self, name: str, gap: float, differing: int) -> None:
        with self._lock:
            before = self.found.get(name, (0, 0.0))
            self.found[name] = before[0] + differing, max(before[1], gap)


def _read(entry: Entry, rows: RowRange, buffer: mmap.mmap, *, direct: bool) -> int:
    """Returns the address of the rows in the buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + entry.read(rows, memoryview(buffer), direct=direct)


def _difference(x: Tensor, y: Tensor, tolerance: float) -> tuple[float, int]:
    """The largest difference of two values, and how many differ: at least 1 where none may and a bit does."""
    import torch

    x, y = x.double(), y.double()
    same = (x == y) | (x.isnan() & y.isnan())  # two infinities are the same, though their difference is NaN
    gap = torch.where(same, 0.0, (x - y).abs().nan_to_num(math.inf, math.inf))
    return gap.max().item(), int((gap > tolerance).sum()) or int(tolerance == 0)


def _config_of(path: Path, other: Path, reference: str | Path | None) -> Path | None:
    """The HF directory that describes a checkpoint: `reference`, its own copy, or the other checkpoint."""
    candidates = [Path(reference)] if reference else [path, path / HF_FILES, other, other / HF_FILES]
    return next((path for path in candidates if (path / "config.json").exists()), None)


def _open(path: Path, config: Path | None) -> dict[str, Entry]:
    if format_of(path) is Format.HF:
        weights = HFReader(path)
        return {name: _whole(weights, name) for name in weights.stored}
    if config is None:
        raise WeightsError(f"{path} does not say which model it holds; pass --reference with the HF model's directory")
    shape = ModelShape.from_dir(config, weights_only=True)
    saved = open_megatron(path, shape)
    found = {}
    for mapping in stored_mappings(shape):
        for source, name in enumerate(mapping.hf):
            ranges = tuple(RowRange(mapping.name, s.start, s.rows) for s in mapping.segments_of(source))
            found[name] = Entry(saved, mapping.hf_shapes[source], saved.dtype(mapping.name), ranges)
    if (carried := open_carried(path / HF_FILES, shape)) is not None:
        found |= {name: _whole(carried, name) for name in carried_names(carried, shape)}
    return found


def _add_tied_head(entries: dict[str, Entry], other: Mapping[str, Entry], config: Path | None) -> None:
    """The head that only the other checkpoint stores is compared with the embedding, if that is this model's head."""
    if HEAD in other and HEAD not in entries and config is not None:
        shape = ModelShape.from_dir(config, weights_only=True)
        embedding = entries.get(f"{shape.prefix}embed_tokens.weight")
        if shape.tied_embeddings and embedding is not None:
            entries[HEAD] = embedding


def _whole(weights: HFReader, name: str) -> Entry:
    shape = weights.stored[name].shape
    return Entry(weights, shape, weights.dtype(name), (RowRange(name, 0, shape[0] if shape else 1),))
