"""Files of a checkpoint: written in parallel with a checksum, synced to disk, and checked before they are used.

`write_files` returns the size and CRC-32 of every file; `damaged_files` compares them with what is on disk. A CRC-32
finds every flipped bit and every damaged block of up to 32 bits, and other damage with probability 1 − 2⁻³². It is
computed on the bytes in memory while they are written, so it also covers the way to the disk. Writing, checksums and
reading release the GIL: one thread per file, next to a training loop.

A checkpoint that is written in the background needs a copy of everything that this rank writes (`HostBuffers`):
weights, fp32 weights and two moments, 14 bytes per parameter of a bf16 model, divided by what the layout splits (TP,
PP, and DP with the distributed optimizer). The memory is taken at the first save, registered with CUDA so that copies
run at the speed of the bus, and never returned: faulting in and pinning costs far more than copying.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from megatron_dapo import fault_points
from megatron_dapo.errors import CheckpointError
from megatron_dapo.files import explain

BLOCK = 16 << 20
THREADS = 4


class Cancelled(Exception):
    """The save was given up before this file was complete."""


@dataclass(slots=True)
class CheckpointFile:
    """A file before it is written: `parts` follow each other. Tensors must be contiguous; they may be on a GPU."""

    name: str  # relative to the checkpoint's directory
    parts: list[bytes | Tensor]

    @property
    def size(self) -> int:
        return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must contain: its size and the CRC-32 of its bytes."""

    bytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "crc32": f"{self.crc32:08x}"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        return cls(int(value["bytes"]), int(value["crc32"], 16))


def write_files(
    folder: Path,
    files: Sequence[CheckpointFile],
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, FileRecord]:
    """Writes and syncs all files below `folder`. After an error the others are given up, and it is raised as a
    CheckpointError that names the file and the space left. `cancelled` is asked before every block."""
    failed = threading.Event()

    def write(file: CheckpointFile) -> FileRecord:
        try:
            return _write(folder / file.name, file.parts, lambda: failed.is_set() or cancelled())
        except BaseException:
            failed.set()
            raise

    for parent in {(folder / file.name).parent for file in files}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="checkpoint") as pool:
        largest_first = sorted(files, key=lambda file: -file.size)
        pending = [(file, pool.submit(write, file)) for file in largest_first]
        errors = [error for _, future in pending if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error
        return {file.name: future.result() for file, future in pending}


def _write(path: Path, parts: Iterable[bytes | Tensor], cancelled: Callable[[], bool]) -> FileRecord:
    size, checksum = 0, 0
    try:
        fault_points.reach("checkpoint/write_file")
        with path.open("wb", buffering=0) as file:
            for part in parts:
                view = _bytes_of(part)
                for start in range(0, len(view), BLOCK):
                    if cancelled():
                        raise Cancelled(str(path))
                    block = view[start : start + BLOCK]
                    checksum = zlib.crc32(block, checksum)
                    _write_all(file, block)
                size += len(view)
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {explain(error, path)}") from error
    return FileRecord(size, checksum)


def _write_all(file: Any, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def _bytes_of(part: bytes | Tensor) -> memoryview:
    if isinstance(part, bytes):
        return memoryview(part)
    flat = part.detach().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def damaged_files(folder: Path, expected: Mapping[str, FileRecord]) -> list[str]:
    """Reads the files and returns one line for each that is missing, unreadable or not as it was written."""
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        largest_first = sorted(expected.items(), key=lambda item: -item[1].bytes)
        found = pool.map(lambda item: _damage(folder / item[0], item[1]), largest_first)
        return [line for line in found if line]


def _damage(path: Path, expected: FileRecord) -> str | None:
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            return f"{path} is not a file"
        if size != expected.bytes:
            return f"{path} has {size} bytes, {expected.bytes} were written"
        checksum, buffer = 0, bytearray(min(BLOCK, max(1, size)))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if checksum != expected.crc32:
        return f"{path} has CRC-32 {checksum:08x}, {expected.crc32:08x} was written: its contents have changed"
    return None


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
