"""A command under its supervisor, as the process that starts it sees it.

The command and everything it starts end with it, at `end`, and when this process dies. The supervisor is the first
process of a session; should somebody kill -9 the supervisor itself, this process kills what is left of that session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, cast

from megatron_dapo.processes import supervisor
from megatron_dapo.processes.frames import Frame, FrameBuffer, Header, encode

POLL_SECONDS = 0.01
KILL_SECONDS = 30.0  # a process in the kernel, for example in a driver, dies only when it returns
# Slurm, a terminal or a parent that dies may send these before the supervisor is ready for them.
_HELD_BACK = (*supervisor.IGNORED, supervisor.PARENT_DIED)


class SupervisedProcess:
    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        *,
        output: IO[bytes] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """`output`: for stdout and stderr, instead of ours. `descriptors`: what the command inherits. Raises OSError if
        it cannot start."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "no such file, or not executable", command[0])
        supervised = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), *command]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self._process = subprocess.Popen(
                supervised, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """Of the supervisor, which is also the number of the session."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code of the command, or minus the signal that ended it; None while it runs."""
        return None if self.alive() else self._process.returncode

    @property
    def status(self) -> str:
        """The end of the command, in words."""
        code = self.code
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def alive(self) -> bool:
        """Whether the command runs. If it does not, nothing that it started runs."""
        if self._process.returncode is not None:
            return False
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return True
        if found.si_status == signal.SIGKILL:  # perhaps the supervisor itself was killed
            _kill_session(self.pid)  # before it is reaped: until then no other session has its number
        self._process.wait()
        return False

    def ask_to_end(self) -> None:
        """SIGTERM to the command's process group."""
        self._signal(supervisor.ASK)

    def wait(self) -> int:
        """Blocks until the command ends; its exit code."""
        while self.alive():
            time.sleep(POLL_SECONDS)
        return self._process.returncode

    async def end(self, patience: float = 0.0) -> int:
        """Waits `patience` seconds, then kills the command and all its descendants. Returns the exit code."""
        await self._ended_within(patience)
        if self.alive():
            self._signal(supervisor.END)
            self._signal(signal.SIGCONT)  # somebody may have stopped the supervisor
            if not await self._ended_within(KILL_SECONDS):
                self._process.kill()
        return await asyncio.to_thread(self.wait) if self.alive() else self._process.returncode

    async def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return not self.alive()

    def _signal(self, number: int) -> None:
        if self.alive():
            self._process.send_signal(number)


def start_worker(command: Sequence[str], environment: dict[str, str]) -> tuple[SupervisedProcess, socket.socket]:
    """Starts a program whose last argument is the descriptor of a socket; returns our end of it."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as on_error:
        on_error.enter_context(ours)
        descriptor = theirs.fileno()
        process = SupervisedProcess([*command, str(descriptor)], environment, descriptors=[descriptor])
        on_error.pop_all()
        return process, ours


def members(session: int) -> list[int]:
    """Processes of the session that have not ended."""
    return [
        pid for pid, state, _, its_session in supervisor.processes() if its_session == session and state not in "ZX"
    ]


def _kill_session(session: int) -> None:
    """Also kills what is forked meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := members(session)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 2)


# A worker process as an event loop sees it: a Python program under a supervisor, with a socket for frames.


EXIT_SECONDS = 5.0  # after the end of its socket; a process that closed the socket and runs on is killed then


class ProcessEnded(Exception):
    """`code`: its exit code, or minus the signal that ended it."""

    def __init__(self, status: str, code: int) -> None:
        super().__init__(f"ended with {status}")
        self.code = code


# What Python and its libraries need; keys of services are not among it.
_NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w+|VIRTUAL_ENV|"
    r"CONDA_PREFIX|SSL_CERT_\w+|XDG_\w+|HF_HOME|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|MALLOC_\w+|COV\w+|SLURM_(?!JWT)\w+"
)


def worker_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """One thread, no GPU, the modules that this process can import, and of its variables only what Python needs and
    `names`: a worker may handle what others wrote."""
    return {name: value for name, value in os.environ.items() if _NEEDED.fullmatch(name) or name in names} | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


class WorkerProcess(asyncio.BufferedProtocol):
    """Belongs to one event loop."""

    def __init__(self, process: SupervisedProcess) -> None:
        self._process = process
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = FrameBuffer()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._next = 0
        self._ending: asyncio.Task[None] | None = None
        self.last_reply = time.monotonic()

    @classmethod
    async def start(cls, command: Sequence[str], environment: dict[str, str] | None = None) -> WorkerProcess:
        """A new interpreter: no fork of a process with threads and GPUs. Raises OSError if it cannot start."""
        process, connection = start_worker(command, worker_environment() if environment is None else environment)
        loop = asyncio.get_running_loop()
        try:
            return (await loop.create_unix_connection(lambda: cls(process), sock=connection))[1]
        except BaseException:
            connection.close()
            await process.end()
            raise

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def send(self, header: Header, *parts: Any, replies: int = 1) -> tuple[int, list[asyncio.Future[Frame]]]:
        """The number of the request, and the futures of its replies: `number`, `number` + 1, …"""
        first, loop = self._next, asyncio.get_running_loop()
        self._next += replies
        futures = {first + index: loop.create_future() for index in range(replies)}
        self._waiting |= futures
        if self._ending is not None and self._ending.done():
            self._fail()
        self._write({"number": first, **header}, *parts)
        return first, list(futures.values())

    def _write(self, header: Header, *parts: Any) -> None:
        if self._transport is not None:
            self._transport.write(encode(header, *parts))

    def cancel(self, number: int) -> None:
        """Nobody waits for this reply any more; the worker is told."""
        if self._waiting.pop(number, None) is not None:
            self._write({"number": number, "cancel": True})

    async def end(self, patience: float = 0.0) -> None:
        """Closes the socket, which tells a worker that waits to exit; kills it after `patience` seconds."""
        if self._transport is not None:
            self._transport.abort()
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(patience))
        elif not patience:
            await self._process.end()
        await asyncio.shield(self._ending)

    async def _end(self, patience: float) -> None:
        await self._process.end(patience)
        self._fail()

    def _fail(self) -> None:
        waiting, self._waiting = self._waiting, {}
        error = ProcessEnded(self._process.status, self._process.code or 0)
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may wait for it any more

    # ---- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.room()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_reply = time.monotonic()
        for header, parts in self._buffer.received(nbytes):
            future = self._waiting.pop(header["number"], None)
            if future is not None and not future.done():  # else cancelled meanwhile
                future.set_result((header, parts))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(EXIT_SECONDS))
