"""A command under its supervisor, as the process that starts it sees it.

The command and everything it starts end with it, at `end`, and when this process dies. The supervisor is the first
process of a session; should somebody kill -9 the supervisor itself, this process kills what is left of that session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from megatron_dapo.processes import supervisor

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
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
                state, _, _, its_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its_session) == session and state not in "ZX":
                    found.append(int(path.name))
    return found


def _kill_session(session: int) -> None:
    """Also kills what is forked meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := members(session)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 2)
