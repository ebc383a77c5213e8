"""metrics.jsonl: one line per step or evaluation, on disk before the run continues.

A line is `{"step": 3, "kind": "step" | "eval", "metrics": {...}}`. It counts once its newline is written: readers
ignore an incomplete last line, and the next writer removes it. Steps only increase. JSON has no NaN or infinity, so
they are written as text ("nan", "inf", "-inf") and read back as numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.observe.retry_queue import AppendFile

STEP, EVAL = "step", "eval"


class RecordError(UserError):
    """metrics.jsonl cannot be read or written; the message says which line and what to do."""


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
        metrics = {str(name): _number(value) for name, value in raw["metrics"].items()}
        return cls(int(raw["step"]), str(raw["kind"]), metrics)


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    return float(value) if isinstance(value, str) else value


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
    """Appends records. `records` holds what is on disk. Opening the file removes an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:  # a directory that cannot be written is an error at the start of the run
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            _remove_incomplete_line(path)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error}") from error
        self.records = read_records(path)
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
            raise RecordError(f"{self.path}: cannot write the metrics of step {record.step}: {error}") from error
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


def read_records(path: Path) -> list[Record]:
    """Every complete line. A complete line that is not a record is an error: the file was edited or damaged."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: an incomplete line, or nothing
        if not line.strip():
            continue
        try:
            records.append(Record.from_line(line.decode()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(
                f"{path}, line {number}: expected a JSON object with step, kind and metrics ({error}): "
                "remove the line, or restore the file"
            ) from None
    return records


def _end_of_line(path: Path, records: int) -> int:
    """Size of the file up to and including so many records."""
    size = found = 0
    with path.open("rb") as file:
        for line in file:
            if found == records:
                break
            size += len(line)
            found += bool(line.strip())
    return size


def _remove_incomplete_line(path: Path) -> None:
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
