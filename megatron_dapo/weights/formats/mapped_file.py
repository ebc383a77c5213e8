"""Files mapped read-only, and tensors over them.

A read-only mapping needs no memory of its own: a file larger than the machine's memory can be mapped. Writing to a
tensor over it ends the process.
"""

from __future__ import annotations

import math
import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import StoredTensor

warnings.filterwarnings("ignore", message="The given buffer is not writable")


def map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


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


def prefetch_pages(buffer: mmap.mmap, offset: int, length: int) -> None:
    """Ask the kernel to read a range from disk, without waiting."""
    start = offset - offset % mmap.PAGESIZE
    if length:
        buffer.madvise(mmap.MADV_WILLNEED, start, offset + length - start)
