"""Weights on disk: one directory per version, complete or absent, readable by SGLang and by transformers.

Buckets are written as safetensors shards when they arrive; the directory gets its final name after the last one.
Tensors are copied straight into the mapped file by a few threads: on a RAM disk that is several times faster than
assembling a file first and writing it afterwards.

The versions of one process are in a directory of its own, whose lock file it holds for as long as it lives. The next
process on the same host removes directories whose owner is dead: after kill -9 nobody else would free that memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count
from pathlib import Path
from threading import Thread

import torch

from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.files import safetensors_header

WRITERS = 8
FILES_TO_COPY = ("*.json", "merges.txt", "vocab.txt", "*.model", "*.jinja")
PREFIX = "megatron-dapo-weights"
LOCK = "owner.lock"
_serial = count()


class Snapshot:
    """Versions under `directory`; a new complete version replaces the one before."""

    def __init__(self, directory: str | Path, model: str | Path) -> None:
        """`model`: the HF directory whose configuration and tokenizer files are copied beside the weights."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{_start_time()}-{next(_serial)}"
        self._root = Path(directory) / f"{PREFIX}-{owner}"
        self.model = model
        self._lock: int | None = None
        self._partial: Path | None = None
        self._index: dict[str, str] = {}
        self._size = 0
        self.current: Path | None = None
        self._removal: Thread | None = None  # of the version before: freeing its pages takes a while

    def _claim(self) -> None:
        """Creates the directory of this process; it has its name only after its lock is taken."""
        unnamed = self._root.with_name(f".{self._root.name}")
        unnamed.mkdir(parents=True)
        self._lock = os.open(unnamed / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self._root)

    def begin(self, version: int) -> None:
        self._wait_for_removal()
        self._partial = self._root / f"version-{version}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            if self._lock is None:
                self._claim()
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise EngineError(
                f"cannot write weights below {self._root} (rollout.weights.directory): {error}"
            ) from error
        self._index, self._size = {}, 0
        for pattern in FILES_TO_COPY if self.model else ():
            for path in Path(self.model).glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, self._partial)

    def add(self, bucket: Bucket) -> None:
        assert self._partial is not None
        name = f"model-{len(list(self._partial.glob('*.safetensors'))) + 1:05d}.safetensors"
        try:
            write_safetensors(self._partial / name, bucket)
        except OSError as error:
            raise EngineError(
                f"cannot write weights to {self._partial} (rollout.weights.directory): {error}"
            ) from error
        self._index |= {key: name for key, _ in bucket}
        self._size += bucket_bytes(bucket)

    def commit(self) -> Path:
        assert self._partial is not None
        index = {"metadata": {"total_size": self._size}, "weight_map": self._index}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        final = self._partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        self._partial.rename(final)
        if self.current is not None and self.current != final:
            self._removal = Thread(target=shutil.rmtree, args=(self.current, True), name="old-weights")
            self._removal.start()
        self.current, self._partial = final, None
        return final

    def _wait_for_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def discard(self) -> None:
        """Deletes a version that did not become complete."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def close(self) -> None:
        self._wait_for_removal()
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self.current = self._lock = None


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


def write_safetensors(path: Path, bucket: Bucket) -> None:
    """Writes the bucket's tensors, on any device, into one file."""
    # Large elements first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(bucket, key=lambda pair: -pair[1].element_size())
    head = safetensors_header((name, tensor.dtype, tensor.shape) for name, tensor in ordered)
    *starts, end = accumulate((bucket_bytes([pair]) for pair in ordered), initial=len(head))
    with path.open("wb+") as file:
        # Reserved now: a full disk is then an error here, and not a SIGBUS in the middle of a copy.
        os.posix_fallocate(file.fileno(), 0, end)
        mapped = mmap.mmap(file.fileno(), end)
    mapped[: len(head)] = head

    def copy(start: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            target = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            # Touch every page first, in all threads; during a copy CUDA's driver would fault them in one by one.
            target[:: mmap.PAGESIZE // target.element_size()].zero_()
            target.view(tensor.shape).copy_(tensor.detach())

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(copy, start, tensor) for start, (_, tensor) in zip(starts, ordered, strict=True)]:
            done.result()


def bucket_bytes(bucket: Bucket) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
