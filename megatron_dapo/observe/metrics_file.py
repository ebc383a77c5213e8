"""metrics.jsonl: one line per step or evaluation, on disk before the run continues.

A line is `{"step": 3, "kind": "step" | "eval", "metrics": {...}}`. It counts once its newline is written: readers
skip an incomplete last line and damaged lines; the next writer removes the first and moves the others to another file.
Steps only increase. JSON has no NaN or infinity, so they are written as text ("nan", "inf", "-inf") and read back as
numbers. A metric may have any name; some functions here say what a name implies.

`AppendFile` and `RetryQueue` are the two halves of "a full disk never ends a run": a block is in a file completely or
not at all, and what could not be written is kept and written later.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_dapo.errors import UserError
from megatron_dapo.files import explain, write_atomically

STEP, EVAL = "step", "eval"
DROPPED = "rollout/dropped/"
# Groups that were not trained on for a reason other than the filter.
NOT_FILTERED = ("unfinished", "stale", "surplus")
LONGEST_PAUSE = 64  # items
T = TypeVar("T")
# What reading raises if a file is damaged, or holds JSON that a run does not write.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
warn_once = cache(logging.getLogger(__name__).warning)  # `watch` reads a file again and again


class RecordError(UserError):
    """metrics.jsonl cannot be read or written; the message says why."""


@dataclass(slots=True, frozen=True)
class Record:
    step: int
    kind: str
    metrics: dict[str, float]

    def to_line(self) -> str:
        metrics = {name: v if math.isfinite(v) else str(float(v)) for name, v in self.metrics.items()}
        return json.dumps({"step": self.step, "kind": self.kind, "metrics": metrics}, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        raw = json.loads(line)
        metrics = {name: value if type(value) is float else _number(value) for name, value in raw["metrics"].items()}
        return cls(int(raw["step"]), str(raw["kind"]), metrics)


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, str | int | float):
        raise TypeError(f"{value!r} is not a number")
    number = float(value)  # also of an integer, which may be too large for what is computed from it
    return value if isinstance(value, int) else number


def finite(value: Any) -> float:
    """Raises one of DAMAGED for anything but a finite number."""
    if not math.isfinite(number := _number(value)):
        raise ValueError(f"{value!r} is not finite")
    return number


@contextmanager
def skipping(what: object) -> Iterator[None]:
    """JSON that is damaged or something else is skipped and named once (`what`); a missing file is skipped."""
    try:
        yield
    except OSError:
        return
    except DAMAGED as error:
        warn_once(f"{what}: skipped, it is not what a run writes ({type(error).__name__}: {str(error)[:100]})")


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Converts numpy scalars and 0-d tensors to Python numbers; integers stay integers."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = value if type(value) is int else float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name!r}: expected a number, found {value!r}") from None
    return found


class MetricsFile:
    """Appends records. `records` holds what is on disk. Opening the file removes an incomplete last line, and moves
    lines that are no records to metrics.jsonl.damaged; `damage` says which."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:  # a directory that cannot be written is an error at the start of the run
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self.records, self.damage = _repair(path)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {explain(error, path)}") from error
        self._file = AppendFile(path, sync=True)

    def append(self, record: Record) -> None:
        """On disk when this returns. Raises RecordError if it cannot be written; the file is then unchanged."""
        if record.kind == STEP and record.step <= self.last_step:
            raise ValueError(
                f"step {record.step} after step {self.last_step} in {self.path}: call rewind({record.step - 1}) first"
            )
        try:
            self._file.write(record.to_line().encode())
        except OSError as error:
            why = explain(error, self.path)
            raise RecordError(f"{self.path}: cannot write the metrics of step {record.step}: {why}") from error
        self.records.append(record)

    def rewind(self, step: int) -> None:
        """Removes every record after `step` in one operation, which needs no free space."""
        kept = [record for record in self.records if record.step <= step]
        if len(kept) == len(self.records):
            return
        if kept == self.records[: len(kept)]:
            self._file.truncate(_end_of_line(self.path, len(kept)))
        else:  # steps out of order: somebody edited the file
            self._file.close()
            write_atomically(self.path, "".join(record.to_line() for record in kept).encode())
        self.records = kept

    @property
    def last_step(self) -> int:
        return max((record.step for record in self.records if record.kind == STEP), default=-1)

    def close(self) -> None:
        self._file.close()


def read_records(path: Path, warnings: list[str] | None = None) -> list[Record]:
    """Of all complete lines. A line that is no record, because the file was edited or damaged, is skipped; a message
    that says so is logged once and added to `warnings`."""
    records, damaged = parse_records(path)
    if damaged:
        lines = ", ".join(map(str, damaged))
        text = f"{path}: skipped line {lines}: not a record. The next start moves them to {path.name}.damaged"
        warn_once(text)
        if warnings is not None:
            warnings.append(text)
    return records


def parse_records(path: Path) -> tuple[list[Record], dict[int, tuple[bytes, str]]]:
    """The records of all complete lines; and the lines, by number, that are none, with the reason."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    records: list[Record] = []
    damaged: dict[int, tuple[bytes, str]] = {}
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: an incomplete line, or nothing
        if not line.strip():
            continue
        try:
            records.append(Record.from_line(line.decode()))
        except DAMAGED as error:
            damaged[number] = line, str(error)
    return records, damaged


def _end_of_line(path: Path, records: int) -> int:
    """Size of the first `records` records in the file."""
    size = found = 0
    with path.open("rb") as file:
        for line in file:
            if found == records:
                break
            size += len(line)
            found += bool(line.strip())
    return size


def _repair(path: Path) -> tuple[list[Record], list[str]]:
    """Removes an incomplete line and moves damaged ones. The records, and a message about each line that was moved."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
    records, damaged = parse_records(path)
    if not damaged:
        return records, []
    aside = AppendFile(path.with_name(f"{path.name}.damaged"), sync=True)
    aside.write(b"".join(line + b"\n" for line, _ in damaged.values()))
    aside.close()
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    write_atomically(path, b"\n".join(line for number, line in lines if number not in damaged))
    moved = f"it is now in {aside.path.name}"
    return records, [f"{path}, line {number}: not a record ({why}); {moved}" for number, (_, why) in damaged.items()]


class AppendFile:
    """A file that grows by whole blocks: a block is in it completely or not at all, also on a full disk.

    Opened, and created where needed, by the first write. With `sync` a block is on disk when `write` returns.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path = path
        self._sync = sync
        self._fd: int | None = None
        self._damaged_at: int | None = None  # size before a block that failed and could not be removed

    def write(self, block: bytes) -> None:
        """Raises OSError and removes what was written of the block if it cannot be written completely."""
        fd = self._open()
        if self._damaged_at is not None:
            os.ftruncate(fd, self._damaged_at)
            self._damaged_at = None
        size = os.fstat(fd).st_size
        try:
            rest = memoryview(block)
            while rest:  # a nearly full disk takes a part of a block
                rest = rest[os.write(fd, rest) :]
            if self._sync:
                os.fsync(fd)
        except OSError:
            self._damaged_at = size
            with suppress(OSError):
                os.ftruncate(fd, size)
                self._damaged_at = None
            raise

    def truncate(self, size: int) -> None:
        """Keeps the first `size` bytes. Needs no free space."""
        fd = self._open()
        os.ftruncate(fd, size)
        self._damaged_at = None
        os.fsync(fd)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return self._fd


@dataclass(slots=True)
class RetryQueue(Generic[T]):
    """Sends items to an output in order, and keeps those that fail.

    `put` and `flush` do not raise the output's errors (`errors`). They return what a user should know: the first
    failure, that the oldest of more than `limit` kept items are dropped, and that the output works again. `pause`:
    how many items pass before the next attempt after a failure; doubled after each further failure. `then`: what the
    run does while the output fails.
    """

    name: str
    send: Callable[[T], None]
    _: KW_ONLY
    limit: int
    errors: type[Exception] = OSError
    pause: int = 0
    then: str = "The run goes on"
    waiting: deque[T] = field(default_factory=deque, init=False)
    failure: str = field(default="", init=False)  # the last one
    _failures: int = field(default=0, init=False)  # in a row
    _skip: int = field(default=0, init=False)
    _dropping: bool = field(default=False, init=False)

    def put(self, item: T) -> list[str]:
        self.waiting.append(item)
        news = []
        if self._skip > 0:
            self._skip -= 1
        else:
            news = self.flush()
        if len(self.waiting) > self.limit:
            self.waiting.popleft()
            if not self._dropping:
                self._dropping = True
                news.append(f"{self.name}: more than {self.limit} items wait; the oldest are dropped from now on")
        return news

    def flush(self) -> list[str]:
        """Tries to send everything that waits."""
        sent = 0
        while self.waiting:
            try:
                self.send(self.waiting[0])
            except self.errors as error:
                return self._failed(error)
            self.waiting.popleft()
            sent += 1
        if not self._failures:
            return []
        self._failures, self._dropping = 0, False
        return [f"{self.name} works again; {sent} kept items were written"]

    def _failed(self, error: Exception) -> list[str]:
        self._skip = min(LONGEST_PAUSE, self.pause * 2**self._failures)
        self.failure = f"{self.name} failed: {type(error).__name__}: {error}"
        self._failures += 1
        if self._failures > 1:
            return []
        return [f"{self.failure}. {self.then}; what could not be written is kept and written when this works again"]


def is_wall_clock(name: str) -> bool:
    """Whether a metric measures time or is a mean over time, or depends on the machine (memory): it may differ between
    two runs of the same training."""
    return name.startswith(("time/", "memory/", "rollout/kv_use", "rollout/queue", "rollout/servers")) or name.endswith(
        ("seconds", "per_second", "per_gpu", "mfu", "in_flight", "occupancy")
    )


def dropped_groups(metrics: Mapping[str, float]) -> dict[str, float]:
    """Groups by the reason why they were not trained on."""
    return {name.removeprefix(DROPPED): value for name, value in metrics.items() if name.startswith(DROPPED)}


def filter_yield(metrics: Mapping[str, float]) -> float | None:
    """Kept groups per group that the filter judged; None if it judged none. Metrics of a `Run` have it."""
    if (known := metrics.get("rollout/filter_yield")) is not None:
        return known
    kept = metrics.get("rollout/groups_kept")
    if kept is None:
        return None
    judged = kept + sum(n for reason, n in dropped_groups(metrics).items() if reason not in NOT_FILTERED)
    return kept / judged if judged > 0 else None


def update_speed(metrics: Mapping[str, float]) -> float | None:
    """Tokens that carried loss, per second of the update phase."""
    tokens, seconds = metrics.get("train/tokens"), metrics.get("time/update")
    return tokens / seconds if tokens is not None and seconds else None
