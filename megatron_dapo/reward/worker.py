"""A grading process: reads batches of answers from a socket, writes one reply per answer, ends with its parent.

The kernel enforces the limits, so that they hold inside C code too: SIGPROF ends the process when an answer has used
its CPU time (wall time plays no part, so an overloaded machine changes no grade), and RLIMIT_AS bounds its memory.
The parent (`reward.process`) tells from the way it died which limit was hit. It imports neither torch nor
transformers. Run as `python -m megatron_dapo.reward.worker FD`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from megatron_dapo.config.reward import RewardConfig
from megatron_dapo.reward.grader import FunctionGrader, Grader, load_grader
from megatron_dapo.types import Grade, Prompt

# Allocation fails this far above the limit; the parent, which looks at resident memory, normally acts before that.
MEMORY_HEADROOM_MB = 1024


def start(connection: Connection) -> Grader:
    """Loads the grader and sets the limits; tells the parent whether that worked."""
    config = RewardConfig(**json.loads(connection.recv_bytes()))
    try:
        grader = load_grader(config)
        if config.grader == "math":
            import math_verify  # noqa: F401  (its import is not part of any answer's CPU time)
        _limit_memory(config.memory_mb + MEMORY_HEADROOM_MB)
    except Exception:
        connection.send_bytes(json.dumps({"problem": traceback.format_exc()}).encode())
        sys.exit(1)
    connection.send_bytes(b'{"problem": ""}')
    return grader


def serve(connection: Connection, grader: Grader) -> None:
    loop = asyncio.new_event_loop()  # one for the life of the process: a user's client sessions stay usable
    while True:
        batch = json.loads(connection.recv_bytes())
        seconds, items = batch["cpu_seconds"], batch["items"]
        if isinstance(grader, FunctionGrader) and grader.is_async:
            with _cpu_limit(seconds * len(items)):
                loop.run_until_complete(_grade_together(connection, grader, items))
        else:
            for item in items:
                with _cpu_limit(seconds):
                    reply = _grade(grader, item)
                connection.send_bytes(reply)


def _grade(grader: Grader, item: dict[str, Any]) -> bytes:
    started = time.process_time()
    try:
        grade = grader.grade(Prompt.from_state(item["prompt"]), item["response"])
        return _reply(item, grade, time.process_time() - started)
    except (Exception, SystemExit) as error:
        return _failure(item, error)


async def _grade_together(connection: Connection, grader: FunctionGrader, items: list[dict[str, Any]]) -> None:
    async def one(item: dict[str, Any]) -> None:
        try:
            grade = await grader.grade_async(Prompt.from_state(item["prompt"]), item["response"])
            reply = _reply(item, grade, 0.0)
        except (Exception, SystemExit) as error:
            reply = _failure(item, error)
        connection.send_bytes(reply)

    await asyncio.gather(*(one(item) for item in items))


def _reply(item: dict[str, Any], grade: Grade, seconds: float) -> bytes:
    verdict = [grade.correct, grade.score, grade.extracted, grade.reason]
    return json.dumps({"index": item["index"], "grade": verdict, "seconds": seconds}).encode()


def _failure(item: dict[str, Any], error: BaseException) -> bytes:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return json.dumps({"index": item["index"], "limit": "memory"}).encode()
    text = "".join(traceback.format_exception(error))
    return json.dumps({"index": item["index"], "error": text}).encode()


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(megabytes: int) -> None:
    """Bounds the address space to what the imports took plus `megabytes`."""
    bound = psutil.Process().memory_info().vms + megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def _end_with_parent(parent: int) -> None:
    """A grader that waits for ever must not outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(2.0)
    os._exit(1)


def main() -> None:
    # Ctrl-C, and what Slurm sends to every process of a step, are the parent's business; it closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):  # the parent is done with us
        serve(connection, start(connection))


if __name__ == "__main__":
    main()
