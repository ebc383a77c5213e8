"""Reads weight buckets while the event loop runs: each next bucket is produced and prepared in one worker thread.

Producing a bucket is a collective of the training ranks (a gather over tensor, pipeline and expert ranks), so the
reader always reads to the end, even when the receiver has failed: a rank that stops early leaves the others waiting.
One thread produces all buckets, because CUDA's current device and the order of gloo's calls belong to a thread, and
because torch cannot share CUDA memory between processes while a second thread allocates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from megatron_dapo.engines.protocol import Bucket


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
