"""Runs a command in a session of its own, and ends the whole session when the command or the caller dies.

    python guard.py CALLER_PID COMMAND...

SGLang's worker processes ask the kernel to die with their parent, but only after half a minute of imports: a caller
that is killed while a server starts would leave them behind with GPU memory. The guard is told by the kernel when its
caller is gone and then kills every process of the session. It exits as the command did. Standard library only.

The guard waits for signals (sigtimedwait) and has no handlers: one that came just before a wait would be noticed only
after the wait.
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
AWAITED_SIGNALS = (signal.SIGCHLD, CALLER_DIED, signal.SIGTERM)  # the command gets SIGTERM too, and the guard waits
LOOK_SECONDS = 2.0  # without any signal
KILL_SECONDS = 5.0  # a process in the kernel, for example in a driver, may take longer; it dies when it returns


def main() -> int:
    caller, command = int(sys.argv[1]), sys.argv[2:]
    session = os.getpid()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED_SIGNALS)
    die_with_parent(CALLER_DIED)
    if os.getppid() != caller:
        return 1
    child = os.fork()
    if child == 0:
        _exec(command, session)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or os.getppid() != caller:
            break
        signal.sigtimedwait(AWAITED_SIGNALS, LOOK_SECONDS)
    kill_session(session, spare=session)
    if not ended:
        return 1
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED_SIGNALS)
        os.kill(session, os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _exec(command: list[str], parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED_SIGNALS)
    die_with_parent(signal.SIGKILL)
    try:
        if os.getppid() == parent:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(NOT_EXECUTABLE)


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
