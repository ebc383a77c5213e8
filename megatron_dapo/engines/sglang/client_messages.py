"""Messages between rank 0 and a client process: a JSON header and raw arrays, so that neither side parses text twice.

A frame is the sizes of header and body, the header, the body. Frames to the client process: a call (body: the prompt's
tokens), a cancellation, a ping. Frames from it: a completion (body: tokens, log-probs, experts, text), an error, a
pong. Every frame has the number of its call. Decoded arrays are copies; the caller owns them.
"""

from __future__ import annotations

import asyncio
import struct
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import BrokenConnection, NotSent, RequestRefused, ServerFailure
from megatron_dapo.engines.sglang.response_parser import GenerateCall, UnfinishedUpdate, UnknownLabel
from megatron_dapo.errors import EngineError
from megatron_dapo.types import FinishReason, WeightSpan

BUFFER = 1 << 20
SIZES = struct.Struct("<II")  # bytes of the header, bytes of the body
# What `GenerateCall.send` raises; the class decides what the engine does about it.
_ERRORS: dict[str, type[ServerFailure | RequestRefused]] = {
    kind.__name__: kind
    for kind in (ServerFailure, NotSent, BrokenConnection, RequestRefused, UnfinishedUpdate, UnknownLabel)
}


def encode_call(number: int, call: GenerateCall) -> bytes:
    header = {name: getattr(call, name) for name in call.__slots__ if name != "prompt"}
    return _frame({"number": number, "call": header}, np.ascontiguousarray(call.prompt, np.int32))


def encode_cancellation(number: int) -> bytes:
    return _frame({"number": number, "cancel": True})


def encode_ping(number: int) -> bytes:
    return _frame({"number": number})


def decode_call(header: dict[str, Any], body: bytes) -> GenerateCall:
    return GenerateCall(prompt=np.frombuffer(body, np.int32), **header["call"])


def encode_completion(number: int, completion: Completion) -> bytes:
    text, experts = completion.text.encode("utf-8", "surrogatepass"), completion.routed_experts
    header = {
        "number": number, "tokens": len(completion.tokens), "reason": completion.finish_reason,
        "spans": [(span.version, span.start, span.end) for span in completion.weight_spans],
        "experts": None if experts is None else [*experts.shape, experts.dtype.name],
    }  # fmt: skip
    arrays = [completion.tokens, completion.logprobs, *([] if experts is None else [experts])]
    return _frame(header, *map(np.ascontiguousarray, arrays), text)


def encode_error(number: int, error: BaseException) -> bytes:
    """An error that `send` does not raise on purpose is a bug here; its traceback travels along."""
    if type(error).__name__ in _ERRORS:
        status = getattr(error, "status", None)
        return _frame({"number": number, "error": type(error).__name__, "message": str(error), "status": status})
    text = str(error) if isinstance(error, EngineError) else "".join(traceback.format_exception(error))
    kind = "EngineError" if isinstance(error, EngineError) else "bug"
    return _frame({"number": number, "error": kind, "message": text, "status": None})


def decode_reply(header: dict[str, Any], body: memoryview) -> Completion | BaseException | None:
    """A completion, or the error of the call; None for a pong."""
    if "error" in header:
        return _error(header)
    if "tokens" not in header:
        return None
    count = header["tokens"]
    tokens, logprobs = np.frombuffer(body, np.int32, count), np.frombuffer(body, np.float32, count, 4 * count)
    position, experts = 8 * count, None
    if header["experts"] is not None:
        rows, columns, kind = header["experts"]
        experts = np.frombuffer(body, kind, rows * columns, position).reshape(rows, columns).copy()
        position += experts.nbytes
    return Completion(
        tokens.copy(), logprobs.copy(), FinishReason(header["reason"]), str(body[position:], "utf-8", "surrogatepass"),
        [WeightSpan(*span) for span in header["spans"]], routed_experts=experts,
    )  # fmt: skip


def _error(header: dict[str, Any]) -> BaseException:
    if header["error"] == "bug":
        return RuntimeError(f"an error in a client process:\n{header['message']}")
    if header["error"] == "EngineError":
        return EngineError(header["message"])
    return _ERRORS[header["error"]](header["message"], header["status"])


def _frame(header: dict[str, Any], *parts: Any) -> bytes:
    encoded = orjson.dumps(header)
    views = [memoryview(part).cast("B") for part in parts]
    return b"".join([SIZES.pack(len(encoded), sum(view.nbytes for view in views)), encoded, *views])


class FrameReader(asyncio.BufferedProtocol):
    """Cuts what arrives into frames: `received(header, body)` for each; `lost()` at the end. The buffer is reused."""

    def __init__(self, received: Callable[[bytes, memoryview], None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._buffer = bytearray(BUFFER)
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        view, start = memoryview(self._buffer), 0
        while self._filled - start >= SIZES.size:
            header_size, body_size = SIZES.unpack_from(view, start)
            header, body = start + SIZES.size, start + SIZES.size + header_size
            if (end := body + body_size) > self._filled:
                break
            self._received(bytes(view[header:body]), view[body:end])
            start = end
        if start:
            view[: self._filled - start] = bytes(view[start : self._filled])
            self._filled -= start
        self._make_room()

    def _make_room(self) -> None:
        """For the whole of the frame whose beginning is there."""
        needed = SIZES.size
        if self._filled >= SIZES.size:
            needed += sum(SIZES.unpack_from(self._buffer, 0))
        if needed > len(self._buffer):
            self._buffer = self._buffer + bytes(needed - len(self._buffer))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
