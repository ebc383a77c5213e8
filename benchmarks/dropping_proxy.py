"""An SGLang server behind a TCP proxy that resets connections: the `python` of the servers in benchmarks/soak.py.

    python dropping_proxy.py --python PYTHON --log FILE --drop-rate 0.02 -- -m sglang.launch_server ... --port N

Starts the command after `--` with PYTHON on a free port and listens on the port that the command names, once the server
accepts connections. The client therefore sees one server that is slow, restarts, and loses connections. The proxy ends
when the server ends, and the server ends when the proxy ends.

A dropped call is reset at one of three moments: before the server has seen the request, after the server has done the
work but before the reply, or in the middle of the reply. Connections that the server closes when idle are closed
towards the client at the same time. Every call is one JSON line in FILE.

Uses the standard library only: it runs with the environment of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Coroutine
from typing import Any

PR_SET_PDEATHSIG = 1
BUFFER = 1 << 16
MOMENTS = ("request", "work done", "reply")  # when a dropped call is reset


class Stream(asyncio.StreamReader):
    """A reader whose end can be awaited without reading."""

    def __init__(self) -> None:
        super().__init__(limit=BUFFER)
        self.closed = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.closed.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.closed.set()


class Proxy:
    def __init__(self, host: str, server_port: int, log: str, drop_rate: float, seed: str) -> None:
        self._host, self._server_port, self._drop_rate = host, server_port, drop_rate
        self._log = open(log, "a", buffering=1)  # noqa: SIM115  (open until the process is killed)
        self._random = random.Random(seed)
        self._dropped_before: set[str] = set()  # paths whose last call was dropped

    async def listen(self, port: int) -> None:
        def accept() -> asyncio.StreamReaderProtocol:
            client = Stream()
            return asyncio.StreamReaderProtocol(client, lambda _, reply: self._serve(client, reply))

        await asyncio.get_running_loop().create_server(accept, self._host, port)

    async def _serve(self, client: Stream, reply: asyncio.StreamWriter) -> None:
        server = Stream()
        protocol = asyncio.StreamReaderProtocol(server)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: protocol, self._host, self._server_port)
        except OSError:
            reply.close()
            return
        request = asyncio.StreamWriter(transport, protocol, server, loop)
        try:
            while (head := await _unless_closed(client.readuntil(b"\r\n\r\n"), server)) is not None:
                if not await self._call(head, client, reply, server, request):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            reply.close()
            request.close()

    async def _call(
        self, head: bytes, client: Stream, reply: asyncio.StreamWriter, server: Stream,
        request: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        """Forwards one request and its reply. False: the connection cannot be used any more."""
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await client.readexactly(int(length[1])) if length else b""
        moment = self._record(head, body)
        if moment == "request":
            return _reset(reply)
        request.write(head + body)
        # A client that gives up closes the connection; the server must see that.
        answer = await _unless_closed(server.readuntil(b"\r\n\r\n"), client)
        if answer is None or moment == "work done":
            return _reset(reply)
        size = re.search(rb"(?i)\r\ncontent-length: *(\d+)", answer)
        if size is None:  # nothing that the trainer calls streams its reply
            raise ConnectionError("the reply has no length")
        content = await _unless_closed(server.readexactly(int(size[1])), client)
        if content is None:
            return False
        if moment == "reply":
            reply.write(answer + content[: len(content) // 2])
            await reply.drain()
            return _reset(reply)
        reply.write(answer + content)
        await reply.drain()
        return b"connection: close" not in answer.lower()

    def _record(self, head: bytes, body: bytes) -> str | None:
        path = head.split(b" ", 2)[1].decode()
        retry = path in self._dropped_before or re.search(rb'"rid":"[^"]*-try\d', body) is not None
        moment = self._random.choice(MOMENTS) if self._random.random() < self._drop_rate else None
        (self._dropped_before.add if moment else self._dropped_before.discard)(path)
        line = {"time": time.time(), "path": path, "dropped": moment, "retry": retry}
        self._log.write(json.dumps(line) + "\n")
        return moment


async def _unless_closed(wanted: Coroutine[Any, Any, bytes], other: Stream) -> bytes | None:
    """What `wanted` reads, or None if the other side closes its connection first."""
    reading, closing = asyncio.ensure_future(wanted), asyncio.ensure_future(other.closed.wait())
    try:
        await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        return await reading if reading.done() else None
    finally:
        for task in (reading, closing):
            task.cancel()
        await asyncio.gather(reading, closing, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Ends the connection with RST instead of FIN, as a crashed peer or a network device does."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _free_port(host: str) -> int:
    with socket.socket() as trial:
        trial.bind((host, 0))
        return int(trial.getsockname()[1])


def _end_with_parent() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def run(options: argparse.Namespace, command: list[str]) -> int:
    host, place = command[command.index("--host") + 1], command.index("--port") + 1
    port, server_port = int(command[place]), _free_port(host)
    command[place] = str(server_port)
    server = await asyncio.create_subprocess_exec(options.python, *command, preexec_fn=_end_with_parent)
    ended = asyncio.ensure_future(server.wait())
    while not ended.done():
        with contextlib.suppress(OSError):
            _, probe = await asyncio.open_connection(host, server_port)
            probe.close()
            break
        await asyncio.wait({ended}, timeout=0.2)
    seed = f"{options.seed}-{port}-{os.getpid()}"
    log = f"{options.log}-{port}-{os.getpid()}.jsonl"
    proxy = Proxy(host, server_port, log, options.drop_rate, seed)
    if not ended.done():
        await proxy.listen(port)
    code = await ended
    return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", required=True, help="the Python that has sglang installed")
    parser.add_argument("--log", required=True, help="prefix of the log of calls")
    parser.add_argument("--drop-rate", type=float, default=0.0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server gets it, too, and the proxy ends with the server
    return asyncio.run(run(options, options.command[1:]))


if __name__ == "__main__":
    sys.exit(main())
