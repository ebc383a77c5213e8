"""An output directory that appears complete or not at all.

Everything is written under a hidden temporary name beside the destination, flushed to disk and renamed. The next run
recognises what an interrupted one left by that name, and removes it. A lock keeps two runs from writing at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_dapo.files import INDEX, SINGLE, fsync_path, fsync_tree
from megatron_dapo.weights.locate import CONFIG, METADATA, TRACKER
from megatron_dapo.weights.mapping import WeightsError

_MARKS = (TRACKER, CONFIG, METADATA, "config.json", SINGLE, INDEX)


@contextlib.contextmanager
def new_directory(path: Path, need: int, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` if the block ends without error. `need`: bytes to be written."""
    path = path.absolute()
    temporary, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("incomplete", "replaced"))
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_free(path, overwrite)
        lock = _lock(path)
        _clean(path, temporary, old)
        check_space(path.parent, need)
        temporary.mkdir()
        try:
            yield temporary
            fsync_tree(temporary)
            _publish(temporary, path, old)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise WeightsError(f"{path}: cannot write there ({error.strerror or error})") from error
    finally:
        if lock is not None:
            _unlock(path, lock)


def check_free(path: Path, overwrite: bool) -> None:
    """An existing destination needs --overwrite and is replaced only if it looks like a checkpoint."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        return
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


def _lock_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _lock(path: Path) -> int:
    name = _lock_name(path)
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
        raise WeightsError(f"{path}: another conversion is writing it ({name} is locked); wait for it")
    return fd


def _unlock(path: Path, fd: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(_lock_name(path))
    os.close(fd)


def _clean(path: Path, temporary: Path, old: Path) -> None:
    """Finish or undo what an interrupted run left behind."""
    if temporary.exists():
        shutil.rmtree(temporary)
    if old.exists():
        if os.path.lexists(path):
            shutil.rmtree(old)
        else:
            os.rename(old, path)


def _publish(temporary: Path, path: Path, old: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    replaced = os.path.lexists(path)
    if replaced:
        os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        if replaced:
            os.rename(old, path)
        raise
    fsync_path(path.parent)
    if replaced:
        shutil.rmtree(old)
