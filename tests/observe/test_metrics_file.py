"""metrics.jsonl: acknowledged records are on disk, incomplete lines do not count, and rewinding is one operation."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.observe.metrics_file import EVAL, STEP, MetricsFile, Record, RecordError, plain_numbers, read_records


def write(path: Path, *steps: int) -> MetricsFile:
    file = MetricsFile(path)
    for step in steps:
        file.append(Record(step, STEP, {"reward/mean": step / 10}))
    return file


def test_a_line_is_synced_before_append_returns(tmp_path, monkeypatch):
    file = write(tmp_path / "metrics.jsonl")
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append((tmp_path / "metrics.jsonl").read_text()), fsync(fd))[1])
    file.append(Record(1, STEP, {"a": 0.5, "n": 3}))
    expected = '{"step": 1, "kind": "step", "metrics": {"a": 0.5, "n": 3}}\n'
    assert seen == [expected], "the whole line was handed to the system, then synced"


def test_kill_9_loses_no_acknowledged_step(tmp_path):
    script = (
        "import sys; from pathlib import Path; from megatron_dapo.observe.metrics_file import *\n"
        f"file = MetricsFile(Path({str(tmp_path)!r}) / 'metrics.jsonl')\n"
        "for step in range(1, 10**6):\n"
        "    file.append(Record(step, STEP, {'x': float(step)})); print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 25:
            break
    child.send_signal(signal.SIGKILL)
    rest = [int(line) for line in child.stdout]
    child.wait()
    acknowledged = max([25, *rest])
    steps = [record.step for record in read_records(tmp_path / "metrics.jsonl")]
    assert steps[:acknowledged] == list(range(1, acknowledged + 1))


def test_an_incomplete_line_is_ignored_and_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2).close()
    whole = path.read_text()
    for incomplete in (
        '{"step": 3, "ki',
        '{"step": 3, "kind": "step", "metrics": {}}',
    ):  # the second lacks only its newline
        path.write_text(whole + incomplete)
        assert [r.step for r in read_records(path)] == [1, 2]
        write(path, 3).close()
        assert path.read_text().startswith(whole) and [r.step for r in read_records(path)] == [1, 2, 3]


def test_nan_and_infinity_are_written_as_valid_json_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(Record(1, STEP, {"a": math.nan, "b": -math.inf, "c": 1.5}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_records(path)
    assert math.isnan(record.metrics["a"]) and record.metrics["b"] == -math.inf and record.metrics["c"] == 1.5


def test_readers_skip_a_damaged_line_in_the_middle_and_say_so_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3).close()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{broken\n" + lines[2])
    for _ in range(2):
        assert [record.step for record in read_records(path)] == [1, 3]
    (said,) = caplog.messages
    assert f"{path}: skipped line 2: not a record. The next start" in said


def test_a_step_is_recorded_once(tmp_path):
    file = write(tmp_path / "metrics.jsonl", 1, 2)
    with pytest.raises(ValueError, match=r"step 2 after step 2.*call rewind\(1\) first"):
        file.append(Record(2, STEP, {}))
    file.append(Record(2, EVAL, {"eval/avg@8": 0.5}))  # an evaluation belongs to a step


def test_rewind_removes_later_steps_and_evaluations(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = write(path, 1, 2)
    two = path.read_bytes()
    file.append(Record(3, EVAL, {"eval/avg@8": 0.5}))
    file.append(Record(3, STEP, {"a": 1.0}))
    file.rewind(2)
    assert path.read_bytes() == two
    file.append(Record(3, STEP, {"a": 2.0}))
    assert [r.metrics for r in read_records(path)][-1] == {"a": 2.0}


def test_a_rewind_that_is_interrupted_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = write(path, 1, 2, 3)
    before = path.read_bytes()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", killed)
        with pytest.raises(KeyboardInterrupt):
            file.rewind(1)
    assert path.read_bytes() == before
    again = MetricsFile(path)
    again.rewind(1)
    assert [r.step for r in read_records(path)] == [1]


def test_scalars_become_python_numbers_and_other_types_are_refused():
    import numpy as np

    found = plain_numbers({"a": np.float32(0.5), "b": 3, "c": True, "d": np.int64(4)})
    assert found == {"a": 0.5, "b": 3, "c": 1.0, "d": 4.0}
    assert type(found["b"]) is int and type(found["a"]) is float
    with pytest.raises(TypeError, match="metric 'x': expected a number, found 'high'"):
        plain_numbers({"x": "high"})


def test_rewind_keeps_blank_lines_and_handles_steps_out_of_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [Record(step, STEP, {}).to_line() for step in (1, 2, 3)]
    path.write_text(lines[0] + "\n" + lines[1] + lines[2])
    MetricsFile(path).rewind(2)
    assert path.read_text() == lines[0] + "\n" + lines[1]
    path.write_text(lines[0] + lines[2] + lines[1])
    file = MetricsFile(path)
    file.rewind(2)
    file.append(Record(3, STEP, {}))
    assert path.read_text() == "".join(lines)


def test_a_folder_that_cannot_be_created_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"file/run/metrics\.jsonl: cannot be written: .*Not a directory"):
        MetricsFile(tmp_path / "file" / "run" / "metrics.jsonl")
