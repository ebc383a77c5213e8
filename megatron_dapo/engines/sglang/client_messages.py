"""Generate calls and completions as frames between rank 0 and a client process, so that neither side parses text twice.

To the client process: a call (its part is the prompt's tokens), a cancellation, a ping. From it: a completion (its
parts are text, tokens, log-probs and experts), an error, a pong. Every frame has the number of its call. The decoded
arrays belong to the caller.
"""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import BrokenConnection, NotSent, RequestRefused, ServerFailure
from megatron_dapo.engines.sglang.response_parser import GenerateCall, UnfinishedUpdate, UnknownLabel
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.frames import Header, encode
from megatron_dapo.types import FinishReason, WeightSpan

# What `GenerateCall.send` raises; the class decides what the engine does about it.
_ERRORS: dict[str, type[ServerFailure | RequestRefused]] = {
    kind.__name__: kind
    for kind in (ServerFailure, NotSent, BrokenConnection, RequestRefused, UnfinishedUpdate, UnknownLabel)
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
    return encode(header, completion.text.encode(errors="surrogatepass"), *map(np.ascontiguousarray, arrays))


def decode_completion(header: Header, parts: list[bytearray]) -> Completion:
    """Raises the error of the call, if it has failed."""
    if "error" in header:
        raise _error(header)
    text, tokens, logprobs, *rest = parts
    experts = None
    if rest:
        kind, *shape = header["experts"]
        experts = np.frombuffer(rest[0], kind).reshape(shape)
    return Completion(
        np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32), FinishReason(header["reason"]),
        text.decode(errors="surrogatepass"), [WeightSpan(*span) for span in header["spans"]], routed_experts=experts,
    )  # fmt: skip


def encode_error(number: int, error: BaseException) -> bytes:
    """An error that `send` does not raise on purpose is a bug here; its traceback travels along."""
    kind, message = type(error).__name__, str(error)
    if kind not in _ERRORS:
        kind = "EngineError" if isinstance(error, EngineError) else "bug"
        message = message if kind == "EngineError" else "".join(traceback.format_exception(error))
    return encode({"number": number, "error": kind, "message": message, "status": getattr(error, "status", None)})


def _error(header: Header) -> BaseException:
    if header["error"] == "bug":
        return RuntimeError(f"an error in a client process:\n{header['message']}")
    if header["error"] == "EngineError":
        return EngineError(header["message"])
    return _ERRORS[header["error"]](header["message"], header["status"])
