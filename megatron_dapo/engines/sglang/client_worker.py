"""A client process: sends generate requests, parses the replies and returns arrays.

    python -m megatron_dapo.engines.sglang.client_worker PARENT_PID SOCKET_DESCRIPTOR

Parsing is most of the driver's work for a sample. Here it has a GIL of its own, so it delays neither the event loop of
rank 0 nor the kernel launches of its main thread. The process holds no state: a call that is lost with it is tried
again. It ends when its parent closes the socket or dies. Signals that Slurm and the terminal send to every process are
for the trainer, so it ignores them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

import orjson

from megatron_dapo.engines.sglang.client_messages import (
    SIZES,
    decode_call,
    encode_completion,
    encode_error,
    encode_ping,
)
from megatron_dapo.engines.sglang.http import Connection
from megatron_dapo.engines.sglang.response_parser import GenerateCall
from megatron_dapo.processes.guard import die_with_parent

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connections: dict[tuple[str, str | None], Connection] = {}  # by URL and key
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def receive(self, header: dict[str, Any], body: bytes) -> None:
        number = header["number"]
        if "call" in header:
            task = asyncio.ensure_future(self._run(number, decode_call(header, body)))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif "cancel" in header:
            if number in self._tasks:
                self._tasks[number].cancel()  # closes the connection of the request
        else:
            self._writer.write(encode_ping(number))

    async def _run(self, number: int, call: GenerateCall) -> None:
        try:
            reply = encode_completion(number, await call.send(self._connection(call)))
        except Exception as error:
            reply = encode_error(number, error)
        self._writer.write(reply)
        await self._writer.drain()  # a parent that does not read must not fill this process's memory

    def _connection(self, call: GenerateCall) -> Connection:
        key = (call.url, call.api_key)
        if key not in self._connections:
            self._connections[key] = Connection(call.url, api_key=call.api_key)
        return self._connections[key]


async def serve(descriptor: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    worker = Worker(writer)
    while True:
        header_size, body_size = SIZES.unpack(await reader.readexactly(SIZES.size))
        header = orjson.loads(await reader.readexactly(header_size))
        worker.receive(header, await reader.readexactly(body_size))


def main() -> None:
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        asyncio.run(serve(descriptor))
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # the parent has closed the socket; nobody waits for what still runs


if __name__ == "__main__":
    main()
