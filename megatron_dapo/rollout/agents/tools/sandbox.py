"""Tool calls from asyncio: `result = await sandbox.run("python", code, prompt_id=…)`.

Calls run in a few worker processes (`tool_worker`), each call in a confined and limited process of its own. A call that
hits a limit returns what it has printed and the name of the limit, is counted, and is logged with its tool and prompt;
the rollout goes on. Workers end with this process, and so does everything they started. They get none of its
environment variables but the library path and the folder for temporary files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.errors import UserError
from megatron_dapo.processes.supervised import ProcessEnded, WorkerProcess
from megatron_dapo.rollout.agents.functions import shared

log = logging.getLogger(__name__)

TOOLS = ("calculator", "python")
COMMAND = [sys.executable, "-I", str(Path(__file__).with_name("tool_worker.py"))]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
KEPT = ("LD_LIBRARY_PATH",)  # Python itself may need it
PATIENCE = 30.0  # seconds beyond a call's own limit after which its worker counts as hanging
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
    """`limit` names the limit that ended the call; empty: the code ran to its end, or raised."""

    text: str
    limit: str = ""
    seconds: float = 0.0


class Sandbox:
    """Used in one event loop. Workers start with the first calls."""

    def __init__(self, limits: ToolLimits | None = None, workers: int = 2) -> None:
        self.limits = limits or ToolLimits()
        self._free = asyncio.Semaphore(workers)
        self._idle: list[WorkerProcess] = []
        self._calls: set[asyncio.Task[ToolResult]] = set()
        self._watched = ""  # why scratch directories are watched; already logged
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    async def run(self, tool: str, code: str, prompt_id: str = "") -> ToolResult:
        """A call that is cancelled before a worker is free is not made; a later one comes to its end."""
        if tool not in TOOLS:
            raise UserError(f"there is no tool {tool!r}; there are {', '.join(TOOLS)}")
        await self._free.acquire()
        call = asyncio.ensure_future(self._run(tool, code, prompt_id))
        self._calls.add(call)
        call.add_done_callback(self._done)
        return await asyncio.shield(call)

    def _done(self, call: asyncio.Task[ToolResult]) -> None:
        self._calls.discard(call)
        self._free.release()

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        workers, self._idle = self._idle, []
        await asyncio.gather(*(worker.end() for worker in workers))

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call: tools/calls, tools/seconds, tools/NAME/calls, tools/NAME/limit/LIMIT."""
        found = {f"tools/{name}": float(count) for name, count in sorted(self.counts.items())}
        found["tools/seconds"] = self.seconds
        self.counts.clear()
        self.seconds = 0.0
        return found

    async def _run(self, tool: str, code: str, prompt_id: str) -> ToolResult:
        worker = self._idle.pop() if self._idle else await self._start()
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.seconds + PATIENCE):
                reply, _ = await worker.send({"tool": tool, "code": code, **asdict(self.limits)})[1][0]
            self._idle.append(worker)
        except TimeoutError:
            reply = {"text": "", "limit": "time", "watched": ""}
        except ProcessEnded:
            reply = {"text": "", "limit": "crashed", "watched": ""}
        finally:
            if worker not in self._idle:
                await worker.end()
        if reply["limit"] == "unconfined":
            raise UserError(f"tools cannot run safely on this machine, so none was run: {reply['text'].strip()}")
        if reply["watched"] and not self._watched:
            self._watched = reply["watched"]
            log.warning(
                "tools have no file system of their own here (%s): their scratch directories are watched, so a call "
                "may exceed limits.disk_mb for a moment before it is ended", self._watched
            )  # fmt: skip
        result = ToolResult(reply["text"], reply["limit"], time.monotonic() - started)
        self._count(tool, code, prompt_id, result)
        return result

    async def _start(self) -> WorkerProcess:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return await WorkerProcess.start(COMMAND, {**ENVIRONMENT, **kept, "TMPDIR": tempfile.gettempdir()})

    def _count(self, tool: str, code: str, prompt_id: str, result: ToolResult) -> None:
        self.counts["calls"] += 1
        self.counts[f"{tool}/calls"] += 1
        self.seconds += result.seconds
        if result.limit:
            name = f"{tool}/limit/{result.limit}"
            self.counts[name] += 1
            if self.counts[name] <= LOGGED or self.counts[name] % 100 == 0:
                log.warning(
                    "tool %s, prompt %s: ended by the limit %r after %.1f s: %r",
                    tool, prompt_id, result.limit, result.seconds, code[:200],
                )  # fmt: skip


def shared_sandbox(limits: ToolLimits, workers: int = 2) -> Sandbox:
    """The sandbox of this event loop with these limits; `functions.close_shared` closes it."""
    return shared((limits, workers), lambda: Sandbox(limits, workers))
