"""Checks of storage: the run directory with its speed and free space, room for weight updates, /dev/shm, the clock."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.doctor.check import Check

GIB = 1 << 30
SLOW_MB_PER_SECOND = 200
LOCAL = {"ext4", "ext3", "xfs", "btrfs", "overlay", "tmpfs"}  # file systems that other nodes cannot see
WRITE_BYTES = 64 << 20
MOST_SKEW_SECONDS = 2.0
# Bytes of a checkpoint per parameter: bf16 weights, and the optimizer's fp32 copy and two moments.
CHECKPOINT_BYTES_PER_PARAMETER = 14


def existing_parent(path: Path) -> Path:
    """The path itself or its nearest existing parent: the run creates missing folders."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def run_directory(
    run_dir: Path, nodes: int = 1, clock: Callable[[], float] = time.perf_counter, mounts: Path = Path("/proc/mounts")
) -> Check:
    """The run directory is writable, fast enough, and visible to other nodes."""
    parent = existing_parent(run_dir)
    if not parent.is_dir():
        return Check("run directory", "fail", f"{parent} is a file", "choose another trainer.run_dir")
    try:
        speed = write_speed(parent, clock)
    except OSError as error:
        return Check("run directory", "fail", f"{parent} is not writable: {error.strerror or error}", "choose "
                     "another trainer.run_dir, or change its permissions or quota")  # fmt: skip
    kind = file_system(parent, mounts)
    found = f"{run_dir} (on {kind}), {speed:,.0f} MB/s written"
    if nodes > 1 and kind in LOCAL:
        return Check("run directory", "warn", found, f"{kind} is local to this node, and slurm.nodes is {nodes}: "
                     "choose a trainer.run_dir on a shared file system")  # fmt: skip
    if speed < SLOW_MB_PER_SECOND:
        return Check("run directory", "warn", found, "checkpoints will be slow; use a parallel file system, or save "
                     "less often (trainer.checkpoint.every)")  # fmt: skip
    return Check("run directory", "ok", found)


def write_speed(folder: Path, clock: Callable[[], float] = time.perf_counter, size: int = WRITE_BYTES) -> float:
    """MB/s of a file written and flushed to disk. The file is removed."""
    block = os.urandom(1 << 20)
    started = clock()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = clock() - started
    return size / 1e6 / max(seconds, 1e-9)


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`: ext4, nfs4, lustre, …"""
    best = ("", "an unknown file system")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return best[1]
    for line in lines:
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def free_disk(run_dir: Path, parameters: int, keep: int = 1, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """There is room for the kept checkpoints and the one being written."""
    free = usage(existing_parent(run_dir)).free
    needed = (keep + 1) * CHECKPOINT_BYTES_PER_PARAMETER * parameters
    found = f"{free / GIB:,.0f} GiB free"
    if parameters and free < needed:
        return Check("disk", "fail", f"{found}, but {keep + 1} checkpoints take {needed / GIB:,.0f} GiB", "make room, "
                     "or choose another trainer.run_dir, or keep fewer (trainer.checkpoint.keep)")  # fmt: skip
    if free < 20 * GIB:
        return Check("disk", "warn", found, "there is little room for checkpoints, samples and logs")
    return Check("disk", "ok", found + (f"; {keep + 1} checkpoints take {needed / GIB:,.0f} GiB" if parameters else ""))


def weights_directory(folder: Path, weight_bytes: int, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """Weight updates are written here, and two versions may exist at once. The run creates the folder."""
    there = existing_parent(folder)
    try:
        _touch(there)
    except OSError as error:
        return Check("weights", "fail", f"{folder} is not writable: {error.strerror}", "set "
                     "rollout.weights.directory to a folder that trainer and engines share")  # fmt: skip
    free = usage(there).free
    found = f"{folder}: {free / GIB:.1f} GiB free"
    if free < 2 * weight_bytes:
        return Check("weights", "fail", f"{found}; two versions of the weights take {2 * weight_bytes / GIB:.1f} GiB",
                     "enlarge it (/dev/shm: docker --shm-size, mount -o remount,size=…), set rollout.weights.directory "
                     "to a fast disk, or use another rollout.weights.transport")  # fmt: skip
    return Check("weights", "ok", found)


def shared_memory(folder: Path = Path("/dev/shm"), usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """NCCL and data loaders use /dev/shm."""
    if not folder.is_dir():
        return Check("shared memory", "fail", f"{folder} does not exist", "mount it: NCCL uses it between the ranks of "
                     "a node")  # fmt: skip
    free, total = usage(folder).free, usage(folder).total
    found = f"{folder}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return Check("shared memory", "warn", found, "NCCL needs more: enlarge it (docker --shm-size=16g)")
    return Check("shared memory", "ok", found)


def clock_skew(
    folder: Path, now: Callable[[], float] = time.time, stamp: Callable[[Path], float] | None = None
) -> Check:
    """This machine's clock agrees with the file system's (the file server's, where it is shared)."""
    parent = existing_parent(folder)
    skew = (stamp or _touch)(parent) - now()
    found = f"{skew:+.1f} s between this clock and that of {parent}"
    if abs(skew) > MOST_SKEW_SECONDS:
        return Check("clock", "warn", found, "clocks differ, so logs and heartbeats of nodes cannot be compared: start "
                     "chronyd or ntpd")  # fmt: skip
    return Check("clock", "ok", found)


def _touch(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime
