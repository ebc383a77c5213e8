"""Host memory for copies of device tensors, kept from one checkpoint to the next.

A checkpoint that is written in the background needs a copy of everything that this rank writes: weights, fp32 weights
and two moments, 14 bytes per parameter of a bf16 model, divided by what the layout splits (TP, PP, and DP with the
distributed optimizer). The memory is taken at the first save, registered with CUDA so that copies run at the speed of
the bus, and never returned: faulting in and pinning costs far more than copying. `available_host_memory` says whether
there is room.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor

CHUNK = 1 << 30
SMALL_CHUNK = 64 << 20
ALIGN = 64
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class HostBuffers:
    """Copies of tensors in a few large blocks. `reset` makes all of the memory available again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def held(self) -> int:
        """Bytes of host memory taken so far."""
        return sum(chunk.numel() for chunk in self._chunks)

    def missing(self, sizes: Iterable[int]) -> int:
        """Bytes that `reserve` would take for copies of these sizes."""
        return 0 if self._chunks else sum(_chunk_sizes(sizes))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Takes the memory for copies of these sizes at once, in parallel, unless some is held already."""
        if not self._chunks:
            with ThreadPoolExecutor(max_workers=8) as pool:
                self._add(pool.map(self._new_chunk, _chunk_sizes(sizes)))

    def reset(self) -> None:
        self._used = [0] * len(self._chunks)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in host memory. On CUDA it is complete after `synchronize`."""
        source = tensor.detach()
        host = self._take(source.numel() * source.element_size()).view(source.dtype).view(source.shape)
        return host.copy_(source, non_blocking=True)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of our copies, or a view of one."""
        storage = tensor.untyped_storage().data_ptr()
        return any(chunk.data_ptr() == storage for chunk in self._chunks)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _take(self, size: int) -> Tensor:
        for index, chunk in enumerate(self._chunks):
            start = self._used[index]
            if start + size <= chunk.numel():
                self._used[index] = start + -(-size // ALIGN) * ALIGN
                return chunk[start : start + size]
        self._add([self._new_chunk(max(SMALL_CHUNK, size))])
        return self._take(size)

    def _add(self, chunks: Iterable[Tensor]) -> None:
        new = list(chunks)
        self._chunks += new
        self._used += [0] * len(new)

    def _new_chunk(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # One page fault per 2 MiB instead of per 4 KiB; and no copy of pinned memory for a forked process.
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    memory.madvise(getattr(mmap, advice))
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            chunk[:: mmap.PAGESIZE] = 0
            # Without registration (it may be limited) copies are slower, and correct.
            torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), size, 0)
        return chunk


def _chunk_sizes(sizes: Iterable[int]) -> list[int]:
    """Chunks that hold copies of these sizes, each in one piece, taken in this order."""
    used: list[int] = []
    for size in sizes:
        aligned = -(-size // ALIGN) * ALIGN
        fitting = next((index for index, taken in enumerate(used) if taken + size <= CHUNK), None)
        if fitting is None:
            used.append(aligned)
        else:
            used[fitting] += aligned
    return [max(CHUNK, taken) for taken in used[:-1]] + [max(SMALL_CHUNK, taken) for taken in used[-1:]]


def available_host_memory() -> int:
    """Bytes that this process may still take: free on the machine, and within the limits of its control groups."""
    free = [psutil.virtual_memory().available, *_left_in_cgroups()]
    return max(0, min(free))


def _left_in_cgroups() -> list[int]:
    """What each enclosing control group (version 2) still allows. Its page cache can be reclaimed."""
    try:
        names = [line.split("::", 1)[1] for line in MEMBERSHIP.read_text().splitlines() if "::" in line]
    except OSError:
        return []
    left = []
    for name in names:
        group = CGROUPS / name.strip("/")
        while True:
            left += _left(group)
            if group in (CGROUPS, group.parent):
                break
            group = group.parent
    return left


def _left(group: Path) -> list[int]:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return []
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return []
    return [int(limit) - used]
