"""An output directory that appears complete or not at all.

Everything is written under a hidden temporary name beside the destination, flushed to disk and renamed. An empty mount
point cannot be renamed: there, the temporary directory is inside, and its entries are moved up, the decisive ones last.
After an error nothing is left. What a killed run left is recognised by its name: if the plan of the conversion is still
the same, it is continued, else removed. A lock keeps two runs from writing at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.files import INDEX, SINGLE, fsync_path, fsync_tree, publish_directory, write_atomically
from megatron_dapo.weights.copy import CopyGroup
from megatron_dapo.weights.locate import CONFIG, METADATA, TRACKER
from megatron_dapo.weights.mapping import WeightsError

PROGRESS = ".progress"  # in the unfinished directory: the plan, marks of finished files, notes of ranks
_PLAN = "plan"
_MARKS = (TRACKER, CONFIG, METADATA, "config.json", SINGLE, INDEX)
_MOUNT_ENTRIES = {"lost+found", ".snapshot", ".incomplete", ".replaced", ".lock"}


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a destination is prepared: beside it, or inside if it is a mount point."""

    path: Path
    is_mount: bool

    @classmethod
    def of(cls, path: Path) -> _Names:
        return cls(path, path.is_dir() and os.path.ismount(path))

    def _name(self, suffix: str) -> Path:
        return self.path / f".{suffix}" if self.is_mount else self.path.with_name(f".{self.path.name}.{suffix}")

    @property
    def temporary(self) -> Path:
        return self._name("incomplete")

    @property
    def old(self) -> Path:
        return self._name("replaced")

    @property
    def lock(self) -> Path:
        return self._name("lock")


@contextlib.contextmanager
def new_directory(
    path: Path, need: int, *, overwrite: bool = False, plan: str = "", group: CopyGroup | None = None
) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` if the block ends without error.

    `need`: bytes to be written. `plan`: describes source and options; a killed run with the same plan is continued.
    `group`: with several processes, rank 0 creates and publishes, and the others join.
    """
    names = _Names.of(path.absolute())
    group = group or CopyGroup()
    try:
        inside = _joined(names, group) if group.rank else _created(names, need, overwrite, plan, group)
        with inside as directory:
            yield directory
    except OSError as error:
        raise WeightsError(f"{path}: cannot write there ({error.strerror or error})") from error


@contextlib.contextmanager
def _created(names: _Names, need: int, overwrite: bool, plan: str, group: CopyGroup) -> Iterator[Path]:
    path, temporary = names.path, names.temporary
    path.parent.mkdir(parents=True, exist_ok=True)
    check_free(path, overwrite)
    lock = _lock(names)
    try:
        _clean(names, plan)
        check_space(path if names.is_mount else path.parent, need - _bytes_in(temporary))
        (temporary / PROGRESS).mkdir(parents=True, exist_ok=True)
        write_atomically(temporary / PROGRESS / _PLAN, plan)
        group.start(temporary / PROGRESS)
        try:
            yield temporary
            shutil.rmtree(temporary / PROGRESS)
            fsync_tree(temporary)
            _publish(names)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        _unlock(names, lock)


@contextlib.contextmanager
def _joined(names: _Names, group: CopyGroup) -> Iterator[Path]:
    notes = names.temporary / PROGRESS
    group.wait_for_start(notes)
    try:
        yield names.temporary
    except BaseException as error:
        with contextlib.suppress(OSError):
            group.hand_in(notes, [], error=f"{type(error).__name__}: {error}")
        raise
    group.wait_for_end(names.temporary, names.path)


def check_free(path: Path, overwrite: bool) -> None:
    """An existing destination needs --overwrite and is replaced only if it looks like a checkpoint."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        return
    if path.is_dir() and os.path.ismount(path):
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


def _lock(names: _Names) -> int:
    name = names.lock
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not name.exists() or name.stat().st_ino != os.fstat(fd).st_ino  # its last holder has removed it
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks
        taken = False
    if taken:
        os.close(fd)
        raise WeightsError(f"{names.path}: another conversion is writing it ({name} is locked); wait for it")
    return fd


def _unlock(names: _Names, fd: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(names.lock)
    os.close(fd)


def _clean(names: _Names, plan: str) -> None:
    """Finish or undo what an interrupted run left behind."""
    temporary, old, path = names.temporary, names.old, names.path
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


def _keep_finished(temporary: Path) -> None:
    """Remove everything but files that were complete when the run was killed."""
    for file in [p for p in temporary.rglob("*") if p.is_file() and p.parent.name != PROGRESS]:
        if not (temporary / PROGRESS / f"{file.name}.done").exists():
            file.unlink()


def _publish(names: _Names) -> None:
    temporary, path, old = names.temporary, names.path, names.old
    if names.is_mount:
        for entry in sorted(temporary.iterdir(), key=lambda entry: (entry.name in _MARKS, entry.name)):
            os.rename(entry, path / entry.name)
        temporary.rmdir()
        fsync_path(path)
        return
    publish_directory(temporary, path, old)
