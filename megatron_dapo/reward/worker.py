"""A grading process: reads batches of responses from a socket, writes one reply per response, ends with its parent.

The kernel enforces the limits, so that they hold inside C code too: SIGPROF ends the process when a response has used
its CPU time (wall time does not count, so an overloaded machine changes no grade), and RLIMIT_AS bounds its memory.
The parent (`reward.pool`) sees from the exit code which limit was hit. A response may come as tokens; they are decoded
here. This process imports neither torch nor transformers. Run as `python -m megatron_dapo.reward.worker FD`, under a
supervisor.
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
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil

from megatron_dapo.plugins import in_one_line
from megatron_dapo.processes.frames import Channel, Header, parent_channel
from megatron_dapo.reward.grader import FunctionGrader, Grader, load_grader
from megatron_dapo.types import Grade, Prompt

# Allocations fail this far above the limit; the parent, which watches resident memory, usually acts before that.
MEMORY_HEADROOM_MB = 1024
QUOTED = 200  # characters of a response in an error message

Decoder = Callable[[list[int]], str]


def start(channel: Channel) -> tuple[Grader, Decoder]:
    """Loads the grader and sets the limits; reports to the parent whether that worked."""
    header, (tokenizer,) = channel.receive()
    # The parent has checked it. Building the schema again would double the time that this process takes to start.
    config: Any = SimpleNamespace(**header["config"])
    try:
        grader = load_grader(config)
        decode = _decoder(tokenizer)
        if config.grader == "math":
            import math_verify  # noqa: F401  (the import must not count as CPU time of a response)
        _limit_memory(config.memory_mb + MEMORY_HEADROOM_MB)
    except Exception:
        channel.send({"number": header["number"], "problem": traceback.format_exc().rstrip()})
        sys.exit(1)
    channel.send({"number": header["number"], "problem": "", "pid": os.getpid()})
    return grader, decode


def _decoder(tokenizer: bytearray) -> Decoder:
    if not tokenizer:
        return lambda tokens: ""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(tokenizer.decode())
    return lambda tokens: str(loaded.decode(tokens, skip_special_tokens=True))


@dataclass(slots=True)
class Request:
    number: int
    prompt: str  # JSON
    content: bytearray  # a text, or tokens
    has_tokens: bool
    response: str = ""

    def decode(self, decode: Decoder) -> None:
        if self.has_tokens:
            self.response = decode(array("i", bytes(self.content)).tolist())
        else:
            self.response = self.content.decode(errors="surrogatepass")


def serve(channel: Channel, grader: Grader, decode: Decoder) -> None:
    loop = asyncio.new_event_loop()  # one for the life of the process, so that a grader may keep client sessions
    while True:
        header, parts = channel.receive()
        seconds, columns = header["cpu_seconds"], (header["prompts"], parts, header["has_tokens"])
        requests = [Request(header["number"] + i, *row) for i, row in enumerate(zip(*columns, strict=True))]
        if isinstance(grader, FunctionGrader) and grader.is_async:
            with _cpu_limit(seconds * len(requests)):
                for request in requests:
                    request.decode(decode)
                loop.run_until_complete(_grade_together(channel, grader, requests))
        else:
            for request in requests:
                with _cpu_limit(seconds):
                    request.decode(decode)
                    reply = _grade(grader, request)
                channel.send(reply)


def _grade(grader: Grader, request: Request) -> Header:
    started = time.process_time()
    try:
        prompt = Prompt.from_state(json.loads(request.prompt))
        quick = grader.quick(prompt, request.response)
        grade = quick or grader.grade(prompt, request.response)
        return _reply(request, grade, seconds=time.process_time() - started, quick=quick is not None)
    except (Exception, SystemExit) as error:
        return _failure(grader, request, error)


async def _grade_together(channel: Channel, grader: FunctionGrader, requests: list[Request]) -> None:
    async def one(request: Request) -> None:
        try:
            grade = await grader.grade_async(Prompt.from_state(json.loads(request.prompt)), request.response)
            reply = _reply(request, grade)
        except (Exception, SystemExit) as error:
            reply = _failure(grader, request, error)
        channel.send(reply)

    await asyncio.gather(*(one(request) for request in requests))


def _reply(request: Request, grade: Grade, **measured: float) -> Header:
    return {"number": request.number, "grade": grade.to_state(), **measured}


def _failure(grader: Grader, request: Request, error: BaseException) -> Header:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return {"number": request.number, "limit": "memory"}
    function = grader.function if isinstance(grader, FunctionGrader) else grader.grade
    return {
        "number": request.number, "error": in_one_line(error, function),
        "trace": "".join(traceback.format_exception(error)).rstrip(), "response": request.response[-QUOTED:],
    }  # fmt: skip


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
    channel = parent_channel()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(EOFError, ConnectionError):  # the parent has closed the socket
        serve(channel, *start(channel))


if __name__ == "__main__":
    main()
