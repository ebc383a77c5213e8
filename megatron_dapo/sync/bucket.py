"""A bucket of weights as one block of bytes: one collective or one IPC handle moves it, and SGLang splits it.

The tensors are views of the block, one after the other and without gaps. Large elements come first, so every tensor
starts at a multiple of its element size. SGLang calls this format `flattened_bucket`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor

from megatron_dapo.engines.protocol import Bucket


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Name, type and shape of one tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(slots=True, frozen=True, eq=False)
class FlatBucket(Sequence[tuple[str, Tensor]]):
    """(name, tensor) pairs whose tensors are views of `flat`: [bytes], uint8. `receivers`: as of a `RemoteBucket`.
    `readers`: the ends of copies from this block that have been started (see `wait_for_readers`)."""

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    views: tuple[Tensor, ...]
    receivers: tuple[int, ...] = ()
    readers: list[torch.cuda.Event] = field(default_factory=list)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Tensor] | Sequence[tuple[str, Tensor]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.specs[index].name, self.views[index]

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter([(spec.name, view) for spec, view in zip(self.specs, self.views, strict=True)])


@dataclass(slots=True, frozen=True, eq=False)
class RemoteBucket(Sequence[tuple[str, Tensor]]):
    """A bucket whose tensors are on other ranks: `owner` broadcasts it, or `receivers` hand it to their engines. As a
    sequence it is empty."""

    owner: int
    receivers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    @overload
    def __getitem__(self, index: int) -> tuple[str, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Tensor] | Sequence[tuple[str, Tensor]]:
        empty: list[tuple[str, Tensor]] = []
        return empty[index]

    def __len__(self) -> int:
        return 0


def specs_of(bucket: Bucket) -> tuple[TensorSpec, ...]:
    """The tensors of any bucket, also of one that is elsewhere."""
    if isinstance(bucket, FlatBucket | RemoteBucket):
        return bucket.specs
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)


def in_flat_order(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The order of the tensors in the block."""
    return tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))


def flat_size(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.bytes for spec in specs)


def flat_starts(specs: Sequence[TensorSpec]) -> list[int]:
    """The first byte of each tensor, and the end of the last."""
    return list(accumulate((spec.bytes for spec in specs), initial=0))


def bucket_in(
    memory: Tensor,
    specs: Sequence[TensorSpec],
    receivers: tuple[int, ...] = (),
    readers: list[torch.cuda.Event] | None = None,
) -> FlatBucket:
    """A bucket at the start of `memory` (uint8). `specs` are in flat order. Buckets in the same memory share
    `readers`."""
    starts = flat_starts(specs)
    flat = memory[: starts[-1]]
    views = (
        flat[start : start + spec.bytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(starts, specs, strict=False)  # the last start is the end
    )
    return FlatBucket(flat, tuple(specs), tuple(views), receivers, [] if readers is None else readers)


def wait_for_readers(bucket: FlatBucket) -> None:
    """What is launched on the current stream from now on runs after the copies from this block."""
    while bucket.readers:
        torch.cuda.current_stream(bucket.flat.device).wait_event(bucket.readers.pop())


def flatten(bucket: Bucket) -> FlatBucket:
    """The bucket itself if it is flat already, otherwise a flat copy on the same device."""
    if isinstance(bucket, FlatBucket):
        return bucket
    specs, tensors = in_flat_order(specs_of(bucket)), dict(bucket)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    copy = bucket_in(torch.empty(flat_size(specs), dtype=torch.uint8, device=device), specs)
    for name, view in copy:
        view.copy_(tensors[name].detach())
    return copy


# Reads weight buckets while the event loop runs: each next bucket is produced and prepared in one worker thread.


class BucketReader:
    """`async for bucket, prepared in reader`; the bucket after the current one is already being produced. `prepared` is
    the result of `prepare(bucket)`; `release` gets it, in the same thread, when the next bucket is requested."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        prepare: Callable[[Bucket], Any] = lambda bucket: None,
        release: Callable[[Any], None] = lambda prepared: None,
        executor: Executor | None = None,
    ) -> None:
        """`executor` runs calls one after the other in one thread (default: a new thread)."""
        self._buckets, self._prepare, self._release = buckets, prepare, release
        self._in_use: list[Any] = []  # `prepared` of the current bucket
        self._own_thread = None if executor else ThreadPoolExecutor(1, thread_name_prefix="weight-buckets")
        self._thread: Executor | None = executor or self._own_thread
        self._iterator: Iterator[Bucket] | None = None
        self._next: asyncio.Future[tuple[Bucket, Any] | None] | None = None

    async def __aenter__(self) -> BucketReader:
        self._request()
        return self

    def __aiter__(self) -> BucketReader:
        return self

    async def __anext__(self) -> tuple[Bucket, Any]:
        await self._release_current()
        if self._next is None:
            raise StopAsyncIteration
        waiting, self._next = self._next, None
        produced = await waiting
        if produced is None:
            raise StopAsyncIteration
        self._in_use = [produced[1]]
        self._request()
        return produced

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                async for _ in self:
                    pass
        except Exception:
            if error is None:
                raise
        finally:
            await self._release_current()
            if self._own_thread is not None:
                self._own_thread.shutdown(wait=False)

    async def _release_current(self) -> None:
        while self._in_use:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._release, self._in_use.pop())

    def _request(self) -> None:
        self._next = asyncio.get_running_loop().run_in_executor(self._thread, self._produce)

    def _produce(self) -> tuple[Bucket, Any] | None:
        if self._iterator is None:
            self._iterator = iter(self._buckets)
        bucket = next(self._iterator, None)
        return None if bucket is None else (bucket, self._prepare(bucket))
