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
import logging
import mmap
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.errors import EngineError
from megatron_dapo.files import file_system, safetensors_header, write_index
from megatron_dapo.sync.bucket import Bucket, FlatBucket, specs_of
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size, flat_starts, in_flat_order

log = logging.getLogger(__name__)

WRITERS = 8


class FileImage:
    """One bucket as the bytes of a safetensors file: a header, then the tensors, large elements first so that each one
    starts at a multiple of its element size."""

    def __init__(self, bucket: Bucket, path: Path | None = None, *, keep: bool = False) -> None:
        """In a file, which is mapped into memory; without `path` in host memory. `keep`: it is filled again, so it is
        pinned."""
        self._specs = _specs(bucket)
        head = safetensors_header((spec.name, spec.dtype, spec.shape) for spec in self._specs)
        self._head_size = len(head)
        *self._starts, size = (len(head) + start for start in flat_starts(self._specs))
        self.mapped = path is not None
        self._memory: Any
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with open(path, "wb+", opener=_for_owner) as file:
                # Reserved now: a full disk is then an error here, and not a SIGBUS in the middle of a copy.
                os.posix_fallocate(file.fileno(), 0, size)
                self._memory = mmap.mmap(file.fileno(), size)
        self._memory[: len(head)] = head
        self._pinned: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # the end of the copy that `fill` has started
        if keep and len(bucket):
            self._pin(bucket[0][1].device)

    def fits(self, bucket: Bucket) -> bool:
        """Whether the bucket has the tensors that this file was made for."""
        return self._specs == _specs(bucket)

    def _pin(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if int(status) == 0:
            self._pinned = whole
        else:
            log.warning(
                "host memory for a weight snapshot cannot be pinned (CUDA error %d): copies will be slow", status
            )

    def fill(self, bucket: Bucket) -> None:
        """Pinned memory and a flat bucket: starts the copy, and adds its end to the bucket's `readers`."""
        if isinstance(bucket, FlatBucket) and bucket.flat.nbytes and self._pinned is not None:
            self._fill_at_once(bucket)
            return
        tensors = dict(bucket)

        def copy(start: int, tensor: Tensor) -> None:
            if tensor.numel():
                target = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                if self._pinned is None and tensor.is_cuda:
                    # Touch every page first, in all threads; in a copy CUDA's driver would fault them in one by one.
                    target[:: mmap.PAGESIZE // target.element_size()].zero_()
                target.view(tensor.shape).copy_(tensor.detach())

        with ThreadPoolExecutor(WRITERS) as pool:
            places = zip(self._starts, self._specs, strict=True)
            for done in [pool.submit(copy, start, tensors[spec.name]) for start, spec in places]:
                done.result()

    def _fill_at_once(self, bucket: FlatBucket) -> None:
        """One copy, on a stream of its own: the engines read the bucket at the same time, and need not wait for it."""
        target = torch.frombuffer(self._memory, dtype=torch.uint8, count=bucket.flat.nbytes, offset=self._head_size)
        stream = torch.cuda.Stream(bucket.flat.device)
        stream.wait_stream(torch.cuda.current_stream(bucket.flat.device))
        with torch.cuda.stream(stream):
            target.copy_(bucket.flat, non_blocking=True)
        bucket.flat.record_stream(stream)  # the memory may be freed before the copy has ended
        self._copied = stream.record_event()
        bucket.readers.append(self._copied)

    def wait(self) -> None:
        """Until the copy has ended that `fill` started."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def write(self, path: Path) -> None:
        self.wait()
        with open(path, "wb", opener=_for_owner) as file:
            file.write(self._memory)

    def close(self) -> None:
        self.wait()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        self._memory = None


def _specs(bucket: Bucket) -> tuple[TensorSpec, ...]:
    return in_flat_order(specs_of(bucket))


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
        # In the order of the buckets: the version's files on a RAM disk; elsewhere, in the background, host memory.
        self._kept: list[FileImage] = []
        self._background = False
        self._buckets = 0
        self._thread: Thread | None = None  # completes the version, and removes the one before
        self._error: OSError | None = None  # of the thread

    def _claim(self) -> None:
        """Creates the directory of this process; it has its name only after its lock is taken."""
        unnamed = self._root.with_name(f".{self._root.name}")
        unnamed.mkdir(mode=0o700, parents=True, exist_ok=True)  # /dev/shm is everybody's
        lock = os.open(unnamed / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            unnamed.rename(self._root)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def begin(self, version: int, *, background: bool = False) -> None:
        """`background`: `commit` may return before the files exist; `wait` returns when they do."""
        self.wait()
        self._partial = self._root / f"version-{version}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            if self._lock is None:
                self._claim()
            if self.in_ram and self._kept and self.current is not None:
                self.current.rename(self._partial)
                self.current = None
            else:
                self._drop(0 if self.in_ram else len(self._kept))  # of a version that did not become complete
                self._partial.mkdir(parents=True)
                self._copy_model_files(self._partial)
        except OSError as error:
            raise self._unwritable(self._root, error) from error
        self._index = {}
        self._size = self._buckets = 0
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
        path = _shard(self._partial, self._buckets - 1)
        try:
            self._image(bucket, path).fill(bucket)
        except OSError as error:
            raise self._unwritable(self._partial, error) from error
        self._index |= {key: path.name for key, _ in bucket}
        self._size += flat_size(specs_of(bucket))

    def _image(self, bucket: Bucket, path: Path) -> FileImage:
        number = self._buckets - 1
        if not (self.in_ram or self._background):
            return FileImage(bucket, path)
        if number < len(self._kept) and not self._kept[number].fits(bucket):
            self._drop(number)
        if number == len(self._kept):
            self._kept.append(FileImage(bucket, path if self.in_ram else None, keep=True))
        return self._kept[number]

    def _drop(self, first: int) -> None:
        """Drops what was kept from this bucket on: the version before had other ones."""
        for number, image in enumerate(self._kept[first:], first):
            image.close()
            if self._partial is not None and image.mapped:
                _shard(self._partial, number).unlink(missing_ok=True)
        del self._kept[first:]

    def commit(self) -> Path:
        """The version is complete. In the background it becomes `current` later."""
        assert self._partial is not None
        self._drop(self._buckets)
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
        for number, image in enumerate(self._kept):
            image.wait() if image.mapped else image.write(_shard(partial, number))
        write_index(partial, self._index, self._size)
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
            self._drop(0)
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def close(self) -> None:
        with contextlib.suppress(EngineError):
            self.wait()
        self._drop(0)
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self.current = self._lock = None


def _shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number + 1:05d}.safetensors"


def is_ram_disk(path: Path) -> bool:
    """Whether files below `path` are in memory; the directory need not exist yet."""
    return file_system(path) in RAM_DISKS


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
