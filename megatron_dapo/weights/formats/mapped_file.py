"""Weight files: mapped read-only for random access, or read into a buffer of the calling thread.

A read-only mapping needs no memory of its own: a file larger than the machine's memory can be mapped. Writing to a
tensor over it ends the process. Copying and comparing use buffers instead: faulting in a mapping page by page costs
three times the system time of reading it.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import (
    ITEM_SIZES,
    DamagedFile,
    StoredTensor,
)


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


class WeightFiles:
    """Maps, descriptors and buffers of a checkpoint's files."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._descriptors: dict[Path, int] = {}
        self._own = threading.local()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = map_file(file)
            return self._maps[file]

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor in a buffer that this thread's next call overwrites."""
        if getattr(self._own, "size", -1) < stored.nbytes:
            self._own.size = max(stored.nbytes, 1)
            self._own.buffer = mmap.mmap(-1, self._own.size)
        self.read_into(stored, 0, memoryview(self._own.buffer)[: stored.nbytes])
        dtype = torch_dtype(stored)
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.frombuffer(self._own.buffer, dtype=dtype, count=math.prod(stored.shape)).view(stored.shape)

    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None:
        """Bytes [skip, skip + len(view)) of the tensor."""
        descriptor, at = self._descriptor(stored.file), stored.offset + skip
        while view:
            count = os.preadv(descriptor, [view], at)
            if not count:
                raise DamagedFile(f"{stored.file}: ends inside tensor {stored.name}; it changed while it was read")
            view, at = view[count:], at + count

    def prefetch(self, file: Path, at: int, nbytes: int) -> None:
        """Ask the kernel to read bytes [at, at + nbytes) of the file from disk, without waiting."""
        os.posix_fadvise(self._descriptor(file), at, nbytes, os.POSIX_FADV_WILLNEED)


def rows_of(stored: StoredTensor, start: int, count: int) -> StoredTensor:
    """Rows [start, start + count) of a stored tensor."""
    width = math.prod(stored.shape[1:]) * ITEM_SIZES[stored.dtype]
    return replace(stored, shape=(count, *stored.shape[1:]), offset=stored.offset + start * width)
