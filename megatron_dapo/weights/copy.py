"""Copies tensors from one checkpoint's files to another's, block by block, on several threads.

Threads take the blocks of all files in order. A block is filled (`output_file`) while the kernel reads the next ones,
and written past the page cache: that needs an eighth of the CPU time of a buffered write here, and leaves nothing for
the final flush. File systems that cannot do this are written to as usual. Memory holds one block per thread, whatever
the size of the model; safetensors and torch.save would need whole tensors. benchmarks/convert.py prints the speed
beside `cp`. A finished file is on disk and has a mark, so that the next run after a kill keeps it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dapo.files import collect, hand_in, write_atomically
from megatron_dapo.weights.mapping import WeightsError
from megatron_dapo.weights.output_file import CheckpointReader, FileParts, OutputFile, TensorWrite

# Processes that share one conversion, for example the tasks of an `srun` over several nodes.


_POLL_SECONDS = 0.2
_START_SECONDS = 600.0  # how long ranks wait for the first one to start


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """This process among those that convert together. `token` is the same in all, and new for every start."""

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
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), f"{env['TORCHELASTIC_RUN_ID']}.{env['MASTER_PORT']}")
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
        content = {"token": self.token, "not_finite": found, "kept": kept, "error": error}
        hand_in(notes, self.rank, content)

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


BLOCK = 8 * 2**20  # a multiple of ALIGN
ALIGN = 4096  # of offsets, lengths and memory of direct writes
ALONE = CopyGroup()
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class CopyResult:
    """Tensors (with their files) that hold values that are not finite; files that an interrupted run had finished."""

    not_finite: list[str]
    kept: int = 0


def default_workers() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0))))


def copy_tensors(
    source: CheckpointReader,
    writes: Sequence[TensorWrite],
    files: Sequence[OutputFile],
    *,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
    finished: Path | None = None,
    group: CopyGroup = ALONE,
) -> CopyResult:
    """Write and fsync this process's files (`group`).

    `finished`: a folder in which a mark is left for each file that is on disk. A file that has its mark already is
    read and compared with the source instead of written; a block that differs is written again.
    """
    mine: dict[int, list[TensorWrite]] = {i: [] for i in range(len(files)) if group.owns(i)}
    for write in writes:
        if write.file in mine:
            mine[write.file].append(write)
    contents = [FileParts(source, files[i], found) for i, found in mine.items()]
    count = workers or default_workers()
    job = _Job(contents, advance, finished, count)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in [pool.submit(job.work) for _ in range(count)]:
                    done.result()
            except BaseException:
                job.stop.set()
                raise
    except OSError as error:
        raise WeightsError(f"{files[0].path.parent}: cannot write ({error.strerror or error})") from error
    finally:
        job.close()
    return CopyResult(sorted(set().union(*(file.not_finite for file in contents))), job.kept)


class _Job:
    """Opens files when their first block comes, and finishes them after the last."""

    def __init__(
        self, contents: Sequence[FileParts], advance: Callable[[int], None], finished: Path | None, workers: int
    ) -> None:
        self._contents, self._advance, self._finished = contents, advance, finished
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.kept = 0
        self._blocks = [(i, at) for i, c in enumerate(contents) for at in range(0, max(1, c.file.size), BLOCK)]
        self._next, self._ahead = 0, 2 * workers
        self._left = [max(1, -(-c.file.size // BLOCK)) for c in contents]
        self._open: dict[int, int] = {}
        self._compare: set[int] = set()  # files that an interrupted run has finished

    def work(self) -> None:
        """One thread: takes blocks until none is left or another thread has failed."""
        buffer = mmap.mmap(-1, -(-BLOCK // ALIGN) * ALIGN)
        try:
            while not self.stop.is_set():
                with self._lock:
                    number, self._next = self._next, self._next + 1
                if number >= len(self._blocks):
                    return
                if number + self._ahead < len(self._blocks):
                    file, at = self._blocks[number + self._ahead]
                    self._contents[file].prefetch(at, at + BLOCK)
                self.run(*self._blocks[number], memoryview(buffer))
        except BaseException:
            self.stop.set()
            raise

    def run(self, number: int, at: int, buffer: memoryview) -> None:
        content = self._contents[number]
        with self._lock:
            fd = self._descriptor(number)
        length = min(BLOCK, content.file.size - at)
        data = buffer[: -(-length // ALIGN) * ALIGN]  # the end of the file is cut off afterwards
        weights = content.fill(data, at)
        if number not in self._compare or os.pread(fd, length, at) != bytes(data[:length]):
            _write(fd, data, at)
        with self._lock:
            self._advance(weights)
            self._left[number] -= 1
            last = self._left[number] == 0
        if last:
            self._finish(number)

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            return self._open[number]
        file = self._contents[number].file
        mark = self._mark(number)
        keep = mark is not None and mark.exists() and file.path.exists() and file.path.stat().st_size == file.size
        if keep:
            self._compare.add(number)
            self.kept += 1
            self._open[number] = os.open(file.path, os.O_RDWR)
        else:
            if mark is not None:
                mark.unlink(missing_ok=True)
            self._open[number] = fd = _create(file.path)
            _reserve(fd, file.size)
        return self._open[number]

    def _finish(self, number: int) -> None:
        """The file is complete: flush it, close it, leave its mark."""
        with self._lock:
            fd = self._open.pop(number)
        try:
            os.ftruncate(fd, self._contents[number].file.size)
            os.fsync(fd)
        finally:
            os.close(fd)
        if (mark := self._mark(number)) is not None:
            mark.touch()

    def _mark(self, number: int) -> Path | None:
        return None if self._finished is None else self._finished / f"{self._contents[number].file.path.name}.done"

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


def _create(path: Path) -> int:
    """A new file for direct writes, where the file system has them."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _reserve(fd: int, size: int) -> None:
    """Allocate the file's blocks. A full disk is found now, and concurrent writes do not fragment the file.

    This calls the kernel directly: where the file system cannot allocate, posix_fallocate would write every block.
    """
    if not size or _LIBC.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
        return
    if ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, size)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        try:
            written = os.pwrite(fd, data, at)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # this file system wants another alignment
            continue
        data, at = data[written:], at + written
