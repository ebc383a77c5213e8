"""Buckets of weights on their way from the thread that produces them to the engine that sends them.

Producing a bucket is a collective of the training ranks and allocates CUDA memory. Both belong in the trainer's main
thread: gloo orders calls per thread, the current CUDA device belongs to a thread, and torch crashed when one thread
shared CUDA memory with another process while a second one allocated. So the main thread produces, prepares and frees
the buckets (`fill`), and the engine reads them in its event loop (`open`). They talk through two queues.

- Every bucket is produced, whatever the engine does: the other ranks take part in producing it.
- At most two buckets exist, the one that the engine reads and the next. The memory of a bucket is freed or used again
  only after the engine has asked for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from enum import Enum, auto
from types import TracebackType
from typing import Any

from megatron_dapo.sync.bucket import Bucket, RemoteBucket
from megatron_dapo.sync.remote_sender import SenderLink


class _Event(Enum):
    """What the engine tells the producer."""

    OPENED = auto()
    RETURNED = auto()  # the bucket that it had
    CLOSED = auto()  # it reads no more


class BucketStream:
    """For one update. `async for bucket, prepared in stream.open(...)`; `prepared` is the result of `prepare`."""

    def __init__(self, link: SenderLink | None = None) -> None:
        """`link`: to the other ranks that send in this update."""
        self.link = link
        self.opened: Future[None] = Future()  # done when the engine reads, or when it is known that it will not
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._prepare: Callable[[Any], Any] = lambda bucket: None
        self._release: Callable[[Any], None] = lambda prepared: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Queue[tuple[Bucket, Any] | Exception | None]  # None: the end
        self._thread: threading.Thread | None = None
        # The producer's
        self._in_use: deque[Any] = deque()  # what was prepared, oldest first
        self._opened = False
        self._closed = False
        self._failed = False
        self._exhausted = False
        # The engine's
        self._has_bucket = False
        self._at_end = False

    @classmethod
    def of(cls, buckets: Iterable[Bucket] | BucketStream) -> BucketStream:
        """The stream itself, or a new one that a thread fills."""
        if isinstance(buckets, BucketStream):
            return buckets
        stream = cls()
        stream._thread = threading.Thread(target=stream.fill, args=(buckets,), name="weight-buckets", daemon=True)
        stream._thread.start()
        return stream

    # ---- the thread that produces ----

    def fill(self, buckets: Iterable[Bucket]) -> None:
        """Produces every bucket, from when the engine has opened the stream. An error of theirs is the engine's, if it
        still reads."""
        self._handle_events(until=lambda: self._opened)
        iterator = iter(buckets)
        try:
            while True:
                self._handle_events(until=lambda: len(self._in_use) < 2)
                bucket = next(iterator, None)
                if bucket is None:
                    break
                self._hand_over(bucket)
        except Exception as error:
            if self._closed:
                raise
            self._send(error)
        self._exhausted = True
        self._send(None)
        self._handle_events(until=lambda: not self._in_use)

    def _hand_over(self, bucket: Bucket) -> None:
        if self._closed or self._failed:
            return
        try:
            prepared = None if isinstance(bucket, RemoteBucket) else self._prepare(bucket)
        except Exception as error:
            self._failed = True
            self._send(error)
            return
        self._in_use.append(prepared)
        self._send((bucket, prepared))

    def _send(self, found: tuple[Bucket, Any] | Exception | None) -> None:
        if self._loop is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, found)

    def _handle_events(self, until: Callable[[], bool]) -> None:
        """Waits until this holds or the engine reads no more."""
        while not (self._closed or until()):
            event = self._events.get()
            if event is _Event.OPENED:
                self._opened = True
            elif event is _Event.RETURNED:
                self._release(self._in_use.popleft())
            else:
                self._closed = True
                if self.link is not None and not self._exhausted:
                    self.link.fail("the engines' update has ended")
        while self._closed and self._in_use:
            self._release(self._in_use.popleft())

    # ---- the engine ----

    def open(
        self,
        prepare: Callable[[Any], Any] = lambda bucket: None,
        release: Callable[[Any], None] = lambda prepared: None,
    ) -> BucketStream:
        """`prepare` and `release` run in the producing thread, for every bucket that is not elsewhere."""
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Queue()
        self._prepare = prepare
        self._release = lambda prepared: None if prepared is None else release(prepared)
        self._tell(_Event.OPENED)
        return self

    def close(self, _: object = None) -> None:
        """From any thread, also as the callback of a future: nobody reads any more."""
        self._tell(_Event.CLOSED)

    def _tell(self, event: _Event) -> None:
        self._events.put(event)
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            self.opened.set_result(None)

    async def __aenter__(self) -> BucketStream:
        return self

    def __aiter__(self) -> BucketStream:
        return self

    async def __anext__(self) -> tuple[Bucket, Any]:
        if self._has_bucket:
            self._has_bucket = False
            self._events.put(_Event.RETURNED)
        if self._at_end:
            raise StopAsyncIteration
        found = await self._arrived.get()
        if isinstance(found, tuple):
            self._has_bucket = True
            return found
        self._at_end = True
        if found is None:
            raise StopAsyncIteration
        raise found

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reads to the end also after an error: when this returns, all buckets have been produced."""
        ended = kind is None or issubclass(kind, Exception)
        try:
            if ended:
                async for _ in self:
                    pass
        except Exception:
            if error is None:
                raise
        finally:
            self.close()
            if ended and self._thread is not None:
                await asyncio.to_thread(self._thread.join)
