"""An output directory that appears complete or not at all.

Everything is written under a hidden temporary name beside the destination, flushed to disk and renamed. An empty mount
point cannot be renamed: there, the temporary directory is inside, and its entries are moved up, the decisive ones last.
After an error nothing is left. What a killed run left is recognised by its name: if the plan of the conversion is still
the same, it is continued, else removed. One that nobody continues for a week is removed by the next conversion into the
same folder. A lock keeps two runs from writing at once. Several processes may write one directory together
(`CopyGroup`).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.files import (
    INDEX,
    SINGLE,
    collect,
    fsync_path,
    fsync_tree,
    hand_in,
    publish_directory,
    write_atomically,
)
from megatron_dapo.weights.locate import CONFIG, METADATA, TRACKER
from megatron_dapo.weights.mapping import WeightsError

PROGRESS = ".progress"  # in the unfinished directory: the plan, marks of finished files, notes of ranks
_PLAN = "plan"
_MARKS = (TRACKER, CONFIG, METADATA, "config.json", SINGLE, INDEX)
_MOUNT_ENTRIES = {"lost+found", ".snapshot", ".incomplete", ".replaced", ".lock"}
_POLL_SECONDS = 0.2
_ABANDONED_SECONDS = 7 * 86400.0
_START_SECONDS = 600.0  # how long ranks wait for the first one to start


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """This process among those that convert together, for example the tasks of an `srun` over several nodes. `token` is
    the same in all, and new for every start."""

    rank: int = 0
    size: int = 1
    token: str = ""

    @classmethod
    def from_environment(cls) -> CopyGroup:
        """The tasks of an srun step, or the ranks of torchrun; alone otherwise (also in a batch script itself)."""
        env = os.environ
        if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in env:
            token = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}.{env.get('SLURM_RESTART_COUNT', 0)}"
            return cls(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), token)
        if "TORCHELASTIC_RUN_ID" in env and int(env.get("WORLD_SIZE", 1)) > 1:
            launcher = os.getppid() if env["WORLD_SIZE"] == env.get("LOCAL_WORLD_SIZE") else env["MASTER_PORT"]
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), f"{env['TORCHELASTIC_RUN_ID']}.{launcher}")
        return cls()

    def owns(self, file: int) -> bool:
        return file % self.size == self.rank

    def start(self, notes: Path) -> None:
        """Rank 0, when the directory is ready: the others may write."""
        for note in notes.glob("rank_*.json"):
            note.unlink()
        if self.size > 1:
            write_atomically(notes / "start", self.token)

    def wait_for_start(self, notes: Path) -> None:
        def started() -> bool:
            try:
                return (notes / "start").read_text() == self.token
            except OSError:
                return False

        if not _wait(started, _START_SECONDS):
            raise WeightsError(f"rank 0 has not created {notes.parent} within {_START_SECONDS:.0f} s; see its messages")

    def hand_in(self, notes: Path, found: list[str], kept: int = 0, error: str | None = None) -> None:
        """Every rank but the first: its files are written, or why not."""
        hand_in(notes, self.rank, {"not_finite": found, "kept": kept, "error": error})

    def collect(self, notes: Path) -> tuple[list[str], int]:
        """Rank 0: waits for the notes of all others and joins them. A failure of one is an error."""
        joined: list[str] = []
        kept = 0
        for rank, content in collect(notes, self.size, time.sleep, _POLL_SECONDS):
            if content["error"]:
                raise WeightsError(f"rank {rank}: {content['error']}")
            joined += content["not_finite"]
            kept += content["kept"]
        return joined, kept

    def wait_for_end(self, temporary: Path, path: Path) -> None:
        """Every rank but the first: waits until rank 0 has published or given up."""
        _wait(lambda: not temporary.exists())
        if not path.exists():
            raise WeightsError(f"{path} was not written; rank 0's message says why")


def _wait(condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _hidden(path: Path, suffix: str) -> Path:
    """Where a destination is prepared: beside it, or inside if it is a mount point."""
    return path / f".{suffix}" if _is_mount(path) else path.with_name(f".{path.name}.{suffix}")


def _is_mount(path: Path) -> bool:
    return path.is_dir() and os.path.ismount(path)


@contextlib.contextmanager
def new_directory(
    path: Path, need: int, *, overwrite: bool = False, plan: str = "", group: CopyGroup | None = None
) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` if the block ends without error.

    `need`: bytes to be written. `plan`: describes source and options; a killed run with the same plan is continued.
    `group`: with several processes, rank 0 creates and publishes, and the others join.
    """
    path = path.absolute()
    group = group or CopyGroup()
    try:
        inside = _joined(path, group) if group.rank else _created(path, need, overwrite, plan, group)
        with inside as directory:
            yield directory
    except OSError as error:
        raise WeightsError(f"{path}: cannot write there ({error.strerror or error})") from error


@contextlib.contextmanager
def _created(path: Path, need: int, overwrite: bool, plan: str, group: CopyGroup) -> Iterator[Path]:
    temporary, lock = _hidden(path, "incomplete"), _hidden(path, "lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path, lock)
    try:
        _clean(path, temporary, plan)
        check_free(path, overwrite)  # another conversion may have ended just before the lock was free
        _remove_abandoned(path.parent, temporary)
        check_space(path if _is_mount(path) else path.parent, need - _bytes_in(temporary))
        (temporary / PROGRESS).mkdir(parents=True, exist_ok=True)
        write_atomically(temporary / PROGRESS / _PLAN, plan)
        group.start(temporary / PROGRESS)
        try:
            yield temporary
            shutil.rmtree(temporary / PROGRESS)
            fsync_tree(temporary)
            check_free(path, overwrite)  # nobody else has to know about the lock
            _publish(path, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock)
        os.close(descriptor)


@contextlib.contextmanager
def _joined(path: Path, group: CopyGroup) -> Iterator[Path]:
    temporary = _hidden(path, "incomplete")
    notes = temporary / PROGRESS
    group.wait_for_start(notes)
    try:
        yield temporary
    except BaseException as error:
        with contextlib.suppress(OSError):
            group.hand_in(notes, [], error=f"{type(error).__name__}: {error}")
        raise
    group.wait_for_end(temporary, path)


def check_free(path: Path, overwrite: bool) -> None:
    """An existing destination needs --overwrite and is replaced only if it looks like a checkpoint."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        return
    if _is_mount(path):
        if {entry.name for entry in path.iterdir()} <= _MOUNT_ENTRIES:
            return
        raise WeightsError(f"{path} is a mount point and not empty; choose a folder in it as destination")
    if not overwrite:
        raise WeightsError(f"{path} exists; choose another destination or pass --overwrite to replace it")
    if path.is_symlink() or not path.is_dir() or not any((path / mark).exists() for mark in _MARKS):
        raise WeightsError(
            f"{path} does not look like a checkpoint; it is not replaced. Remove it yourself if you want that"
        )


def check_space(parent: Path, need: int) -> None:
    free = shutil.disk_usage(parent).free
    if need > free:
        raise WeightsError(
            f"{parent}: no space: {need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "free some space or choose another destination"
        )


def _bytes_in(folder: Path) -> int:
    """Bytes on disk; files may have been allocated but not written."""
    return sum(512 * p.stat().st_blocks for p in folder.rglob("*") if p.is_file()) if folder.exists() else 0


def _lock(path: Path, name: Path) -> int:
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = name.stat().st_ino != os.fstat(fd).st_ino
    except (BlockingIOError, FileNotFoundError):  # its last holder has removed it
        taken = True
    except OSError:  # a file system without locks
        taken = False
    if taken:
        os.close(fd)
        raise WeightsError(f"{path}: another conversion is writing it ({name} is locked); wait for it")
    return fd


def _clean(path: Path, temporary: Path, plan: str) -> None:
    """Finish or undo what an interrupted run left behind."""
    old = _hidden(path, "replaced")
    try:
        same = bool(plan) and (temporary / PROGRESS / _PLAN).read_text() == plan
    except OSError:
        same = False
    if temporary.exists() and not same:
        shutil.rmtree(temporary)
    elif same:
        _keep_finished(temporary)
    if old.exists():
        if os.path.lexists(path):
            shutil.rmtree(old)
        else:
            os.rename(old, path)


def _remove_abandoned(parent: Path, mine: Path) -> None:
    """Unfinished conversions beside this one that nothing has written to for a week, and that no run has locked."""
    for other in parent.glob(".*.incomplete"):
        with contextlib.suppress(OSError, WeightsError):  # it may end meanwhile, or be of another user
            plan, lock = other / PROGRESS / _PLAN, other.with_suffix(".lock")
            stamps = [p.stat().st_mtime for p in other.rglob("*")] if plan.is_file() else []
            if other == mine or time.time() - max(stamps, default=math.inf) < _ABANDONED_SECONDS:
                continue
            descriptor = _lock(other, lock)
            shutil.rmtree(other)
            os.unlink(lock)
            os.close(descriptor)


def _keep_finished(temporary: Path) -> None:
    """Remove everything but files that were complete when the run was killed."""
    for file in [p for p in temporary.rglob("*") if p.is_file() and p.parent.name != PROGRESS]:
        if not (temporary / PROGRESS / f"{file.name}.done").exists():
            file.unlink()


def _publish(path: Path, temporary: Path) -> None:
    if _is_mount(path):
        for entry in sorted(temporary.iterdir(), key=lambda entry: (entry.name in _MARKS, entry.name)):
            os.rename(entry, path / entry.name)
        temporary.rmdir()
        fsync_path(path)
        return
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    publish_directory(temporary, path, _hidden(path, "replaced"))
