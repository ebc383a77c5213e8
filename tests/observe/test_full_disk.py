"""A full disk, or a tracker that fails, never ends a run: what could not be written is kept and written later.

RLIMIT_FSIZE makes the kernel refuse to let a file grow (EFBIG instead of ENOSPC), at every byte that we like.
"""

import errno
import io
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic_runs import make_groups

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.files import write_atomically
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.metrics_file import EVAL, STEP, AppendFile, RetryQueue, read_records
from megatron_dapo.observe.observer import Observer

PLAIN = ObserveConfig(console="plain", report=False, samples_every=2, warnings=False)


@contextmanager
def no_file_above(size: int):
    """No file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def observer(folder: Path, config: ObserveConfig = PLAIN) -> Observer:
    return Observer(config, folder, total_steps=20, settings={})


def steps_of(folder: Path) -> list[tuple[int, str]]:
    return [(record.step, record.kind) for record in read_records(folder / "metrics.jsonl")]


def after_two_steps(folder: Path) -> tuple[Observer, int]:
    """An observer, and the size of its metrics.jsonl."""
    watched = observer(folder)
    for step in (1, 2):
        watched.step(step, {"x": float(step)})
    return watched, (folder / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_metrics_have_no_gap_after_a_full_disk(tmp_path, capsys, extra):
    run = tmp_path
    watched, size = after_two_steps(run)
    with no_file_above(size + extra):  # the third record fails at its first or at a later byte
        for step in range(3, 7):
            watched.step(step, {"x": 1.0})
        watched.evaluation(6, {"eval/avg@8": 0.5})
        watched.evaluation(6, {"eval/avg@8": 0.5})  # known, although it is not on disk
        assert steps_of(run) == [(1, STEP), (2, STEP)]
        assert (run / "metrics.jsonl").stat().st_size == size, "no part of a record is left"
    watched.step(7, {"x": 1.0})
    assert steps_of(run) == [*((step, STEP) for step in range(1, 7)), (6, EVAL), (7, STEP)]
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if "metrics.jsonl failed" in line]
    assert "File too large" in failed and "The loop waits" in failed
    (recovered,) = [line for line in lines if "metrics.jsonl works again" in line]
    assert lines.index(failed) < lines.index(recovered)


@pytest.mark.parametrize("space_again", [False, True])
def test_a_checkpoint_holds_the_records_that_the_disk_did_not_take(tmp_path, space_again):
    """Whether or not they are written after it, before the process is killed: each is there once."""
    watched, size = after_two_steps(tmp_path)
    with no_file_above(size):
        for step in (3, 4):
            watched.step(step, {"x": float(step)})
        state = watched.state()
    if space_again:
        watched.step(5, {"x": 5.0})
    assert [step for step, _ in steps_of(tmp_path)] == [1, 2, 3, 4, 5][: 5 if space_again else 2]
    resumed = observer(tmp_path)
    resumed.restore(state)
    resumed.rewind(4)
    resumed.step(5, {"x": 5.0})
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(record.step, record.metrics["x"]) for record in records] == [(n, n) for n in range(1, 6)]
    assert "unwritten" not in resumed.state()


def test_rewinding_needs_no_space(tmp_path):
    after_two_steps(tmp_path)
    resumed = observer(tmp_path)
    with no_file_above(0):
        resumed.rewind(1)
    assert steps_of(tmp_path) == [(1, STEP)]


def test_transcripts_and_logs_are_written_when_there_is_space_again(tmp_path, capsys):
    watched = observer(tmp_path)
    with no_file_above(0):
        for step in range(1, 5):
            watched.step(step, {"x": 1.0}, make_groups(step))
        watched.warn("look here")
        watched.log("gate passed")
        assert not list((tmp_path / "samples").glob("*")), "no temporary file keeps space that is needed"
    watched.step(5, {"x": 1.0})
    watched.warn("and here")
    watched.close("finished")
    assert sorted({item.step for item in transcripts.read(tmp_path / "samples")}) == [1, 2, 4]
    log = (tmp_path / "logs" / "warnings.log").read_text()
    assert log.index("samples/ failed") < log.index("look here") < log.index("and here")
    assert log.count("samples/ failed") == log.count("metrics.jsonl failed") == log.count("warnings.log failed") == 1
    assert "after step 4: gate passed" in (tmp_path / "logs" / "trainer.log").read_text()
    assert [step for step, _ in steps_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_report_that_does_not_fit_is_a_warning(tmp_path, capsys):
    watched = observer(tmp_path, PLAIN.model_copy(update={"report": True}))
    watched.step(1, {"x": 1.0})
    with no_file_above((tmp_path / "metrics.jsonl").stat().st_size):
        watched.close("finished")
    out = capsys.readouterr().out
    assert "WARNING: no report: ReportError" in out and out.endswith("run finished\n")
    assert not list(tmp_path.glob("*report*"))


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_console_on_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullDisk())
    watched = observer(tmp_path)
    watched.step(1, {"x": 1.0})
    watched.warn("x")
    assert [step for step, _ in steps_of(tmp_path)] == [1]


def test_a_full_disk_behind_stdout_does_not_change_the_exit_code():
    script = (
        "from megatron_dapo.observe.console import PlainConsole\n"
        "console = PlainConsole()\n"
        "console.warn('x')\n"
        "console.close('finished')"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, env=buffered
        )
    assert done.returncode == 0, done.stderr


def test_a_block_is_whole_or_absent_even_if_it_cannot_be_removed_at_once(tmp_path, monkeypatch):
    file = AppendFile(tmp_path / "file")
    file.write(b"first\n")

    def fail(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, no_file_above(8):
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match="File too large"):
            file.write(b"second\n")
    assert (tmp_path / "file").read_bytes() == b"first\nse"
    file.write(b"third\n")
    assert (tmp_path / "file").read_bytes() == b"first\nthird\n"


def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    with no_file_above(5), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "file", b"new content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_queue_drops_its_oldest_items_at_its_limit_and_says_so_once():
    received, reports, works = [], [], False

    def send(item: int) -> None:
        if not works:
            raise OSError(errno.ENOSPC, "No space left on device")
        received.append(item)

    queue: RetryQueue[int] = RetryQueue("file", send, limit=3)
    for item in range(8):
        reports += queue.put(item)
    works = True
    reports += queue.put(8)
    assert received == [5, 6, 7, 8]
    assert [report.split(":")[0] for report in reports] == [
        "file failed",
        "file",
        "file works again; 4 kept items were written",
    ]
