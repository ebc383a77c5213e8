"""Reading weight buckets while the event loop runs: each next bucket is made in one worker thread.

Making a bucket is a collective of the training ranks (a gather over tensor, pipeline and expert ranks), so the reader
always reads to the end, even when the receiver has failed: a rank that stops early leaves the others waiting. One
thread makes all buckets, because CUDA's current device and gloo's order of calls belong to a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from megatron_dapo.rollout.engine import Bucket


class BucketReader:
    """`async for bucket in reader`; the bucket after the current one is already being made."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = buckets
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-buckets")
        self._iterator: Iterator[Bucket] | None = None
        self._next: asyncio.Future[Bucket | None] | None = None

    async def __aenter__(self) -> BucketReader:
        self._request()
        return self

    def __aiter__(self) -> BucketReader:
        return self

    async def __anext__(self) -> Bucket:
        if self._next is None:
            raise StopAsyncIteration
        waiting, self._next = self._next, None
        bucket = await waiting
        if bucket is None:
            raise StopAsyncIteration
        self._request()
        return bucket

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
            self._thread.shutdown(wait=False)

    def _request(self) -> None:
        self._next = asyncio.get_running_loop().run_in_executor(self._thread, self._make)

    def _make(self) -> Bucket | None:
        if self._iterator is None:
            self._iterator = iter(self._buckets)
        return next(self._iterator, None)
