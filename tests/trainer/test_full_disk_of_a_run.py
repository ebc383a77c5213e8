"""A run on a full disk pauses instead of training steps that nobody records, and goes on when there is room."""

import errno
import os
import subprocess

import pytest
from forked import assert_same, at_point, records, run, run_straight
from tiny_run import evaluated_config, write_config

from megatron_dapo.cli import main
from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe.metrics_file import AppendFile
from megatron_dapo.observe.observer import Observer
from megatron_dapo.trainer.rollouts import Rollouts

STEPS = 3


def config(folder, run_dir, **changes):
    raw = evaluated_config(folder, run_dir, STEPS, **changes)
    raw["observe"]["console"] = "plain"
    return raw


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_straight(config, tmp_path_factory)


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = "size=8m,nr_inodes=300"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill_bytes(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def fill_inodes(disk):
    (disk / "fillers").mkdir()
    try:
        for number in range(1000):
            (disk / "fillers" / str(number)).touch()
    except OSError as error:
        assert error.errno == errno.ENOSPC


def make_room_when_paused(disk):
    """From the moment on at which the run waits."""
    wait = Rollouts.wait_until

    def wait_until(self, is_over, seconds):
        assert not is_over()
        subprocess.run(["rm", "-r", *disk.glob("filler*")], check=True)
        return wait(self, is_over, seconds)

    Rollouts.wait_until = wait_until


@pytest.mark.parametrize(("fill", "update", "said"), [
    (fill_bytes, 3, "No space left on device (0.00 of 0.01 GB free): delete something there"),
    (fill_inodes, 2 * STEPS, "No space left on device (none of 300 inodes is free)"),  # before the last checkpoint
])  # fmt: skip
def test_a_run_without_room_pauses_and_goes_on(fill, update, said, straight, small_disk, capfd):
    def plant():
        make_room_when_paused(small_disk)
        at_point("loop/before_update", update, lambda: fill(small_disk))()

    assert run(config(straight[0], small_disk / "run"), plant) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "paused: " in line]
    assert len(lines) == 1 and said in lines[0] and ("is safe" in lines[0] or "no checkpoint yet" in lines[0])
    assert_same(small_disk / "run", straight, STEPS)


def test_a_command_on_a_full_disk_ends_in_one_line(straight, small_disk, tmp_path, monkeypatch, capsys):
    """Before the model is loaded, and without leaving an empty file."""
    fill_bytes(small_disk)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    raw = config(straight[0], small_disk / "run", slurm__gpus_per_node=0)
    file, output = str(write_config(raw, tmp_path / "run.yaml")), small_disk / "new.yaml"
    room = "No space left on device (0.00 of 0.01 GB free): delete something there"
    for words, said in [
        (["train", file, "--dry-run"], f"trainer.run_dir: {small_disk}/run cannot be written: {room}"),
        (["slurm", file, "--dry-run"], f"trainer.run_dir: {small_disk}/run cannot be written: {room}"),
        (
            ["eval", file, "--out", str(small_disk / "eval")],
            f"--out {small_disk}/eval: cannot write results there: {room}",
        ),
        (
            ["init", "--model", "Qwen2.5-0.5B", "--data", "d", "--output", str(output)],
            f"{output} cannot be written: {room}",
        ),
        (["examples", str(small_disk / "examples")], "examples cannot be created ([Errno 28] No space left on device"),
    ]:
        assert main(words) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("megatron-dapo: ") and said in last
    assert not output.exists()


def fail_from_step(step, code):
    """metrics.jsonl cannot be written from this step on."""
    write = AppendFile.write

    def fail(self, block):
        if self.path.name == "metrics.jsonl" and b'"step": %d,' % step in block:
            raise OSError(code, os.strerror(code))
        write(self, block)

    AppendFile.write = fail


def test_a_run_without_room_ends_after_the_limit_and_has_trained_no_further_step(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path, rollout__sampler={"stall_timeout": 2},
                 trainer__heartbeat={"every": 0.2, "silent": 60, "stuck": 3})  # fmt: skip
    assert run(raw, lambda: fail_from_step(2, errno.ENOSPC)) == 1
    said = capfd.readouterr()
    assert "ends after 3 s (trainer.heartbeat.stuck)" in said.out
    assert "cannot write the metrics of step 2" in said.err and "Saved first: " in said.err
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step_*"))] == ["step_1", "step_2"]
    assert max(step for step, _, _ in records(tmp_path)) == 1
    del raw["trainer"]["heartbeat"], raw["rollout"]["sampler"]["stall_timeout"]
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


@pytest.mark.parametrize(("code", "remedy"), [
    (errno.ENOSPC, "delete something there"), (errno.EDQUOT, "a larger quota"), (errno.EROFS, "mount it for writing"),
    (errno.EACCES, "change its permissions"), (errno.EIO, "the disk or its network fails"),
    (errno.ESTALE, "mount it again"),
])  # fmt: skip
def test_what_prevents_a_record_is_said_in_one_line_with_what_to_do(code, remedy, tmp_path, monkeypatch):
    watched = Observer(ObserveConfig(console="off", report=False), tmp_path, total_steps=2, settings={})

    def fail(fd, data):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        watched.step(1, {"x": 1.0})
        assert os.strerror(code) in watched.unwritten and watched.unwritten.endswith(remedy)
        assert "\n" not in watched.unwritten
    assert watched.write_kept() == "" and records(tmp_path)[0][0] == 1
