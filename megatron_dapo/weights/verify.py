"""Compares two checkpoints, HF or Megatron: names, shapes, dtypes and every value.

Both are read as HF tensors, through the same table as the conversion but through none of the code that writes files.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype
from megatron_dapo.weights.copy import RowRange, default_workers
from megatron_dapo.weights.formats.megatron_reader import open_megatron
from megatron_dapo.weights.formats.readers import CheckpointReader, HFReader
from megatron_dapo.weights.locate import HF_FILES, Format, format_of, locate
from megatron_dapo.weights.mapping import WeightsError, stored_mappings
from megatron_dapo.weights.side_files import WithCarried, carried_names, open_carried

BLOCK = 2**20  # both fit the cache of a core
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Entry:
    """One HF tensor of a checkpoint in either format: the rows of `ranges`, in order."""

    shape: tuple[int, ...]
    dtype: Dtype
    ranges: tuple[RowRange, ...]


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
    shape_from = _config_of(left_path, right_path, reference)
    left, entries_a = _open(left_path, shape_from)
    right, entries_b = _open(right_path, shape_from)
    result, lock = Comparison(), threading.Lock()
    for name in sorted(entries_a.keys() ^ entries_b.keys()):
        result.differences.append(f"{name}: only in {left_path if name in entries_a else right_path}")
    common = [name for name in entries_a if name in entries_b]
    total = sum(math.prod(entries_a[name].shape) * entries_a[name].dtype.itemsize for name in common)

    def one(name: str) -> None:
        x, y = entries_a[name], entries_b[name]
        line, largest = _compare(left, right, x, y, tolerance)
        with lock:
            result.tensors += 1
            result.nbytes += math.prod(x.shape) * x.dtype.itemsize
            result.largest = max(result.largest, largest)
            if line:
                result.differences.append(f"{name}: {line}")
            progress(result.nbytes, total)

    with ThreadPoolExecutor(workers or default_workers(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in pool.map(one, common):
            assert done is None
    result.differences.sort()
    return result


def _config_of(a: Path, b: Path, reference: str | Path | None) -> Path | None:
    """The HF directory that describes a torch_dist checkpoint: `reference`, its own copy, or the other checkpoint."""
    candidates = [Path(reference)] if reference else [a, a / HF_FILES, b, b / HF_FILES]
    return next((path for path in candidates if (path / "config.json").exists()), None)


def _open(path: Path, config: Path | None) -> tuple[CheckpointReader, dict[str, Entry]]:
    if format_of(path) is Format.HF:
        weights = HFReader(path)
        entries = {name: _whole(weights, name) for name in weights.stored}
        if (
            config is not None
            and "lm_head.weight" in entries
            and ModelShape.from_dir(config, weights_only=True).tied_embeddings
        ):
            del entries["lm_head.weight"]  # a copy of the embedding
        return weights, entries
    if config is None:
        raise WeightsError(f"{path} does not say which model it holds; pass --reference with the HF model's directory")
    shape = ModelShape.from_dir(config, weights_only=True)
    saved = open_megatron(path, shape)
    found = {}
    for mapping in stored_mappings(shape):
        for source, name in enumerate(mapping.hf):
            ranges = tuple(RowRange(mapping.name, s.start, s.rows) for s in mapping.segments_of(source))
            found[name] = Entry(mapping.hf_shapes[source], saved.dtype(mapping.name), ranges)
    carried = open_carried(path / HF_FILES, shape)
    if carried is None:
        return saved, found
    found |= {name: _whole(carried, name) for name in carried_names(carried, shape)}
    return WithCarried(saved, carried), found


def _whole(weights: HFReader, name: str) -> Entry:
    shape = weights.stored[name].shape
    return Entry(shape, weights.dtype(name), (RowRange(name, 0, shape[0] if shape else 1),))


def _compare(
    left: CheckpointReader, right: CheckpointReader, a: Entry, b: Entry, tolerance: float
) -> tuple[str, float]:
    """How two tensors differ, in one line (empty if they are equal), and the largest difference."""
    if a.shape != b.shape:
        return f"shape {a.shape} and {b.shape}", 0.0
    if a.dtype != b.dtype and not tolerance:
        return f"dtype {a.dtype} and {b.dtype}", 0.0
    width = max(1, math.prod(a.shape[1:]) * max(a.dtype.itemsize, b.dtype.itemsize))
    step = max(1, BLOCK // width)
    largest, differing = 0.0, 0
    for start in range(0, a.shape[0], step):
        count = min(step, a.shape[0] - start)
        x, y = _rows(left, a, start, count), _rows(right, b, start, count)
        if x.dtype == y.dtype and _same_bits(x.contiguous(), y.contiguous()):
            continue
        gap = (x.double() - y.double()).abs()
        gap = torch.where(torch.isnan(gap) & ~(torch.isnan(x) & torch.isnan(y)), math.inf, gap).nan_to_num(0, math.inf)
        differing += int((gap > tolerance).sum()) or int(tolerance == 0)
        largest = max(largest, gap.max().item())
    if largest > tolerance or (differing and not tolerance):
        return f"{differing} of {math.prod(a.shape)} values differ, by at most {largest:.3g}", largest
    return "", largest


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """torch.equal needs twenty times as long for bytes, and calls two NaNs different."""
    return int(_LIBC.memcmp(x.data_ptr(), y.data_ptr(), x.nbytes)) == 0


def _rows(source: CheckpointReader, entry: Entry, start: int, count: int) -> Tensor:
    """Rows [start, start + count) of an entry, which may consist of several ranges."""
    parts, at = [], 0
    for rows in entry.ranges:
        low, high = max(start, at), min(start + count, at + rows.count)
        if low < high:
            found = source.read(rows.name, rows.start + low - at, high - low)
            if high - low == count:
                return found
            parts.append(found.clone())
        at += rows.count
    return torch.cat(parts)
