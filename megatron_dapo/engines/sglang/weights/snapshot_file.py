"""One bucket as a safetensors file: mapped and filled in place, or copied to host memory and written later.

Tensors are copied by a few threads. On a GPU the memory is pinned once, where it is used again, so that later copies
run at the speed of the bus.
"""

from __future__ import annotations

import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.engines.flat_bucket import FlatBucket, flat_size
from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.files import safetensors_header

log = logging.getLogger(__name__)

WRITERS = 8


class _FileImage:
    """The bytes of a file in memory: a header, then the tensors, large elements first so that each one starts at a
    multiple of its element size."""

    def __init__(self, bucket: Bucket) -> None:
        ordered = _ordered(bucket)
        self._layout = _layout(ordered)
        self.head = safetensors_header(self._layout)
        *self._starts, self.size = accumulate((bucket_bytes([pair]) for pair in ordered), initial=len(self.head))
        self._memory: Any = None  # holds `size` bytes
        self._pinned: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # the end of the copy that `fill` has started

    def fits(self, bucket: Bucket) -> bool:
        """Whether the bucket has the tensors that this file was made for."""
        return self._layout == _layout(_ordered(bucket))

    def pin(self, device: torch.device) -> None:
        if device.type != "cuda" or self._pinned is not None:
            return
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if int(status) == 0:
            self._pinned = whole
        else:
            log.warning(
                "host memory for a weight snapshot cannot be pinned (CUDA error %d): copies will be slow", status
            )

    def unpin(self) -> None:
        self.wait()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None

    def fill(self, bucket: Bucket) -> None:
        """Pinned memory and a flat bucket: starts the copy, and adds its end to the bucket's `readers`."""
        if isinstance(bucket, FlatBucket) and bucket.flat.nbytes and self._pinned is not None:
            self._fill_at_once(bucket)
            return

        def copy(start: int, tensor: Tensor) -> None:
            if tensor.numel():
                target = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                if self._pinned is None and tensor.is_cuda:
                    # Touch every page first, in all threads; in a copy CUDA's driver would fault them in one by one.
                    target[:: mmap.PAGESIZE // target.element_size()].zero_()
                target.view(tensor.shape).copy_(tensor.detach())

        with ThreadPoolExecutor(WRITERS) as pool:
            pairs = zip(self._starts, _ordered(bucket), strict=True)
            for done in [pool.submit(copy, start, tensor) for start, (_, tensor) in pairs]:
                done.result()

    def _fill_at_once(self, bucket: FlatBucket) -> None:
        """One copy, on a stream of its own: the engines read the bucket at the same time, and need not wait for it."""
        assert flat_size(bucket.specs) == self.size - len(self.head)
        target = torch.frombuffer(self._memory, dtype=torch.uint8, count=bucket.flat.nbytes, offset=len(self.head))
        stream = torch.cuda.Stream(bucket.flat.device)
        stream.wait_stream(torch.cuda.current_stream(bucket.flat.device))
        with torch.cuda.stream(stream):
            target.copy_(bucket.flat, non_blocking=True)
        bucket.flat.record_stream(stream)  # the memory may be freed before the copy has ended
        self._copied = stream.record_event()
        bucket.readers.append(self._copied)

    def wait(self) -> None:
        """Until the copy has ended that `fill` started."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


class MappedFile(_FileImage):
    """A file of the right size, mapped into memory. `keep`: it is filled again, so it is pinned."""

    def __init__(self, path: Path, bucket: Bucket, *, keep: bool = False) -> None:
        super().__init__(bucket)
        with path.open("wb+") as file:
            # Reserved now: a full disk is then an error here, and not a SIGBUS in the middle of a copy.
            os.posix_fallocate(file.fileno(), 0, self.size)
            self._memory = mmap.mmap(file.fileno(), self.size)
        self._memory[: len(self.head)] = self.head
        if keep and len(bucket):
            self.pin(bucket[0][1].device)

    def close(self) -> None:
        self.unpin()
        self._memory = None


class HostCopy(_FileImage):
    """The same bytes in host memory."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._memory = mmap.mmap(-1, self.size)
        self._memory[: len(self.head)] = self.head
        if len(bucket):
            self.pin(bucket[0][1].device)

    def write(self, path: Path) -> None:
        self.wait()
        with path.open("wb") as file:
            file.write(self._memory)

    def __del__(self) -> None:
        self.unpin()


def write_safetensors(path: Path, bucket: Bucket) -> None:
    """Writes the bucket's tensors, on any device, into one file."""
    MappedFile(path, bucket).fill(bucket)


def _ordered(bucket: Bucket) -> Bucket:
    return sorted(bucket, key=lambda pair: -pair[1].element_size())


def _layout(bucket: Bucket) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]


def bucket_bytes(bucket: Bucket) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
