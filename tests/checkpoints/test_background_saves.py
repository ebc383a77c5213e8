"""Checkpoints: written in the background; complete or absent after a full disk or a kill; never the end of a run."""

import errno
import os
import shutil
import signal
import threading

import numpy as np
import pytest
from checkpoint_run import Checks, Run, copy_of, names, resumed, run, same
from long_lists import some

from megatron_dapo import fault_points
from megatron_dapo.checkpoints import checkpoints, folder
from megatron_dapo.checkpoints.folder import read_state
from megatron_dapo.errors import RankError
from megatron_dapo.processes.fork_ranks import run_ranks

# ---- in the background ----


def save_while_training(rendezvous, run_dir, layout):
    this = Run(rendezvous, run_dir, layout).start()
    this.update(0)
    expected, release = this.weights(), threading.Event()
    if this.rank == 0:
        fault_points.on("checkpoint/before_write", release.wait)
    path = this.save(1)
    arrays = {"tokens": np.arange(4, dtype=np.int32)}
    for seed in (1, 2):  # training goes on; the checkpoint must not change
        this.update(seed)
        this.reports += this.checkpoints.poll()
    assert this.reports == [] and not path.exists()
    release.set()
    this.save(2, **arrays)  # waits for the first
    arrays["tokens"][:] = -1
    assert this.errors() == [None] and path.exists()
    this.finish()
    assert this.errors() == [None, None]
    assert this.reports[0].seconds >= this.reports[0].waited_seconds > 0
    this.finish()  # nothing is running
    return expected, this.weights()


@pytest.mark.parametrize(("layout", "ranks"), some([("do", 1), ("dp2do", 2), ("tp2", 2)], ("do", 1), ("dp2do", 2)))
def test_training_goes_on_while_a_checkpoint_is_written(layout, ranks, tmp_path):
    first, last = run(save_while_training, tmp_path, layout, ranks=ranks)
    name, state, weights, _ = run(resumed, tmp_path, layout, ranks=ranks)
    assert name == "step_2" and state["tokens"].tolist() == [0, 1, 2, 3]
    assert same(weights, last) and not same(weights, first)
    shutil.rmtree(tmp_path / "checkpoints" / "step_2")
    name, _, weights, _ = run(resumed, tmp_path, layout, ranks=ranks)
    assert name == "step_1" and same(weights, first)


def save_with_little_memory(rendezvous, run_dir):
    this = Run(rendezvous, run_dir).start()
    checkpoints.available_host_memory = lambda: 1 << 30
    path = this.save(1)
    assert path.exists() and this.errors() == [None]  # written before `save` returned
    assert this.reports[0].waited_seconds == pytest.approx(this.reports[0].seconds, rel=0.5)
    return this.warnings


def test_without_host_memory_the_loop_waits_for_the_disk(tmp_path):
    (warning,) = run(save_with_little_memory, tmp_path)
    assert "checkpoints are not written in the background" in warning and "1.1 GB of memory free" in warning


# ---- state ----


def states(rendezvous, run_dir):
    this = Run(rendezvous, run_dir, "dp2do").start()
    state = {"current": {"batch": {"tokens": np.ones(3, np.int32)}, "done": 2, "old": np.array([0.5], np.float32)}}
    this.save(1, wait=True, updates=2, skipped=3, **state)
    if this.rank == 1:
        checkpoints.read_state = None  # only rank 0 reads it
    path = this.checkpoints.newest()
    return path.name, this.checkpoints.load(this.policy, path)[1]


def test_only_rank_0_reads_the_bulk_of_the_state(tmp_path):
    (name, driver), (_, other) = run_ranks(2, states, tmp_path)
    assert name == "step_1+2"
    assert driver["rollouts"] == {"step": 1} and driver["current"]["batch"]["tokens"].tolist() == [1, 1, 1]
    assert other["rollouts"] is None and other["current"]["batch"] is None
    for state in (driver, other):
        assert state["step"] == 1 and state["skipped"] == 3 and state["current"]["done"] == 2
        assert state["current"]["old"].dtype == np.float32 and state["current"]["old"].tolist() == [0.5]


def test_a_state_is_binary_and_comes_back_bit_for_bit(tmp_path):
    values = {
        "floats": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "tokens": np.arange(100_000, dtype=np.int32).reshape(10, -1),
        "mask": np.array([True, False, True]),
        "none": np.empty((0, 3), np.int64),
        "nested": [{"a": np.uint8([7])}, (1, "two", None)],
        "number": np.float64(0.1),
    }
    from megatron_dapo.checkpoints.files import write_files
    from megatron_dapo.checkpoints.folder import state_files

    written = write_files(tmp_path, state_files(values))
    assert written["trainer.json"].bytes < 1000 and written["trainer.arrays"].bytes < 401_000
    found = read_state(tmp_path)
    for name in ("floats", "tokens", "mask", "none"):
        assert found[name].dtype == values[name].dtype and found[name].shape == values[name].shape
        assert found[name].tobytes() == values[name].tobytes() and found[name].flags.writeable
    assert found["nested"][0]["a"].tolist() == [7] and found["nested"][1] == [1, "two", None]
    assert found["number"] == 0.1


# ---- full disks ----


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_on_a_full_disk(rendezvous, run_dir, layout, failing, count):
    this = Run(rendezvous, run_dir, layout).start()
    this.save(1, wait=True)
    if this.rank == failing:
        fault_points.on("checkpoint/write_file", full_disk, count=count)
    this.update(0)
    this.save(2)
    this.finish()
    message = this.errors()[-1]
    if this.rank == 0:
        assert names(run_dir) == ["step_1"]
    fault_points.clear()
    this.update(1)
    this.save(3)  # there is room again
    this.finish()
    assert this.errors()[-1] is None
    if this.rank == failing:
        fault_points.on("checkpoint/write_file", full_disk)
    this.save(4, wait=True)
    assert "cannot be written: No space left on device" in this.errors()[-1]
    return message, this.weights()


WRITTEN = some(range(1, 8), 1, 4, 7)  # number of a file


@pytest.mark.parametrize("count", WRITTEN)
def test_a_full_disk_at_any_file_leaves_the_checkpoints_before_it(count, tmp_path):
    message, weights = run(save_on_a_full_disk, tmp_path, "do", 0, count)
    assert ".step_2.tmp/" in message and "cannot be written: No space left on device (" in message
    name, _, found, _ = run(resumed, tmp_path)
    assert name == "step_3" and same(found, weights)


def test_a_full_disk_on_one_rank_cancels_the_save_on_all(tmp_path):
    message, weights = run(save_on_a_full_disk, tmp_path, "dp2do", 1, 1, ranks=2)
    assert message.startswith("rank 1: ") and "No space left on device" in message
    name, _, found, _ = run(resumed, tmp_path, "dp2do", ranks=2)
    assert name == "step_3" and same(found, weights)


def save_without_space(rendezvous, run_dir):
    this = Run(rendezvous, run_dir).start()
    this.save(1, wait=True)
    usage = shutil.disk_usage(run_dir)
    folder.shutil.disk_usage = lambda path: usage._replace(free=1000)
    fault_points.on("checkpoint/before_write", fault_points.kill)  # nothing may be written
    this.save(2)
    return this.errors()[-1]


def test_space_is_checked_before_anything_is_written(tmp_path):
    message = run(save_without_space, tmp_path)
    assert "checkpoints has 0.00 GB free, the checkpoint needs 0.0" in message
    assert "lower trainer.checkpoint.keep" in message and names(tmp_path) == ["step_1"]


def save_until_full(rendezvous, run_dir):
    this = Run(rendezvous, run_dir, keep=100).start()
    folder.shutil.disk_usage = lambda path: os.statvfs(path) and shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    for step in range(1, 100):
        this.save(step)
        this.finish()
        if this.errors()[-1] is not None:
            return step, this.errors()[-1]
    raise AssertionError("the disk was never full")


def test_a_disk_that_is_really_full(tmp_path):
    """A small file system of its own, where this user may mount one."""
    mounted = os.system(f"mount -t tmpfs -o size=3m tmpfs {tmp_path} 2>/dev/null") == 0
    if not mounted:
        pytest.skip("this user may not mount a tmpfs")
    try:
        step, message = run(save_until_full, tmp_path)
        assert step > 1 and "cannot be written: No space left on device" in message
        assert names(tmp_path)[-1].startswith("step_")
        assert Checks(tmp_path).newest() == f"step_{step - 1}"
    finally:
        os.system(f"umount {tmp_path}")


# ---- kills ----


def save_and_die(rendezvous, run_dir, point, count):
    this = Run(rendezvous, run_dir).start()
    fault_points.on(point, fault_points.kill, count=count)
    for step in (1, 2):
        this.update(step)
        this.save(step, wait=True)


POINTS = [
    ("checkpoint/before_stage", 2, "step_1"),
    ("checkpoint/before_write", 2, "step_1"),
    *(("checkpoint/write_file", 7 + n, "step_1") for n in WRITTEN),
    ("checkpoint/after_write", 2, "step_1"),
    ("checkpoint/before_publish", 2, "step_1"),
    ("checkpoint/before_prune", 2, "step_2"),
]


@pytest.mark.parametrize(("point", "count", "expected"), POINTS)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(point, count, expected, tmp_path):
    with pytest.raises(RankError, match=f"exit code -{signal.SIGKILL:d}"):
        run(save_and_die, tmp_path, point, count)
    assert Checks(tmp_path).newest() == expected
    assert not any(name.startswith(".") for name in names(tmp_path))


def test_a_kill_between_moving_the_old_and_the_new_one_keeps_the_old(three, tmp_path):
    """Both have the same name: a stop was saved, resumed and stopped again at the same place."""
    run_dir, _ = copy_of(three, tmp_path)
    newest = run_dir / "checkpoints" / "step_3"
    (newest / folder.REPLACED).touch()
    newest.rename(newest.with_name(".step_3.old"))
    assert Checks(run_dir).newest() == "step_3"
    assert names(run_dir) == ["step_1", "step_2", "step_3"]
