"""Runs a grading process and kills everything that it leaves behind.

    python supervisor.py PARENT_PID FD COMMAND…

User graders start programs. When a grading process ends, is killed for a limit, or loses its parent, none of its
descendants may go on, also not those that detached themselves (setsid, double fork). This process is the *subreaper*
of all of them: the kernel makes it the parent of every orphaned descendant, so it can kill until none is left. It
ends when the command ends, on END, and when its parent dies; its exit code is the command's, or 128 + signal. Signals
that Slurm sends to every process of a step (SIGTERM, SIGUSR1) are for the trainer: grading goes on.

Run by path and without site packages, so that it starts in milliseconds and stays small. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
END = signal.SIGRTMIN  # nobody else sends it


class _Terminated(BaseException):
    pass


def _terminate(number: int, frame: object) -> None:
    # The signal comes again when the next parent dies. An exception then would interrupt the interpreter's shutdown.
    signal.signal(END, lambda *_: None)
    raise _Terminated


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _start(command: list[str], descriptor: int) -> int:
    """Fork and exec the command in its own session; it dies with this process."""
    me = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)  # the parent sees the end of the socket when the command has ended
        return pid
    try:
        os.setsid()
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == me:
            os.set_inheritable(descriptor, True)
            signal.signal(END, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
            os.execv(command[0], command)
    finally:
        os._exit(127)


def _children() -> list[int]:
    """Processes whose parent is this one."""
    me, found = str(os.getpid()), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    stat = file.read()
            except OSError:  # it has ended
                continue
            if stat.rpartition(")")[2].split()[1] == me:
                found.append(int(name))
    return found


def _kill(pid: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)


def _kill_descendants(command: int) -> None:
    """Returns when no descendant is left. Those whose parents die here become our children and are killed next."""
    signal.signal(END, signal.SIG_IGN)
    while True:
        _kill(command, group=True)
        for pid in _children():
            _kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> int:
    parent, descriptor, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    signal.signal(END, _terminate)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    _prctl(_SET_CHILD_SUBREAPER, 1)
    _prctl(_SET_DEATH_SIGNAL, END)
    if os.getppid() != parent:  # it died before we asked to be told
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {END})  # until the command's pid is known
    pid, status = _start(command, descriptor), None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
        while status is None:
            ended, code = os.waitpid(-1, 0)  # also reaps orphans
            status = code if ended == pid else None
    except _Terminated:
        pass
    _kill_descendants(pid)
    if status is None:
        return 128 + signal.SIGTERM
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
