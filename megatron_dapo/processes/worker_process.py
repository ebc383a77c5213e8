"""A worker process as an event loop sees it: a Python program under a supervisor, with a socket for frames.

Every request has a number, and so has its reply. If the process ends, all requests that wait fail with `ProcessEnded`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from megatron_dapo.processes.frames import Frame, FrameBuffer, Header, encode
from megatron_dapo.processes.supervised import SupervisedProcess, start_worker

EXIT_SECONDS = 5.0  # after the end of its socket; a process that closed the socket and runs on is killed then


class ProcessEnded(Exception):
    """`code`: its exit code, or minus the signal that ended it."""

    def __init__(self, status: str, code: int) -> None:
        super().__init__(f"ended with {status}")
        self.code = code


def worker_environment() -> dict[str, str]:
    """One thread, no GPU, and the modules that this process can import."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


class WorkerProcess(asyncio.BufferedProtocol):
    """Belongs to one event loop."""

    def __init__(self, process: SupervisedProcess) -> None:
        self._process = process
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = FrameBuffer()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._next = 0
        self._ending: asyncio.Task[None] | None = None
        self.last_reply = time.monotonic()

    @classmethod
    async def start(cls, command: Sequence[str]) -> WorkerProcess:
        """A new interpreter: no fork of a process with threads and GPUs. Raises OSError if it cannot start."""
        process, connection = start_worker(command, worker_environment())
        loop = asyncio.get_running_loop()
        try:
            return (await loop.create_unix_connection(lambda: cls(process), sock=connection))[1]
        except BaseException:
            connection.close()
            await process.end()
            raise

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def send(self, header: Header, *parts: Any, replies: int = 1) -> tuple[int, list[asyncio.Future[Frame]]]:
        """The number of the request, and the futures of its replies: `number`, `number` + 1, …"""
        first, loop = self._next, asyncio.get_running_loop()
        self._next += replies
        futures = {first + index: loop.create_future() for index in range(replies)}
        self._waiting |= futures
        if self._ending is not None and self._ending.done():
            self._fail()
        self._write({"number": first, **header}, *parts)
        return first, list(futures.values())

    def _write(self, header: Header, *parts: Any) -> None:
        if self._transport is not None:
            self._transport.write(encode(header, *parts))

    def cancel(self, number: int) -> None:
        """Nobody waits for this reply any more; the worker is told."""
        if self._waiting.pop(number, None) is not None:
            self._write({"number": number, "cancel": True})

    async def end(self, patience: float = 0.0) -> None:
        """Closes the socket, which tells a worker that waits to exit; kills it after `patience` seconds."""
        if self._transport is not None:
            self._transport.abort()
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(patience))
        elif not patience:
            await self._process.end()
        await asyncio.shield(self._ending)

    async def _end(self, patience: float) -> None:
        await self._process.end(patience)
        self._fail()

    def _fail(self) -> None:
        waiting, self._waiting = self._waiting, {}
        error = ProcessEnded(self._process.status, self._process.code or 0)
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may wait for it any more

    # ---- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.room()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_reply = time.monotonic()
        for header, parts in self._buffer.received(nbytes):
            future = self._waiting.pop(header["number"], None)
            if future is not None and not future.done():  # else cancelled meanwhile
                future.set_result((header, parts))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(EXIT_SECONDS))
