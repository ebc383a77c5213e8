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
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.client_messages import (
    FrameReader,
    decode_reply,
    encode_call,
    encode_cancellation,
    encode_ping,
)
from megatron_dapo.engines.sglang.http import ServerFailure
from megatron_dapo.engines.sglang.response_parser import GenerateCall
from megatron_dapo.errors import EngineError

log = logging.getLogger(__name__)

SERVERS_PER_PROCESS, WITH_ROUTED_EXPERTS = 16, 2
GRACE = 60.0
START_SECONDS = 120.0
_COMMAND = [sys.executable, "-m", "megatron_dapo.engines.sglang.client_worker"]


class ClientProcess:
    """Belongs to one event loop. `pid` is None while no process runs."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._starting = asyncio.Lock()
        self._ready: asyncio.Future[Any] | None = None  # done when the process that was started last is ready
        self._last_reply = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Returns before the process is ready; `ready` waits for that. Does nothing if it runs."""
        await self._start()

    async def _start(self) -> asyncio.WriteTransport:
        async with self._starting:
            if self._transport is not None:
                return self._transport
            if self._closed:
                raise EngineError("the client process has been closed")
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._process = _spawn(theirs.fileno())
                transport, _ = await asyncio.get_running_loop().create_unix_connection(
                    lambda: FrameReader(self._received, self._lost), sock=ours
                )
            except BaseException as error:
                ours.close()  # ends the process, if there is one
                self._process = None
                if isinstance(error, OSError):
                    raise ServerFailure(f"cannot start a client process: {error}") from error
                raise
            if self._process is None:  # lost meanwhile
                raise ServerFailure("the client process ended at once")
            self._transport, self._ready = transport, self._send(transport, encode_ping)[1]
            return transport

    async def ready(self) -> None:
        """Raises EngineError if it cannot start."""
        try:
            await self._started()
        except ServerFailure as error:
            raise EngineError(f"cannot send requests to the servers: {error}; its output is on stderr") from error

    async def _started(self) -> asyncio.WriteTransport:
        transport, ready = self._transport or await self._start(), self._ready
        assert ready is not None
        if ready.done():
            return transport
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(ready)
        except TimeoutError:
            if ready is self._ready:
                self._kill()
            raise ServerFailure(f"the client process was not ready within {START_SECONDS:g} s") from None
        if self._transport is None:
            raise ServerFailure("the client process ended")
        return self._transport

    async def generate(self, call: GenerateCall) -> Completion:
        number, reply = self._send(await self._started(), lambda number: encode_call(number, call))
        try:
            async with asyncio.timeout(call.seconds + GRACE):
                completion: Completion = await reply
                return completion
        except TimeoutError:
            self._cancel(number)
            if time.monotonic() - self._last_reply > GRACE:
                self._kill()
            raise ServerFailure(f"client process: no reply within {call.seconds + GRACE:g} s") from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(
        self, transport: asyncio.WriteTransport, encode: Callable[[int], bytes]
    ) -> tuple[int, asyncio.Future[Any]]:
        """The number of the message, and the future of its reply."""
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        transport.write(encode(number))
        return number, reply

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _cancel(self, number: int) -> None:
        if self._transport is not None:
            self._transport.write(encode_cancellation(number))

    def _received(self, header: bytes, body: memoryview) -> None:
        self._last_reply = time.monotonic()
        decoded = orjson.loads(header)
        reply = self._waiting.pop(decoded["number"], None)
        if reply is None or reply.done():
            return  # cancelled meanwhile
        result = decode_reply(decoded, body)
        if isinstance(result, BaseException):
            reply.set_exception(result)
        else:
            reply.set_result(result)

    def _lost(self) -> None:
        """The process has ended, or its socket broke."""
        process, self._process, self._transport = self._process, None, None
        if process is None:  # its start was cancelled
            return
        process.kill()  # it holds nothing that is worth waiting for
        code = process.wait()
        waiting, self._waiting = self._waiting, {}
        cause = f"the client process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        if not self._closed:
            log.warning("%s; %d requests are sent again", cause, len(waiting))
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(ServerFailure(cause))
                reply.exception()  # nobody may wait for the ping

    async def close(self) -> None:
        """Ends the process. Calls that still run fail."""
        self._closed = True
        async with self._starting:
            if self._transport is not None:
                self._transport.abort()
        while self._process is not None:
            await asyncio.sleep(0.002)


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [*_COMMAND, str(os.getpid()), str(descriptor)]
    return subprocess.Popen(
        command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
