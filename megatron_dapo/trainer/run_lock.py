"""One run directory, one run: a lock that names its holder, on local and shared file systems.

The lock is the file with the highest number in `run_dir/lock/`. Taking it means creating the next number with link(),
which is atomic on NFS and Lustre, too: of several processes exactly one succeeds. No file with the highest number is
ever removed or replaced by another process, so a slow contender cannot destroy a lock that was just taken.

A lock is free when
- its holder has released it,
- its holder ran in this process namespace of this machine and does not exist any more (pid and start time),
- its holder was an earlier start of this Slurm job (same job id, lower restart count): Slurm has ended it,
- its heartbeat has stood still for `STALE_SECONDS` by our own clock. The holder touches the file every `BEAT_SECONDS`.

A holder that finds a higher number, or that does not find its own file, has lost the lock: `verify` raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_dapo.checkpoints.run_dir import heal
from megatron_dapo.errors import LockLost, UserError
from megatron_dapo.files import create_atomically, explain, set_aside, write_atomically

BEAT_SECONDS = 10.0
STALE_SECONDS = 90.0
POLL_SECONDS = 1.0


class RunDirInUse(UserError):
    """Another run holds the lock; the message names it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds, or held, the lock."""

    host: str
    pid: int
    started: str  # of the process: kernel ticks since boot
    namespace: str  # boot id and pid namespace: pids can be compared only where these are equal
    job: str  # Slurm job id, or empty
    restarts: int  # of the Slurm job
    since: str
    token: str
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        environment = os.environ
        return cls(
            host=socket.gethostname(), pid=os.getpid(), started=_start_time(os.getpid()), namespace=_namespace(),
            job=environment.get("SLURM_JOB_ID", ""), restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            since=time.strftime("%Y-%m-%d %H:%M:%S"), token=uuid.uuid4().hex,
        )  # fmt: skip

    def __str__(self) -> str:
        job = f", Slurm job {self.job} restart {self.restarts}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}"

    def has_ended(self, me: Holder) -> bool:
        """Whether it is certain, without waiting, that this holder does not run any more."""
        if self.released:
            return True
        if self.job and self.job == me.job and self.restarts < me.restarts:
            return True
        return self.namespace == me.namespace and _start_time(self.pid) != self.started


UNKNOWN = Holder("an unknown host", 0, "", "", "", 0, "an unknown time", "")


class RunLock:
    """`with RunLock(run_dir) as lock:` holds the lock, or raises RunDirInUse."""

    def __init__(self, run_dir: str | Path, *, beat: float = BEAT_SECONDS, stale: float = STALE_SECONDS) -> None:
        self._run_dir = Path(run_dir)
        self._folder = Path(run_dir) / "lock"
        self._beat = beat
        self._stale = stale
        self._me = Holder.this_process()
        self._number = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        try:
            if self._run_dir.is_dir() and os.path.lexists(self._folder) and not self._folder.is_dir():
                _say(f"{self._folder} was in the way: it is now {set_aside(self._folder).name}")
            self._folder.mkdir(parents=True, exist_ok=True)
            self._number = self._take()
            self._remove_older()
        except OSError as error:
            why = explain(error, self._run_dir)
            raise UserError(f"trainer.run_dir: {self._run_dir} cannot be locked: {why}") from error
        for line in heal(self._run_dir):
            _say(line)
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, LockLost):
            self.verify()
            write_atomically(self._path(self._number), json.dumps({**asdict(self._me), "released": True}))

    def verify(self) -> None:
        """Raises LockLost if this run does not hold the lock any more. Forked children of the holder may call it."""
        try:
            successor, holder = _read(self._path(self._number + 1)), _read(self._path(self._number))
        except OSError:
            return  # the file system cannot be read: nothing shows that the lock is lost
        if successor is not None:
            raise LockLost(f"{self._run_dir} was taken over by another run ({successor})")
        if holder is None or holder.token != self._me.token:
            raise LockLost(f"the lock {self._path(self._number)} of this run was removed")

    # ---- taking it ----

    def _take(self) -> int:
        while True:
            number = self._highest()
            if number:
                self._wait_until_free(number)
            if self._create(number + 1):
                if self._highest() == number + 1:
                    return number + 1
                self._path(number + 1).unlink(missing_ok=True)  # others took and removed this number meanwhile

    def _highest(self) -> int:
        numbers = [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit()]
        return max(numbers, default=0)

    def _wait_until_free(self, number: int) -> None:
        """Returns when the lock of this number is free. Raises RunDirInUse when its holder shows that it lives."""
        path = self._path(number)
        holder = _read(path)
        seen, since = _modified(path), time.monotonic()
        while holder is not None and not holder.has_ended(self._me):
            if holder.namespace == self._me.namespace:
                raise self._in_use(holder)  # it runs here: nothing to wait for
            if time.monotonic() - since > self._stale:
                _say(f"{self._run_dir}: the run of {holder} has shown no sign of life for {self._stale:.0f} s; "
                     "taking over")  # fmt: skip
                return
            if time.monotonic() - since < self._poll():
                _say(f"{self._run_dir} is locked by {holder}; waiting up to {self._stale:.0f} s for a sign of life")
            time.sleep(self._poll())
            holder = _read(path)
            if holder is not None and not holder.released and _modified(path) != seen:
                raise self._in_use(holder)

    def _poll(self) -> float:
        return min(POLL_SECONDS, self._beat / 2)

    def _in_use(self, holder: Holder) -> RunDirInUse:
        return RunDirInUse(
            f"{self._run_dir} is in use by another run ({holder}): wait for it, stop it, or set another "
            f"trainer.run_dir. If you know that it has ended, remove {self._folder}"
        )

    def _create(self, number: int) -> bool:
        """Atomic, also where many processes on many machines try."""
        try:
            create_atomically(self._path(number), json.dumps(asdict(self._me)))
        except FileExistsError:
            return False
        return True

    def _remove_older(self) -> None:
        for path in self._folder.glob("*.json"):
            if path.stem.isdigit() and int(path.stem) < self._number:
                path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    # ---- the heartbeat ----

    def _keep_beating(self) -> None:
        path = self._path(self._number)
        while not self._end.wait(self._beat):
            with contextlib.suppress(OSError):  # `verify` reports a lost lock; an unreachable file system may come back
                os.utime(path)


def _read(path: Path) -> Holder | None:
    """The holder in this file; None if there is no such file, UNKNOWN if it is damaged: only a heartbeat shows that
    its holder lives."""
    for attempt in range(20):
        try:
            content = json.loads(path.read_text())
            return Holder(**{field.name: content[field.name] for field in fields(Holder)})
        except FileNotFoundError:
            return None
        except OSError:  # a stale NFS handle, for one
            if attempt == 19:
                raise
        except (ValueError, KeyError, TypeError):
            pass  # being written, on a file system without hard links
        time.sleep(0.1)
    return UNKNOWN


def _modified(path: Path) -> int:
    """Opened first, because NFS then asks the server instead of its own cache. 0 if there is no such file."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat, which tells a process from a later one with the same pid; empty if there is none."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if state in "ZX" else numbers[18]  # Z, X: it has ended, and its parent has not collected it yet
    except (OSError, IndexError):
        return ""


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return uuid.uuid4().hex  # unknown: never equal to another one


def _say(text: str) -> None:
    print(f"megatron-dapo: {text}", file=sys.stderr, flush=True)
