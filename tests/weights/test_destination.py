"""A destination appears complete or not at all, whatever interrupts the conversion, and the next run cleans up."""

import os
import signal
import time

import pytest

from megatron_dapo.weights import convert, copy
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.destination import new_directory
from megatron_dapo.weights.mapping import WeightsError
from megatron_dapo.weights.verify import verify


def beside(path):
    return sorted(p.name for p in path.parent.iterdir() if p.name != path.name and path.name in p.name)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error"), MemoryError])
@pytest.mark.parametrize("to_hf", [False, True])
def test_an_error_while_writing_leaves_nothing(models, tmp_path, monkeypatch, error, to_hf):
    source, out = models["qwen2"], tmp_path / "out"
    if to_hf:
        hf_to_megatron(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    real, calls = copy._write, []

    def failing(fd, data, at):
        calls.append(at)
        if len(calls) == 20:
            raise error
        real(fd, data, at)

    monkeypatch.setattr(copy, "_write", failing)
    run = megatron_to_hf if to_hf else hf_to_megatron
    with pytest.raises(
        WeightsError if isinstance(error, OSError) else error, match="error" if isinstance(error, OSError) else None
    ):
        run(source, out)
    assert not out.exists() and beside(out) == []
    monkeypatch.setattr(copy, "_write", real)
    run(source, out)
    assert verify(models["qwen2"], out).same


def killed_while_writing(source, out, overwrite=False):
    """A forked conversion, killed with SIGKILL after some blocks."""
    pid = os.fork()
    if pid == 0:
        try:
            real, count = copy._write, [0]

            def slow(fd, data, at):
                real(fd, data, at)
                count[0] += 1
                if count[0] > 15:
                    time.sleep(60)

            copy._write = slow
            hf_to_megatron(source, out, workers=1, overwrite=overwrite)
        finally:
            os._exit(0)
    temporary = out.with_name(f".{out.name}.incomplete")
    deadline = time.monotonic() + 20
    while not (temporary.exists() and any(f.stat().st_size for f in temporary.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return temporary


def test_a_killed_conversion_can_be_run_again(models, tmp_path):
    out = tmp_path / "out"
    temporary = killed_while_writing(models["qwen2"], out)
    assert not out.exists() and temporary.exists()
    assert not (temporary / "metadata.json").exists() and not (temporary / ".metadata").exists()
    (temporary / "stale").write_text("from the run that was killed")
    hf_to_megatron(models["qwen2"], out)
    assert verify(models["qwen2"], out).same and not (out / "stale").exists() and beside(out) == []


def test_overwrite_keeps_the_old_checkpoint_until_the_new_one_is_complete(models, tmp_path):
    out = tmp_path / "out"
    hf_to_megatron(models["qwen2"], out)
    with pytest.raises(WeightsError, match="--overwrite"):
        hf_to_megatron(models["qwen3"], out)
    killed_while_writing(models["qwen3"], out, overwrite=True)
    assert verify(models["qwen2"], out).same
    hf_to_megatron(models["qwen3"], out, overwrite=True)
    assert verify(models["qwen3"], out).same and beside(out) == []


def test_a_kill_between_the_two_renames_of_an_overwrite_is_repaired(models, tmp_path):
    """The old checkpoint has been moved away and the new one is not there yet: the next run restores it first."""
    out = tmp_path / "out"
    hf_to_megatron(models["qwen2"], out)
    out.rename(tmp_path / ".out.replaced")
    with pytest.raises(WeightsError), new_directory(out, 0):
        raise WeightsError("stop")
    assert verify(models["qwen2"], out).same and beside(out) == []


def test_a_second_conversion_to_the_same_destination_is_refused(models, tmp_path):
    out = tmp_path / "out"
    with new_directory(out, 0) as first:
        with pytest.raises(WeightsError, match="another conversion is writing it"):
            hf_to_megatron(models["qwen2"], out)
        assert first.exists()
    assert out.is_dir() and beside(out) == []


def test_an_empty_directory_is_accepted_as_destination(models, tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    hf_to_megatron(models["qwen2"], out)
    assert verify(models["qwen2"], out).same


def test_everything_is_flushed_before_the_rename(models, tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    names = {}
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b))[1])
    hf_to_megatron(models["qwen2"], tmp_path / "out")
    at = events.index(("rename", str(tmp_path / "out")))
    names = {os.path.basename(e) for e in events[:at] if isinstance(e, str)}
    assert {p.name for p in (tmp_path / "out").rglob("*")} <= names
    assert str(tmp_path) in events[at:]


def test_progress_counts_every_byte_once(models, tmp_path):
    seen = []
    report = convert.hf_to_megatron(models["qwen3-moe"], tmp_path / "m", progress=lambda *x: seen.append(x))
    assert seen[-1] == (report.nbytes, report.nbytes) and [s[0] for s in seen] == sorted(s[0] for s in seen)
    seen.clear()
    report = convert.megatron_to_hf(tmp_path / "m", tmp_path / "h", progress=lambda *x: seen.append(x))
    assert seen[-1] == (report.nbytes, report.nbytes)
