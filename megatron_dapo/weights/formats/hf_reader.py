"""Reads an HF safetensors directory through memory maps.

Headers, offsets and the index are checked (`megatron_dapo.files`) before the first tensor is returned; tensor data is
read on access.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import StoredTensor, read_safetensors_directory


def map_file(path: Path) -> mmap.mmap:
    """A private mapping: writing to a tensor over it by mistake does not change the file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def torch_dtype(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype


def tensor_over(buffer: mmap.mmap, stored: StoredTensor) -> Tensor:
    count, dtype = math.prod(stored.shape), torch_dtype(stored)
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=stored.offset).view(stored.shape)


def release_pages(buffer: mmap.mmap, offset: int, length: int) -> None:
    """Drop a range of a mapping from this process's memory; it stays in the page cache."""
    start = offset - offset % mmap.PAGESIZE
    if length:
        buffer.madvise(mmap.MADV_DONTNEED, start, offset + length - start)


class HFReader(Mapping[str, Tensor]):
    """A checked HF checkpoint: names to memory-mapped tensors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stored = read_safetensors_directory(self.path)
        self._maps: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return tensor_over(self._map(stored.file), stored)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(file)
        return self._maps[file]

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.stored[name])

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a tensor: a view of the file."""
        return self[name].narrow(0, start, count)

    def release(self, name: str, start: int, count: int) -> None:
        """Drop rows that were read from this process's memory; they stay in the page cache."""
        stored = self.stored[name]
        width = stored.nbytes // max(stored.shape[0], 1)
        release_pages(self._map(stored.file), stored.offset + start * width, count * width)

    def where(self, name: str) -> str:
        """The file and tensor, for messages."""
        return f"{self.stored[name].file}: tensor {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
