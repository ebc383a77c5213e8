"""Weights on disk: one directory per version, complete or absent, readable by SGLang and by transformers.

Buckets are written as safetensors shards when they arrive; the directory gets its final name after the last one.

- On a RAM disk the files of the previous version are overwritten in place. Their pages exist already and are pinned
  for CUDA, so a bucket costs one copy at the speed of the bus. Allocating pages at every step is far slower.
  The previous version is useless by then: no server may serve it any more.
- A background snapshot (`begin(background=True)`) is completed by a thread after `commit`: on a RAM disk when the GPU's
  copies have ended, elsewhere when the thread has written the files from a copy in host memory. Training waits for
  neither, unless they are slower than a step.

The versions of one process are in a directory of its own, whose lock file it holds for as long as it lives. The next
process on the same host removes directories whose owner is dead: after kill -9 nobody else would free that memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from itertools import count
from pathlib import Path
from threading import Thread

from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.engines.sglang.weights.snapshot_file import HostCopy, MappedFile, bucket_bytes

FILES_TO_COPY = ("*.json", "merges.txt", "vocab.txt", "*.model", "*.jinja")
PREFIX = "megatron-dapo-weights"
LOCK = "owner.lock"
RAM_DISKS = ("tmpfs", "ramfs")
_serial = count()


class Snapshot:
    """Versions under `directory`; a new complete version replaces the one before."""

    def __init__(self, directory: str | Path, model: str | Path) -> None:
        """`model`: the HF directory whose configuration and tokenizer files are copied beside the weights."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{_start_time()}-{next(_serial)}"
        self._root = Path(directory) / f"{PREFIX}-{owner}"
        self.model = model
        self.in_ram = is_ram_disk(Path(directory))
        self._lock: int | None = None
        self._partial: Path | None = None
        self._index: dict[str, str] = {}
        self._size = 0
        self.current: Path | None = None
        self._files: list[MappedFile] = []  # on a RAM disk: the version's files, in the order of the buckets
        self._copies: list[HostCopy] = []  # elsewhere, in the background: the buckets in host memory
        self._background = False
        self._buckets = 0
        self._thread: Thread | None = None  # completes the version, and removes the one before
        self._error: OSError | None = None  # of the thread

    def _claim(self) -> None:
        """Creates the directory of this process; it has its name only after its lock is taken."""
        unnamed = self._root.with_name(f".{self._root.name}")
        unnamed.mkdir(parents=True)
        self._lock = os.open(unnamed / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self._root)

    def begin(self, version: int, *, background: bool = False) -> None:
        """`background`: `commit` may return before the files exist; `wait` returns when they do."""
        self.wait()
        self._partial = self._root / f"version-{version}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            if self._lock is None:
                self._claim()
            if self.in_ram and self._files and self.current is not None:
                self.current.rename(self._partial)
                self.current = None
            else:
                self._partial.mkdir(parents=True)
                self._copy_model_files(self._partial)
        except OSError as error:
            raise self._unwritable(self._root, error) from error
        self._index, self._size, self._buckets = {}, 0, 0
        self._background = background

    def _copy_model_files(self, folder: Path) -> None:
        for pattern in FILES_TO_COPY if self.model else ():
            for path in Path(self.model).glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, folder)

    def add(self, bucket: Bucket) -> None:
        """The bucket's memory may be reused on return, after its `readers` if it is a FlatBucket."""
        assert self._partial is not None
        self._buckets += 1
        name = f"model-{self._buckets:05d}.safetensors"
        try:
            if self._background and not self.in_ram:
                self._copy(bucket)
            else:
                self._write(self._partial / name, bucket)
        except OSError as error:
            raise self._unwritable(self._partial, error) from error
        self._index |= {key: name for key, _ in bucket}
        self._size += bucket_bytes(bucket)

    def _write(self, path: Path, bucket: Bucket) -> None:
        number = self._buckets - 1
        if not self.in_ram:
            MappedFile(path, bucket).fill(bucket)
            return
        if number < len(self._files) and not self._files[number].fits(bucket):
            self._drop_files(number)
        if number == len(self._files):
            self._files.append(MappedFile(path, bucket, keep=True))
        self._files[number].fill(bucket)

    def _copy(self, bucket: Bucket) -> None:
        number = self._buckets - 1
        if number < len(self._copies) and not self._copies[number].fits(bucket):
            del self._copies[number:]
        if number == len(self._copies):
            self._copies.append(HostCopy(bucket))
        self._copies[number].fill(bucket)

    def _drop_files(self, first: int) -> None:
        """Drops the files from this bucket on: the version before had other ones."""
        for number, file in enumerate(self._files[first:], first):
            file.close()
            if self._partial is not None:
                (self._partial / f"model-{number + 1:05d}.safetensors").unlink(missing_ok=True)
        del self._files[first:]

    def commit(self) -> Path:
        """The version is complete. In the background it becomes `current` later."""
        assert self._partial is not None
        self._drop_files(self._buckets)
        del self._copies[self._buckets :]
        partial, self._partial = self._partial, None
        final, before = partial.with_suffix(""), self.current
        if not self._background:
            self._complete(partial, final)
        self._thread = Thread(target=self._finish, args=(partial, final, before), name="snapshot")
        self._thread.start()
        return final

    def _finish(self, partial: Path, final: Path, before: Path | None) -> None:
        """In the thread."""
        try:
            if self._background:
                self._complete(partial, final)
        except OSError as error:
            self._error = error
            shutil.rmtree(partial, ignore_errors=True)
        if before is not None and before != final:
            shutil.rmtree(before, ignore_errors=True)

    def _complete(self, partial: Path, final: Path) -> None:
        for file in self._files:
            file.wait()
        for number, copy in enumerate(self._copies if self._background else ()):
            copy.write(partial / f"model-{number + 1:05d}.safetensors")
        index = {"metadata": {"total_size": self._size}, "weight_map": self._index}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self.current = final

    @property
    def exists(self) -> bool:
        """Whether a version is complete, or will be when `wait` returns."""
        return self.current is not None or self._thread is not None

    def wait(self) -> None:
        """Until the thread of the last `commit` has ended. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise self._unwritable(self._root, error) from error

    def _unwritable(self, path: Path, error: OSError) -> EngineError:
        return EngineError(f"cannot write weights to {path} (rollout.weights.directory): {error}")

    def discard(self) -> None:
        """Deletes a version that did not become complete."""
        if self._partial is not None:
            self._drop_files(0)
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def close(self) -> None:
        with contextlib.suppress(EngineError):
            self.wait()
        self._drop_files(0)
        self._copies.clear()
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self.current = self._lock = None


def is_ram_disk(path: Path) -> bool:
    """Whether files below `path` are in memory; the directory need not exist yet."""
    path = path.absolute()
    best, kind = Path("/"), ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split(" ")
        point = Path(mount.encode().decode("unicode_escape"))
        if path.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, found
    return kind in RAM_DISKS


def remove_dead_snapshots(directory: Path) -> list[Path]:
    """Removes what processes of this host left below `directory` when they died; returns the removed directories.

    A live owner holds the lock, in whatever container it runs. Directories of other hosts are left alone: on a shared
    file system a lock may be visible on its own host only.
    """
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}-{socket.gethostname()}-*")):
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except OSError:
            pass  # its owner lives, or the file system has no locks
        finally:
            os.close(lock)
    return removed


def _start_time() -> str:
    """Of this process, in clock ticks since boot, with the boot's id: no other process ever has the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().partition("-")[0]
    return f"{Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}-{boot}"
