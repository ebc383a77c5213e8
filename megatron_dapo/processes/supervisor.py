"""Runs a command and kills everything that the command leaves behind.

    python -I -S supervisor.py PARENT_PID COMMAND…

When the command ends, when END arrives, or when the parent dies (even by kill -9), no descendant of the command may go
on, not even one that detached itself (setsid, double fork). This process is the *subreaper* of them all: the kernel
makes it the parent of every orphaned descendant, so it kills until none is left. It touches no other process. It exits
as the command did, with the same code or signal.

The command has a process group of its own in this process's session; ASK sends SIGTERM to that group. Slurm signals
every process of a step, but means the trainer: this process ignores those signals, and the command starts with SIGUSR1
and SIGUSR2 ignored. It waits for signals (sigtimedwait) and has no handlers: a handler that ran just before a wait
would go unnoticed until the wait ends.

Run by path and without site packages, so that it starts in milliseconds and stays small. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of prctl
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PARENT_DIED = signal.SIGHUP
NOT_EXECUTABLE = 127
LOOK_SECONDS = 2.0  # between two looks for the parent, if no signal comes
if sys.platform == "linux":
    END, ASK = signal.SIGRTMIN, signal.SIGRTMIN + 1  # nobody else sends them
    AWAITED = (signal.SIGCHLD, PARENT_DIED, END, ASK)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """From now on the kernel sends `number` to this process when the thread that started it ends. Exits at once if
    `parent` has ended. Only Linux can do this; elsewhere it does nothing."""
    if sys.platform == "linux":
        _prctl(SET_DEATH_SIGNAL, number)
        if os.getppid() != parent:
            os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked by whoever started this process
    _prctl(SET_CHILD_SUBREAPER, 1)
    end_with_parent(parent, PARENT_DIED)
    child = _start(command)
    status = _wait(child, parent)
    _kill_descendants(child)
    if status is None:
        return 128 + signal.SIGTERM
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _start(command: list[str]) -> int:
    me = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            end_with_parent(me)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(NOT_EXECUTABLE)
    with contextlib.suppress(OSError):  # done already, by the child
        os.setpgid(child, child)
    # The command's socket: its other end must see when the command has closed it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    return child


def _wait(child: int, parent: int) -> int | None:
    """The status of the command; None if it still runs, but must end."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # also reaps orphans
                if ended[0] == child:
                    return ended[1]
        if os.getppid() != parent:
            return None
        found = signal.sigtimedwait(AWAITED, LOOK_SECONDS)
        if found is not None and found.si_signo == END:
            return None
        if found is not None and found.si_signo == ASK:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)


def _kill_descendants(child: int) -> None:
    """Returns when none is left. Processes whose parents die here become our children and are killed next."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for pid in [pid for pid, _, parent, _ in processes() if parent == os.getpid()]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def processes() -> Iterator[tuple[int, str, int, int]]:
    """(pid, state, parent, session) of every process. The name, which is before them in the file, may be no text."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{name}/stat", errors="replace") as file:
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
            yield int(name), state, int(parent), int(session)


def _die_of(number: int) -> None:
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
