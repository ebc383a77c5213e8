"""A grading process: reads batches of responses from a socket, writes one reply per response, ends with its parent.

The kernel enforces the limits, so that they hold inside C code too: SIGPROF ends the process when a response has used
its CPU time (wall time does not count, so an overloaded machine changes no grade), and RLIMIT_AS bounds its memory.
The parent (`reward.process`) sees from the exit code which limit was hit. A response may come as tokens; they are
decoded here. This process imports neither torch nor transformers. Run as `python -m megatron_dapo.reward.worker FD`,
under `reward.supervisor`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil

from megatron_dapo.reward.grader import FunctionGrader, Grader, QuickGrader, load_grader
from megatron_dapo.types import Grade, Prompt

# Allocations fail this far above the limit; the parent, which watches resident memory, usually acts before that.
MEMORY_HEADROOM_MB = 1024
QUOTED = 200  # characters of a response in an error message

Decoder = Callable[[list[int]], str]


def start(connection: Connection) -> tuple[Grader, Decoder]:
    """Loads the grader and sets the limits; reports to the parent whether that worked."""
    # The parent has checked it. Building the schema again would double the time that this process takes to start.
    config: Any = SimpleNamespace(**json.loads(connection.recv_bytes()))
    tokenizer = connection.recv_bytes()
    try:
        grader = load_grader(config)
        decode = _decoder(tokenizer)
        if config.grader == "math":
            import math_verify  # noqa: F401  (the import must not count as CPU time of a response)
        _limit_memory(config.memory_mb + MEMORY_HEADROOM_MB)
    except Exception:
        connection.send_bytes(json.dumps({"problem": traceback.format_exc()}).encode())
        sys.exit(1)
    connection.send_bytes(json.dumps({"problem": "", "pid": os.getpid()}).encode())
    return grader, decode


def _decoder(tokenizer: bytes) -> Decoder:
    if not tokenizer:
        return lambda tokens: ""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(tokenizer.decode())
    return lambda tokens: str(loaded.decode(tokens, skip_special_tokens=True))


def serve(connection: Connection, grader: Grader, decode: Decoder) -> None:
    loop = asyncio.new_event_loop()  # one for the life of the process, so that a grader may keep client sessions
    while True:
        batch = json.loads(connection.recv_bytes())
        seconds, requests = batch["cpu_seconds"], batch["requests"]
        _add_tokens(connection, requests)
        if isinstance(grader, FunctionGrader) and grader.is_async:
            with _cpu_limit(seconds * len(requests)):
                for request in requests:
                    _add_response(request, decode)
                loop.run_until_complete(_grade_together(connection, grader, requests))
        else:
            for request in requests:
                with _cpu_limit(seconds):
                    _add_response(request, decode)
                    reply = _grade(grader, request)
                connection.send_bytes(reply)


def _add_tokens(connection: Connection, requests: list[dict[str, Any]]) -> None:
    """The tokens of all responses follow in one message, as int32."""
    counted = [request for request in requests if "tokens" in request]
    if counted:
        tokens, start = array("i", connection.recv_bytes()), 0
        for request in counted:
            end = start + request["tokens"]
            request["tokens"], start = tokens[start:end].tolist(), end


def _add_response(request: dict[str, Any], decode: Decoder) -> None:
    if "tokens" in request:
        request["response"] = decode(request["tokens"])


def _grade(grader: Grader, request: dict[str, Any]) -> bytes:
    started = time.process_time()
    try:
        prompt, response = Prompt.from_state(request["prompt"]), request["response"]
        quick = grader.quick(prompt, response) if isinstance(grader, QuickGrader) else None
        grade = quick or grader.grade(prompt, response)
        return _reply(request, grade, time.process_time() - started, quick is not None)
    except (Exception, SystemExit) as error:
        return _failure(request, error)


async def _grade_together(connection: Connection, grader: FunctionGrader, requests: list[dict[str, Any]]) -> None:
    async def one(request: dict[str, Any]) -> None:
        try:
            grade = await grader.grade_async(Prompt.from_state(request["prompt"]), request["response"])
            reply = _reply(request, grade, 0.0, False)
        except (Exception, SystemExit) as error:
            reply = _failure(request, error)
        connection.send_bytes(reply)

    await asyncio.gather(*(one(request) for request in requests))


def _reply(request: dict[str, Any], grade: Grade, seconds: float, quick: bool) -> bytes:
    return json.dumps(
        {"index": request["index"], "grade": grade.to_state(), "seconds": seconds, "quick": quick}
    ).encode()


def _failure(request: dict[str, Any], error: BaseException) -> bytes:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return json.dumps({"index": request["index"], "limit": "memory"}).encode()
    text = "".join(traceback.format_exception(error))
    return json.dumps({"index": request["index"], "error": text, "response": request["response"][-QUOTED:]}).encode()


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(megabytes: int) -> None:
    """Bounds the address space to its present size, which the imports took, plus `megabytes`."""
    bound = psutil.Process().memory_info().vms + megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def main() -> None:
    # The parent handles Ctrl-C and the signals that Slurm sends to every process of a step; it closes the socket. A
    # handler that does nothing, not SIG_IGN: programs that a grader starts would inherit that and ignore SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):  # the parent has closed the socket
        serve(connection, *start(connection))


if __name__ == "__main__":
    main()
