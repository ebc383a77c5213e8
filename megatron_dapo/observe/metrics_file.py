"""metrics.jsonl: one line per step or evaluation, on disk before the run goes on.

A line is `{"step": 3, "kind": "step" | "eval", "metrics": {...}}` and counts once its newline is there: what a crash
left half-written is ignored by readers and cut off by the next writer. Steps only grow. A NaN or infinity is written
as text ("nan", "inf", "-inf"), because JSON has no number for it, and read back as the number.
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
    """Python numbers, whatever the caller's scalars are (numpy, 0-d tensors); integers stay integers."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = value if type(value) is int else float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name!r}: expected a number, found {value!r}") from None
    return found


class MetricsFile:
    """Appends records. `records` holds what is on disk; opening the file cuts off a half-written last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records = read_records(path) if path.exists() else []
        _cut_half_line(path)
        self._file = path.open("ab")

    def append(self, record: Record) -> None:
        """On disk when this returns."""
        if record.kind == STEP and record.step <= self.last_step:
            raise ValueError(
                f"step {record.step} after step {self.last_step} in {self.path}: rewind({record.step - 1}) comes first"
            )
        try:
            self._file.write(record.to_line().encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordError(f"{self.path}: cannot write the metrics of step {record.step}: {error}") from error
        self.records.append(record)

    def rewind(self, step: int) -> None:
        """Forgets every record after `step`; the file is replaced in one move, or untouched."""
        kept = [record for record in self.records if record.step <= step]
        if len(kept) == len(self.records):
            return
        self._file.close()
        write_atomically(self.path, "".join(record.to_line() for record in kept).encode())
        self.records = kept
        self._file = self.path.open("ab")

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
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is half a line, or nothing
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


def write_atomically(path: Path, content: bytes) -> None:
    """The new content or the old one, never a part, whenever the power fails."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
