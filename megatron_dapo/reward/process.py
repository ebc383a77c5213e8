"""One grading process as its parent sees it: start, send a batch, collect replies, notice why it died.

A process is judged by what it uses, not by the clock: CPU time is limited by the kernel inside it (`reward.worker`),
resident memory is watched here, and it counts as stuck only after sleeping for `stuck_seconds` without using CPU.
Waiting for a turn on an overloaded machine is none of these.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from megatron_dapo.config.reward import RewardConfig
from megatron_dapo.errors import UserError
from megatron_dapo.types import Prompt, json_default

POLL_SECONDS = 0.05
START_SECONDS = 120.0


class WorkerDied(Exception):
    """The process is gone; `reason` is one of cpu-time, memory, stuck, crashed, stopping."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerStartError(UserError):
    """A grading process does not come up; the message carries what it printed."""


@dataclass(slots=True, eq=False)
class Item:
    """One answer on its way: what the process needs to grade it, and how often that has failed."""

    prompt: Prompt
    response: str
    failures: int = 0
    alone: bool = False  # graded by itself, because it shared a batch with whatever killed the process

    def to_record(self, index: int) -> dict[str, Any]:
        return {"index": index, "prompt": self.prompt.to_state(), "response": self.response}


class GradingProcess:
    """Owned by one thread. Every method may raise WorkerDied, after which the object is used up."""

    def __init__(self, config: RewardConfig, stopping: threading.Event) -> None:
        self._config, self._stopping = config, stopping
        ours, theirs = socket.socketpair()
        # The interpreter is started afresh: no fork of a process with threads and GPUs, and no import of __main__.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dapo.reward.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._usage = psutil.Process(self._process.pid)
        self._closed = False
        self._connection.send_bytes(config.model_dump_json().encode())
        self._wait_until_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    def grade(self, items: list[Item]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, reply) of every item as it is finished; raises WorkerDied if the process ends before the last."""
        failures = max(item.failures for item in items)
        message = {
            "cpu_seconds": self._config.cpu_seconds * (1 + failures),
            "items": [item.to_record(index) for index, item in enumerate(items)],
        }
        try:
            self._connection.send_bytes(json.dumps(message, default=json_default).encode())
            for _ in items:
                self._wait_for_reply()
                reply = json.loads(self._connection.recv_bytes())
                yield reply["index"], reply
        except (EOFError, ConnectionError, psutil.NoSuchProcess):
            raise WorkerDied(self._reason_of_death()) from None

    def close(self) -> None:
        """Ends the process, gently if it is idle. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._connection.poll(POLL_SECONDS):
                if self._stopping.is_set():
                    self._kill("stopping")
                if time.monotonic() > deadline:
                    raise WorkerStartError(f"a grading process did not start within {START_SECONDS:.0f} s")
            problem = json.loads(self._connection.recv_bytes())["problem"]
        except (EOFError, ConnectionError):
            problem = f"it exited with code {self._process.wait()}; what it printed is on stderr"
        except WorkerStartError:
            self.close()
            raise
        if problem:
            self.close()
            raise WorkerStartError(f"a grading process (grader {self._config.grader!r}) could not start:\n{problem}")

    def _wait_for_reply(self) -> None:
        cpu_before, asleep_since = -1.0, time.monotonic()
        limit = self._config.memory_mb * 2**20
        while not self._connection.poll(POLL_SECONDS):
            if self._stopping.is_set():
                self._kill("stopping")
            with self._usage.oneshot():
                times, status, resident = self._usage.cpu_times(), self._usage.status(), self._usage.memory_info().rss
            if status == psutil.STATUS_ZOMBIE:
                raise EOFError
            if resident > limit:
                self._kill("memory")
            cpu = times.user + times.system
            if cpu > cpu_before or status in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                cpu_before, asleep_since = cpu, time.monotonic()
            elif time.monotonic() - asleep_since > self._config.stuck_seconds:
                self._kill("stuck")

    def _kill(self, reason: str) -> None:
        self._process.kill()
        self._process.wait()
        raise WorkerDied(reason)

    def _reason_of_death(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # it closed the socket but lives on: a grader that meddles with descriptors
            self._process.kill()
            code = self._process.wait()
        return "cpu-time" if code == -signal.SIGPROF else "crashed"
