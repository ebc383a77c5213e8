"""Runs a command in a session of its own, and ends the whole session when the command or the caller dies.

    python guard.py CALLER_PID COMMAND...

SGLang's worker processes ask the kernel to die with their parent, but only after half a minute of imports: a caller
that is killed while a server starts would leave them behind with GPU memory. The guard is told by the kernel when its
caller is gone and then kills every process of the session. It exits as the command did. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
CALLER_DIED = signal.SIGHUP
IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm sends them to all processes; they are for the trainer
NOT_EXECUTABLE = 127
KILL_SECONDS = 5.0  # a process in the kernel, for example in a driver, may take longer; it dies when it returns


def main() -> int:
    caller, command = int(sys.argv[1]), sys.argv[2:]
    session = os.getpid()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command gets it too, and the guard waits for its end
    signal.signal(CALLER_DIED, lambda *_: _end(session))
    die_with_parent(CALLER_DIED)
    if os.getppid() != caller:
        return 1
    child = os.fork()
    if child == 0:
        _exec(command, session)
    while True:
        try:
            _, status = os.waitpid(child, 0)
            break
        except InterruptedError:
            continue
    kill_session(session, spare=session)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(session, os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _exec(command: list[str], parent: int) -> None:
    for number in (signal.SIGTERM, CALLER_DIED):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    try:
        if os.getppid() == parent:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(NOT_EXECUTABLE)


def _end(session: int) -> None:
    kill_session(session, spare=session)
    os._exit(1)


def die_with_parent(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def kill_session(session: int, spare: int = 0) -> None:
    """Kills every process of the session, also those that are forked meanwhile. The session's first process must not
    have been reaped: until then no other session has its number."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := [pid for pid in members(session) if pid != spare]) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def members(session: int) -> list[int]:
    """Processes of the session that have not ended."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, _, its_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue  # it ended meanwhile
            if int(its_session) == session and state not in "ZX":
                found.append(int(path.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
