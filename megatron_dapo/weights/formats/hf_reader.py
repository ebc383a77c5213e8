"""HF safetensors directories, memory-mapped. Nothing is read until it is asked for, and nothing is trusted: every
header, every offset and the index are checked against the files before the first tensor is handed out.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.files import DTYPES
from megatron_dapo.weights.sharding import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor's bytes lie: contiguous, row-major, at [offset, offset + nbytes) of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def map_file(path: Path) -> mmap.mmap:
    """A private mapping: tensors over it may be written by mistake without touching the file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def tensor_over(buffer: mmap.mmap, stored: Stored) -> Tensor:
    count = math.prod(stored.shape)
    if count == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(buffer, dtype=stored.dtype, count=count, offset=stored.offset).view(stored.shape)


def release_pages(buffer: mmap.mmap, offset: int, length: int) -> None:
    """Drop a range of a mapping from this process's memory; the system keeps it cached."""
    start = offset - offset % mmap.PAGESIZE
    if length:
        buffer.madvise(mmap.MADV_DONTNEED, start, offset + length - start)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. A file that is cut short or damaged is an error that says so."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if length < 2 or length > _MAX_HEADER or 8 + length > size:
                raise WeightsError(f"{path}: truncated or not a safetensors file ({size} bytes); fetch it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; fetch it again") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: the safetensors header is damaged ({error}); fetch the file again") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the safetensors header is damaged (not an object); fetch the file again")
    entries = [(name, item) for name, item in header.items() if name != "__metadata__"]
    found = [_entry(path, 8 + length, name, item) for name, item in entries]
    _check_cover(path, found, 8 + length, size)
    return {stored.name: stored for stored in found}


def _entry(path: Path, base: int, name: str, item: Any) -> Stored:
    try:
        begin, end = (int(x) for x in item["data_offsets"])
        shape, code = tuple(int(x) for x in item["shape"]), item["dtype"]
    except (TypeError, KeyError, ValueError):
        raise WeightsError(f"{path}: tensor {name}: damaged header entry; fetch the file again") from None
    if code not in DTYPES:
        raise WeightsError(f"{path}: tensor {name}: dtype {code!r} is not supported; use the bf16 checkpoint")
    stored = Stored(name, path, DTYPES[code], shape, base + begin)
    if min(shape, default=0) < 0 or begin < 0 or end - begin != stored.nbytes:
        raise WeightsError(
            f"{path}: tensor {name}: {end - begin} bytes do not hold {code} of shape {shape}; fetch the file again"
        )
    return stored


def _check_cover(path: Path, found: list[Stored], start: int, size: int) -> None:
    """Tensors lie one after the other without gap or overlap and end where the file ends."""
    at = start
    for stored in sorted(found, key=lambda s: (s.offset, s.nbytes)):
        if stored.offset != at:
            raise WeightsError(f"{path}: tensor {stored.name}: starts at byte {stored.offset}, expected {at}")
        at += stored.nbytes
        if at > size:
            raise WeightsError(
                f"{path}: truncated inside tensor {stored.name}: it ends at byte {at}, the file has {size}; "
                "fetch the file again"
            )
    if at != size:
        raise WeightsError(f"{path}: {size - at} bytes after the last tensor; fetch the file again")


class HFReader(Mapping[str, Tensor]):
    """A checked HF checkpoint: maps names to memory-mapped tensors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stored = _scan(self.path)
        self._maps: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return tensor_over(self._map(stored.file), stored)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(file)
        return self._maps[file]

    def dtype(self, name: str) -> torch.dtype:
        return self.stored[name].dtype

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a tensor: a view of the file."""
        return self[name].narrow(0, start, count)

    def release(self, name: str, start: int, count: int) -> None:
        """Give the pages of rows that were read back to the system; they stay in its cache."""
        stored = self.stored[name]
        width = stored.nbytes // max(stored.shape[0], 1)
        release_pages(self._map(stored.file), stored.offset + start * width, count * width)

    def where(self, name: str) -> str:
        """For messages: the file and tensor."""
        return f"{self.stored[name].file}: tensor {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _scan(path: Path) -> dict[str, Stored]:
    if not path.is_dir():
        raise WeightsError(f"{path} is not a directory; expected a HF model directory with {SINGLE} or {INDEX}")
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise WeightsError(f"{path}: neither {INDEX} nor {SINGLE} found; only safetensors checkpoints are read")
        return read_header(path / SINGLE)
    where = _index(path / INDEX)
    found: dict[str, Stored] = {}
    for file in sorted(set(where.values())):
        if not (path / file).exists():
            raise WeightsError(f"{path / file} is missing, but {INDEX} names it; fetch it again")
        for name, stored in read_header(path / file).items():
            if where.get(name) != file:
                raise WeightsError(f"{path / file}: tensor {name}: {INDEX} places it in {where.get(name, 'no file')}")
            found[name] = stored
    for name, file in where.items():
        if name not in found:
            raise WeightsError(f"{path / file}: tensor {name} is missing, but {INDEX} says the file holds it")
    return found


def _index(file: Path) -> dict[str, str]:
    try:
        where = json.loads(file.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file}: damaged index ({error}); fetch it again") from None
    for name, target in where.items():
        if not isinstance(target, str) or Path(target).name != target:
            raise WeightsError(f"{file}: tensor {name}: {target!r} is not a file name in this directory")
    return where
