"""Tool calls from asyncio: `result = await sandbox.run("python", code, prompt_id=…)`.

Calls run in a few worker processes (`tool_worker`), each call in a confined and limited process of its own. A call that
hits a limit returns what it has printed and the name of the limit, is counted, and is logged with its tool and prompt;
the rollout goes on. Workers run under `reward.supervisor`, which kills everything they leave behind, also when this
process dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.processes import supervisor
from megatron_dapo.processes.supervisor import END
from megatron_dapo.rollout.agents.functions import shared

log = logging.getLogger(__name__)

TOOLS = ("calculator", "python")
_WORKER = Path(__file__).with_name("tool_worker.py")
PATIENCE = 30.0  # seconds beyond a call's own limit after which its worker counts as hanging
END_SECONDS = 10.0
LARGEST_REPLY = 2**24
LOGGED = 20  # calls that hit a limit, for each limit; then every hundredth


@dataclass(slots=True, frozen=True)
class ToolLimits:
    """Of one call."""

    seconds: float = 10.0  # wall time
    cpu_seconds: int = 5
    memory_mb: int = 256
    disk_mb: int = 16  # in its scratch directory
    characters: int = 4000  # of its output
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "cpu_seconds", "memory_mb", "disk_mb", "characters"):
            if getattr(self, name) <= 0:
                raise UserError(f"limits of a tool: {name} is {getattr(self, name)}, but must be more than 0")


@dataclass(slots=True, frozen=True)
class ToolResult:
    """`limit` names the limit that ended the call; empty: the code came to its end, or raised."""

    text: str
    limit: str = ""
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Call:
    body: dict[str, Any]
    prompt_id: str
    future: asyncio.Future[ToolResult]


class Sandbox:
    """Used in one event loop. Workers start with the first calls."""

    def __init__(self, limits: ToolLimits | None = None, workers: int = 2) -> None:
        self.limits = limits or ToolLimits()
        self._workers = workers
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = 0
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    async def run(self, tool: str, code: str, prompt_id: str = "") -> ToolResult:
        if tool not in TOOLS:
            raise UserError(f"there is no tool {tool!r}; there are {', '.join(TOOLS)}")
        future: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        if not self._idle and len(self._tasks) < self._workers:
            self._tasks.append(asyncio.ensure_future(self._serve()))
        self._calls.put_nowait(_Call({"tool": tool, "code": code, **asdict(self.limits)}, prompt_id, future))
        return await future

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call: tools/calls, tools/seconds, tools/NAME/calls, tools/NAME/limit/LIMIT."""
        found = {f"tools/{name}": float(count) for name, count in sorted(self.counts.items())}
        found["tools/seconds"] = self.seconds
        self.counts.clear()
        self.seconds = 0.0
        return found

    async def _serve(self) -> None:
        worker: _Worker | None = None
        try:
            while True:
                self._idle += 1
                try:
                    call = await self._calls.get()
                finally:
                    self._idle -= 1
                if call.future.cancelled():
                    continue
                try:
                    worker = worker or await _Worker.start()
                    result = await worker.run(call.body)
                except _WorkerFailed as failure:
                    if worker is not None:
                        worker.end()
                    worker, result = None, ToolResult("", str(failure))
                except asyncio.CancelledError:
                    call.future.cancel()
                    raise
                except Exception as error:  # the caller must be told
                    if not call.future.done():
                        call.future.set_exception(error)
                    continue
                self._count(call, result)
                if not call.future.done():  # its rollout may have been interrupted meanwhile
                    call.future.set_result(result)
        finally:
            if worker is not None:
                worker.end()

    def _count(self, call: _Call, result: ToolResult) -> None:
        tool = call.body["tool"]
        self.counts["calls"] += 1
        self.counts[f"{tool}/calls"] += 1
        self.seconds += result.seconds
        if result.limit:
            name = f"{tool}/limit/{result.limit}"
            self.counts[name] += 1
            if self.counts[name] <= LOGGED or self.counts[name] % 100 == 0:
                log.warning(
                    "tool %s, prompt %s: ended by the limit %r after %.1f s: %r",
                    tool, call.prompt_id, result.limit, result.seconds, call.body["code"][:200],
                )  # fmt: skip


class _WorkerFailed(Exception):
    """The worker itself hangs or has died; the message is the name of a limit."""


class _Worker:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        """Must run in a thread that lives as long as the worker: the kernel ends it with the thread that started it."""
        ours, theirs = socket.socketpair()
        descriptor = str(theirs.fileno())
        command = [sys.executable, "-I", str(_WORKER), descriptor]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), descriptor, *command],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=LARGEST_REPLY)
        return cls(process, reader, writer)

    async def run(self, body: dict[str, Any]) -> ToolResult:
        started = time.monotonic()
        try:
            self._writer.write(json.dumps(body).encode() + b"\n")
            line = await asyncio.wait_for(self._reader.readline(), body["seconds"] + PATIENCE)
        except TimeoutError:
            raise _WorkerFailed("time") from None
        except (OSError, ValueError):
            line = b""
        if not line:
            raise _WorkerFailed("crashed")
        reply = json.loads(line)
        if reply["limit"] == "unconfined":
            raise UserError(f"tools cannot run safely on this machine, so none was run: {reply['text'].strip()}")
        return ToolResult(reply["text"], reply["limit"], time.monotonic() - started)

    def end(self) -> None:
        self._writer.close()
        self._process.send_signal(END)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def shared_sandbox(limits: ToolLimits, workers: int = 2) -> Sandbox:
    """The sandbox of this event loop with these limits; `functions.close_shared` closes it."""
    return shared((limits, workers), lambda: Sandbox(limits, workers))
