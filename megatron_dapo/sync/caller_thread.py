"""An executor whose calls run in the thread that waits for them.

A weight update is driven by the rollout thread, but producing a bucket is a collective of the training ranks and
allocates CUDA memory. Both belong in the main thread: gloo orders calls per thread, the current CUDA device belongs to
a thread, and torch crashed when one thread shared CUDA memory with another process while a second one allocated. So
the rollout thread submits these calls, and the main thread runs them while it waits for the update.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class CallerThread(Executor):
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """From any thread. The call runs in the next `run` that is not done."""
        future: Future[Any] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def wake(self, _: Any = None) -> None:
        """From any thread. `run` checks `until` again."""
        self._calls.put(None)

    def run(self, until: Callable[[], bool], timeout: float) -> bool:
        """Runs submitted calls until `until()` holds (True) or `timeout` seconds have passed (False)."""
        deadline = time.monotonic() + timeout
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                call = self._calls.get(timeout=left)
            except queue.Empty:
                return until()
            if call is not None:
                call()
        return True
