"""A client process: sends generate requests, parses the replies and returns arrays.

    python -m megatron_dapo.engines.sglang.client_worker SOCKET_DESCRIPTOR

Parsing is most of the driver's work for a sample. Here it has a GIL of its own, so it delays neither the event loop of
rank 0 nor the kernel launches of its main thread. The process holds no state: a call that is lost with it is tried
again. It ends when its parent closes the socket or dies.

Frames to it: a call (its part is the prompt's tokens), a cancellation, a ping. Frames from it: a completion (its parts
are tokens, log-probs and experts), an error, a pong. The decoded arrays belong to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import traceback
from typing import Any

import numpy as np

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import (
    BrokenConnection,
    Connection,
    NotSent,
    RequestRefused,
    ServerBusy,
    ServerFailure,
)
from megatron_dapo.engines.sglang.response_parser import BadReply, GenerateCall, UnfinishedUpdate, UnknownLabel
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.frames import Frame, FrameBuffer, Header, encode, parent_channel
from megatron_dapo.types import FinishReason, WeightSpan

# What `GenerateCall.send` raises; the class decides what the engine does about it.
_ERRORS: dict[str, type[ServerFailure | RequestRefused]] = {
    kind.__name__: kind
    for kind in (
        ServerFailure,
        ServerBusy,
        NotSent,
        BrokenConnection,
        RequestRefused,
        BadReply,
        UnfinishedUpdate,
        UnknownLabel,
    )
}


def encode_call(call: GenerateCall) -> tuple[Header, Any]:
    header = {name: getattr(call, name) for name in call.__slots__ if name != "prompt"}
    return {"call": header}, np.ascontiguousarray(call.prompt, np.int32)


def decode_call(header: Header, parts: list[bytearray]) -> GenerateCall:
    return GenerateCall(prompt=np.frombuffer(parts[0], np.int32), **header["call"])


def encode_completion(number: int, completion: Completion) -> bytes:
    experts = completion.routed_experts
    header = {
        "number": number, "reason": completion.finish_reason,
        "spans": [(span.version, span.start, span.end) for span in completion.weight_spans],
        "experts": None if experts is None else [experts.dtype.name, *experts.shape],
    }  # fmt: skip
    arrays = [completion.tokens, completion.logprobs, *([] if experts is None else [experts.reshape(-1)])]
    return encode(header, *map(np.ascontiguousarray, arrays))


def decode_completion(header: Header, parts: list[bytearray]) -> Completion:
    """Raises the error of the call, if it has failed."""
    if "error" in header:
        raise _error(header)
    tokens, logprobs, *rest = parts
    experts = None
    if rest:
        kind, *shape = header["experts"]
        experts = np.frombuffer(rest[0], kind).reshape(shape)
    return Completion(
        np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32), FinishReason(header["reason"]),
        [WeightSpan(*span) for span in header["spans"]], routed_experts=experts,
    )  # fmt: skip


def encode_error(number: int, error: BaseException) -> bytes:
    """An error that `send` does not raise on purpose is a bug here; its traceback travels along."""
    kind, message = type(error).__name__, str(error)
    if kind not in _ERRORS:
        kind = "EngineError" if isinstance(error, EngineError) else "bug"
        message = message if kind == "EngineError" else "".join(traceback.format_exception(error))
    found = {name: getattr(error, name) for name in ("status", "retry_after") if hasattr(error, name)}
    return encode({"number": number, "error": kind, "message": message, "values": found})


def _error(header: Header) -> BaseException:
    if header["error"] == "bug":
        return RuntimeError(f"an error in a client process:\n{header['message']}")
    if header["error"] == "EngineError":
        return EngineError(header["message"])
    return _ERRORS[header["error"]](header["message"], **header["values"])


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
        self._tasks.pop(number, None)  # not cancelled any more: half a frame would garble all that follow
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
    worker = Worker(parent)
    with contextlib.suppress(ConnectionError):
        asyncio.run(worker.serve())
    os._exit(0)  # nobody waits for what still runs, and aiohttp does not complain about open connections


if __name__ == "__main__":
    main()
