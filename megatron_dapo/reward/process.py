"""One grading process as its parent sees it: start it, send a batch, collect replies, find out why it died.

A process is judged by what it uses, not by the clock. The kernel limits CPU time inside it (`reward.worker`), resident
memory is watched here, and it counts as stuck only after `stuck_seconds` of sleep without using CPU time. Waiting for
a core on an overloaded machine is none of these. Each process runs under a supervisor (`reward.supervisor`) that
kills whatever the grader started when the process ends, for whatever reason.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.processes import supervisor
from megatron_dapo.processes.supervisor import END
from megatron_dapo.reward.grader import GraderError
from megatron_dapo.types import Prompt, Tokens, json_default

POLL_SECONDS = 0.05
USAGE_SECONDS = 0.25  # between two looks at what the process uses: a look costs as much as grading a response
START_SECONDS = 120.0
END_SECONDS = 30.0  # until the supervisor must have killed all descendants
_SUPERVISOR = Path(supervisor.__file__)
_CPU_TIME_EXIT = 128 + signal.SIGPROF


class WorkerDied(Exception):
    """The process has ended; `reason` is one of cpu-time, memory, stuck, crashed, stopping."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerStartError(GraderError):
    """A grading process cannot start; the message has its traceback."""


@dataclass(slots=True, eq=False)
class GradingRequest:
    """One response to grade, and how often that has failed."""

    prompt: Prompt
    response: str
    tokens: Tokens | None = None  # instead of `response`: the process decodes them
    failures: int = 0
    alone: bool = False  # graded in a batch of its own, because its last batch killed the process

    def to_message(self, index: int) -> str:
        tokens = "" if self.tokens is None else f', "tokens": {len(self.tokens)}'
        prompt, response = _prompt_json(self.prompt), json.dumps(self.response)
        return f'{{"index": {index}, "prompt": {prompt}, "response": {response}{tokens}}}'


# By id(). The prompt is kept too, so that its id is not used for another one. The samples of a group share a prompt.
_prompts: dict[int, tuple[Prompt, str]] = {}
_MOST_PROMPTS = 1024


def _prompt_json(prompt: Prompt) -> str:
    found = _prompts.get(id(prompt))
    if found is None:
        if len(_prompts) >= _MOST_PROMPTS:
            _prompts.clear()
        found = _prompts[id(prompt)] = prompt, json.dumps(prompt.to_state(), default=json_default)
    return found[1]


class GradingProcess:
    """Owned by one thread. Every method may raise WorkerDied; after that the object cannot be used again."""

    def __init__(self, config: RewardConfig, stopping: threading.Event, tokenizer: bytes = b"") -> None:
        """`tokenizer`: the JSON of a `tokenizers.Tokenizer`, for requests that have tokens."""
        self._config, self._stopping = config, stopping
        ours, theirs = socket.socketpair()
        # A new interpreter: no fork of a process with threads and GPUs, and no import of __main__.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        descriptor = str(theirs.fileno())
        command = [sys.executable, "-m", "megatron_dapo.reward.worker", descriptor]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), descriptor, *command],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._poller = select.poll()  # Connection.poll would create one for every call
        self._poller.register(self._connection.fileno(), select.POLLIN)
        self._closed = False
        self._connection.send_bytes(config.model_dump_json().encode())
        self._connection.send_bytes(tokenizer)
        self._usage = psutil.Process(self._wait_until_ready())
        self._memory_limit = config.memory_mb * 2**20 + (self._usage.memory_info().rss if tokenizer else 0)

    @property
    def pid(self) -> int:
        """Of the process that grades."""
        return self._usage.pid

    def grade(self, requests: list[GradingRequest]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, reply) of every request when it is finished; raises WorkerDied if the process ends before that."""
        failures = max(request.failures for request in requests)
        seconds = self._config.cpu_seconds * (1 + failures)
        listed = ", ".join(request.to_message(index) for index, request in enumerate(requests))
        message = f'{{"cpu_seconds": {seconds}, "requests": [{listed}]}}'
        tokens = [request.tokens for request in requests if request.tokens is not None]
        try:
            self._connection.send_bytes(message.encode())
            if tokens:
                self._connection.send_bytes(np.concatenate(tokens).tobytes())
            for _ in requests:
                self._wait_for_reply()
                reply = json.loads(self._connection.recv_bytes())
                yield reply["index"], reply
        except (EOFError, ConnectionError, psutil.NoSuchProcess):
            raise WorkerDied(self._reason_of_death()) from None

    def close(self) -> None:
        """End the process and all its descendants; an idle one may exit by itself. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        self._end(grace=0.5)

    def _end(self, grace: float = 0.0) -> int:
        """Wait `grace` seconds for the process, then kill it with all its descendants. Returns the exit code."""
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.send_signal(END)
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # a descendant that cannot be killed, e.g. one that waits for a dead disk
            self._process.kill()
            return self._process.wait()

    def _wait_until_ready(self) -> int:
        """Returns the pid of the grading process, which is the supervisor's child."""
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._connection.poll(POLL_SECONDS):
                if self._stopping.is_set():
                    self._kill("stopping")
                if time.monotonic() > deadline:
                    self.close()
                    raise WorkerStartError(f"a grading process did not start within {START_SECONDS:.0f} s")
            ready = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            ready = {"problem": f"it exited with code {self._process.wait()}; its output is on stderr"}
        if ready["problem"]:
            self.close()
            raise WorkerStartError(
                f"a grading process (grader {self._config.grader!r}) could not start:\n{ready['problem']}"
            )
        return int(ready["pid"])

    def _wait_for_reply(self) -> None:
        cpu_before, asleep_since = -1.0, time.monotonic()
        looked_at = asleep_since
        while not self._poller.poll(1000 * POLL_SECONDS):
            if self._stopping.is_set():
                self._kill("stopping")
            if time.monotonic() - looked_at < USAGE_SECONDS:
                continue
            looked_at = time.monotonic()
            with self._usage.oneshot():
                times, status, resident = self._usage.cpu_times(), self._usage.status(), self._usage.memory_info().rss
            if status == psutil.STATUS_ZOMBIE:
                raise EOFError
            if resident > self._memory_limit:
                self._kill("memory")
            cpu = times.user + times.system
            if cpu > cpu_before or status in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                cpu_before, asleep_since = cpu, time.monotonic()
            elif time.monotonic() - asleep_since > self._config.stuck_seconds:
                self._kill("stuck")

    def _kill(self, reason: str) -> None:
        self._end()
        raise WorkerDied(reason)

    def _reason_of_death(self) -> str:
        """It may have closed the socket and still run: a grader that closes descriptors. Then it is killed."""
        return "cpu-time" if self._end(grace=5.0) == _CPU_TIME_EXIT else "crashed"
