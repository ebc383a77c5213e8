"""A heartbeat per rank: a rank that hangs is found by another rank, and the attempt ends with the stacks of all ranks.

Each rank has a thread that writes `heartbeat/rank_R.json`: a heartbeat counter, a progress counter, and what the loop
does. Rank R reads the file of rank R+1; a single rank reads its own. By the reader's own clock a rank hangs if its
heartbeat stands still (the process is stopped) or if it makes no progress (it waits for something that never comes).
The reader then writes `heartbeat/ended` with the reason. A rank that finds this file writes its stacks to
`stacks_rank_R.txt` and exits.

A process whose interpreter is blocked cannot run this thread; faulthandler's own timer, which needs no interpreter,
writes its stacks. SIGUSR2 writes them at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from megatron_dapo.config.trainer import HeartbeatConfig
from megatron_dapo.files import remove, write_atomically

HUNG = 76  # exit code: a rank hung, see heartbeat/ended


def log_folder(run_dir: str | Path) -> Path:
    """logs/latest, if a launcher made one for this attempt; else logs."""
    logs = Path(run_dir) / "logs"
    return (logs / "latest").resolve() if (logs / "latest").exists() else logs


class Watchdog:
    def __init__(self, config: HeartbeatConfig, logs: Path, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._next = (rank + 1) % world_size
        self._world_size = world_size
        self._folder = logs / "heartbeat"
        self._stacks_path = logs / f"stacks_rank_{rank}.txt"
        self._stacks: TextIO | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._main = threading.get_ident()
        self._beats = self._progress = 0
        self._status: dict[str, Any] | None = None  # as last written
        self._doing = "starting"

    def mark(self, doing: str, progress: bool = True) -> None:
        """What the loop does, and whether it has made progress since the last call. Cheap: call it often."""
        self._progress += progress
        self._doing = doing

    def __enter__(self) -> Watchdog:
        if self._config.every <= 0:
            return self
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (f"rank_{self._rank}.json", "ended"):  # left by an earlier run
            remove(self._folder / name)
        self._stacks = self._stacks_path.open("a")
        with contextlib.suppress(ValueError):  # only the main thread may do this
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        if self._stacks is None:
            return
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(ValueError):
            faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()
        with contextlib.suppress(OSError):
            (self._folder / f"rank_{self._rank}.json").unlink(missing_ok=True)
            if not self._stacks_path.stat().st_size:
                self._stacks_path.unlink()

    # ---- in the heartbeat's thread ----

    def _run(self) -> None:
        assert self._stacks is not None
        seen = _Seen(time.monotonic())
        while not self._end.wait(self._config.every):
            faulthandler.dump_traceback_later(self._config.silent, file=self._stacks, exit=False)
            now = time.monotonic()
            self._beats += 1
            self._write()
            if reason := self._read_ended() or self._look(seen, now):
                self._end_attempt(reason)

    def _write(self) -> None:
        path = self._folder / f"rank_{self._rank}.json"
        self._status = {"beats": self._beats, "progress": self._progress, "doing": self._doing, "where": self._where(),
                        "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}  # fmt: skip
        self._status["gpu"] = gpu_status()
        text = json.dumps(self._status)
        try:
            write_atomically(path, text, fsync=False)
        except OSError:  # a full disk must not end a run that works: the file that is there needs no more room
            with contextlib.suppress(OSError), path.open("r+b") as file:
                file.write(text.encode().ljust(path.stat().st_size))

    def _where(self) -> str:
        """The innermost frame of the main thread. It distinguishes the ranks that wait from the one they wait for."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"

    def _look(self, seen: _Seen, now: float) -> str:
        """Why the next rank counts as hanging; empty if it does not. If this thread itself was late, the time starts
        again."""
        status = self._read(self._next)
        if status is None or now - seen.looked > self._config.silent / 2:
            seen.reset(now)
        seen.looked = now
        if status is None:
            return ""  # it has not started yet, or has ended properly
        silent, stuck = seen.update(status, now)
        who = f"rank {self._next} (pid {status['pid']} on {status['host']})"
        if silent > self._config.silent and self._next != self._rank:
            return f"{who} has been silent for {silent:.0f} s, last seen {status['doing']}, in {status['where']}"
        if stuck > self._config.stuck:
            return f"{who} has made no progress for {stuck:.0f} s while {status['doing']}, in {status['where']}"
        return ""

    def _end_attempt(self, reason: str) -> None:
        assert self._stacks is not None
        print(f"rank {self._rank} ends: {reason}; its stacks are in {self._stacks_path}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self._write_ended(reason)
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        os._exit(HUNG)

    def _write_ended(self, reason: str) -> None:
        ended = self._folder / "ended"
        if not ended.exists():
            ranks = [(rank, self._read(rank)) for rank in range(self._world_size)]
            table = [
                f"  rank {rank}: progress {s['progress']}, {s['doing']}, in {s['where']}" for rank, s in ranks if s
            ]
            write_atomically(ended, "\n".join([f"hanging: {reason}", *table]) + "\n", fsync=False)

    def _read_ended(self) -> str:
        try:
            return (self._folder / "ended").read_text().partition("\n")[0].removeprefix("hanging: ")
        except OSError:
            return ""

    def _read(self, rank: int) -> dict[str, Any] | None:
        if rank == self._rank:
            return self._status
        try:
            return dict(json.loads((self._folder / f"rank_{rank}.json").read_text()))
        except (OSError, ValueError):
            return None


class _Seen:
    """When the counters of the watched rank last changed, by our clock."""

    def __init__(self, now: float) -> None:
        self.looked = now
        self.reset(now)

    def reset(self, now: float) -> None:
        self._beat_at = self._progress_at = now
        self._beats = self._progress = -1

    def update(self, status: dict[str, Any], now: float) -> tuple[float, float]:
        """Seconds without a heartbeat, seconds without progress."""
        if status["beats"] != self._beats:
            self._beats, self._beat_at = status["beats"], now
        if status["progress"] != self._progress:
            self._progress, self._progress_at = status["progress"], now
        return now - self._beat_at, now - self._progress_at


def gpu_status() -> dict[str, float]:
    """Of this rank's GPU, with what other processes use, from NVML: bytes, and the share of the last second in which a
    kernel ran. NVML does not wait for CUDA, so a heartbeat may ask it. Empty without NVML."""
    if not torch.cuda.is_initialized():
        return {}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        handle, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # of kernels, of memory
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return {}
        found = {}
        if not nvml.nvmlDeviceGetMemoryInfo(handle, memory):
            found = {"memory_used_bytes": float(memory[2]), "memory_total_bytes": float(memory[0])}
        if not nvml.nvmlDeviceGetUtilizationRates(handle, rates):
            found["utilization_ratio"] = rates[0] / 100
        return found
    except (OSError, AttributeError, RuntimeError):
        return {}
