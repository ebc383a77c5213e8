"""A process that runs the generate calls of some servers (`client_worker`), as rank 0 sees it.

`generate` does what `GenerateCall.send` does, with the same result and the same errors. Retries, the choice of a
server, aborts and all control calls stay with the caller.

- Cancelling `generate` cancels the request in the process, which closes its connection to the server.
- If the process ends, every call that it runs fails with a `ServerFailure`, which the engine answers with another try;
  the next call starts a new process.
- A call has the time limit that its server has, from the moment when the process is ready. If the process has not
  replied GRACE seconds after that and has sent nothing else meanwhile, it hangs and is killed.
- The process ends when it is closed here and when this process dies.

One process parses about 2.5 M tokens/s, so the fleet gives one to every 16 servers. Routed experts are forty times the
bytes (40 ms for 4500 tokens of a 30B-A3B), so with them it has two servers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.client_worker import decode_completion, encode_call
from megatron_dapo.engines.sglang.http import ServerFailure
from megatron_dapo.engines.sglang.response_parser import GenerateCall
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.frames import Frame
from megatron_dapo.processes.worker_process import ProcessEnded, WorkerProcess

log = logging.getLogger(__name__)

SERVERS_PER_PROCESS, WITH_ROUTED_EXPERTS = 16, 2
GRACE = 60.0
START_SECONDS = 120.0
COMMAND = [sys.executable, "-m", "megatron_dapo.engines.sglang.client_worker"]


class ClientProcess:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._pong: asyncio.Future[Frame] | None = None  # done when the process that was started last is ready
        self._starting = asyncio.Lock()
        self._reported: WorkerProcess | None = None  # the last one whose end was logged
        self._closed = False

    @property
    def pid(self) -> int | None:
        """None while no process is ready."""
        if self._worker is None or self._worker.ended or self._pong is None or not self._pong.done():
            return None
        return int(self._pong.result()[0]["pid"])

    async def start(self) -> None:
        """Returns before the process is ready; `ready` waits for that. Does nothing if it runs."""
        async with self._starting:
            if self._closed:
                raise EngineError("the client process has been closed")
            if self._worker is None or self._worker.ended:
                try:
                    self._worker = await WorkerProcess.start(COMMAND)
                except OSError as error:
                    raise ServerFailure(f"cannot start a client process: {error}") from error
                _, (self._pong,) = self._worker.send({})

    async def ready(self) -> None:
        """Raises EngineError if it cannot start."""
        try:
            await self._started()
        except ServerFailure as error:
            raise EngineError(f"cannot send requests to the servers: {error}; its output is on stderr") from error

    async def _started(self) -> WorkerProcess:
        if self._worker is None or self._worker.ended:
            await self.start()
        worker, pong = self._worker, self._pong
        assert worker is not None and pong is not None
        if not pong.done() or pong.exception() is not None:
            try:
                async with asyncio.timeout(START_SECONDS):
                    await asyncio.shield(pong)
            except TimeoutError:
                await worker.end()
                raise ServerFailure(f"the client process was not ready within {START_SECONDS:g} s") from None
            except ProcessEnded as end:
                raise self._failure(worker, end) from None
        return worker

    async def generate(self, call: GenerateCall) -> Completion:
        worker = await self._started()
        number, (reply,) = worker.send(*encode_call(call))
        try:
            async with asyncio.timeout(call.seconds + GRACE):
                header, parts = await reply
        except ProcessEnded as end:
            raise self._failure(worker, end) from None
        except BaseException as error:
            worker.cancel(number)
            if not isinstance(error, TimeoutError):
                raise
            if time.monotonic() - worker.last_reply > GRACE:
                await worker.end()
            raise ServerFailure(f"client process: no reply within {call.seconds + GRACE:g} s") from None
        return decode_completion(header, parts)

    def _failure(self, worker: WorkerProcess, end: ProcessEnded) -> ServerFailure:
        if not self._closed and worker is not self._reported:
            self._reported = worker
            log.warning("the client process %s; its requests are sent again", end)
        return ServerFailure(f"the client process {end}")

    async def close(self) -> None:
        """Ends the process. Calls that still run fail."""
        self._closed = True
        async with self._starting:
            if self._worker is not None:
                await self._worker.end()
