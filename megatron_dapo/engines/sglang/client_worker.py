"""A client process: sends generate requests, parses the replies and returns arrays.

    python -m megatron_dapo.engines.sglang.client_worker SOCKET_DESCRIPTOR

Parsing is most of the driver's work for a sample. Here it has a GIL of its own, so it delays neither the event loop of
rank 0 nor the kernel launches of its main thread. The process holds no state: a call that is lost with it is tried
again. It ends when its parent closes the socket or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from megatron_dapo.engines.sglang.client_messages import decode_call, encode_completion, encode_error
from megatron_dapo.engines.sglang.http import Connection
from megatron_dapo.engines.sglang.response_parser import GenerateCall
from megatron_dapo.processes.frames import Frame, FrameBuffer, encode, parent_channel


class Worker:
    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._sending = asyncio.Lock()
        self._connections: dict[tuple[str, str | None], Connection] = {}  # by URL and key
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the parent closes the socket."""
        buffer, loop = FrameBuffer(), asyncio.get_running_loop()
        while count := await loop.sock_recv_into(self._parent, buffer.room()):
            for frame in buffer.received(count):
                self._receive(frame)

    def _receive(self, frame: Frame) -> None:
        header, parts = frame
        number = header["number"]
        if "cancel" in header:
            if number in self._tasks:
                self._tasks[number].cancel()  # closes the connection of the request
            return
        call = decode_call(header, parts) if "call" in header else None
        task = asyncio.ensure_future(self._run(number, call))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _run(self, number: int, call: GenerateCall | None) -> None:
        try:
            if call is None:
                reply = encode({"number": number, "pid": os.getpid()})
            else:
                reply = encode_completion(number, await call.send(self._connection(call)))
        except Exception as error:
            reply = encode_error(number, error)
        async with self._sending:  # waits for a parent that does not read: replies must not fill the memory
            await asyncio.get_running_loop().sock_sendall(self._parent, reply)

    def _connection(self, call: GenerateCall) -> Connection:
        key = (call.url, call.api_key)
        if key not in self._connections:
            self._connections[key] = Connection(call.url, api_key=call.api_key)
        return self._connections[key]


def main() -> None:
    parent = parent_channel().socket
    parent.setblocking(False)
    with contextlib.suppress(ConnectionError):
        asyncio.run(Worker(parent).serve())
    os._exit(0)  # nobody waits for what still runs


if __name__ == "__main__":
    main()
