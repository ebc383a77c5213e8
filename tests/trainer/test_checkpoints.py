"""Checkpoints: written in the background, complete or absent, checked before use, and never the end of a run."""

import errno
import os
import shutil
import signal
import threading
from functools import partial

import numpy as np
import orjson
import pytest
import torch

from megatron_dapo import fault_points
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.policy.checkpoint_files import CheckpointError
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import RankError, initialize
from megatron_dapo.selfcheck.layout_spec import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full
from megatron_dapo.trainer import checkpoint, checkpoint_folder
from megatron_dapo.trainer.checkpoint import Checkpoints
from megatron_dapo.trainer.checkpoint_folder import CheckpointFolder
from megatron_dapo.trainer.state_files import read_state

SHAPE = synthetic_shape("dense")


class Run:
    """One rank of a run with its policy and checkpoints; collects what they report."""

    def __init__(self, rendezvous, run_dir, layout="do", **options):
        config = selfcheck_config(LayoutSpec.parse(layout))
        self.policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
        self.rank = rendezvous.rank
        self.reports, self.warnings = [], []
        self.checkpoints = Checkpoints(
            run_dir, CheckpointConfig(**options), self.policy.runtime, self.reports.append, warn=self.warnings.append
        )
        checkpoint.available_host_memory = lambda: 1 << 40  # whatever else runs on this machine

    def start(self):
        self.policy.load_hf(random_hf_weights(SHAPE))
        return self

    def update(self, seed):
        return self.policy.update(awkward_batch(SHAPE, seed))["loss"]

    def save(self, step, *, wait=False, updates=None, score=None, **state):
        return self.checkpoints.save(
            self.policy, step, updates, {"rollouts": {"step": step}, **state}, score, wait=wait
        )

    def weights(self):
        return gather_full(self.policy, self.policy.runtime, gradient=False)

    def errors(self):
        return [report.error for report in self.reports]


def run(function, run_dir, *args, ranks=1):
    return run_ranks(ranks, function, run_dir, *args)[0]


def names(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def saved_steps(rendezvous, run_dir, steps, layout="do", **options):
    """A run that saves after each of `steps`; returns the weights at each."""
    this = Run(rendezvous, run_dir, layout, **options).start()
    weights = {}
    for step in steps:
        this.update(step)
        this.save(step, wait=True)
        weights[step] = this.weights()
    assert this.errors() == [None] * len(steps)
    return weights


def resumed(rendezvous, run_dir, layout="do"):
    """What a new start finds: name, state, weights, warnings."""
    this = Run(rendezvous, run_dir, layout)
    path = this.checkpoints.newest()
    if path is None:
        return None, None, None, this.warnings
    state = this.checkpoints.load(this.policy, path)
    return path.name, state, this.weights(), this.warnings


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
        this.checkpoints.poll()
    assert this.reports == [] and not path.exists()
    release.set()
    this.save(2, **arrays)  # waits for the first
    arrays["tokens"][:] = -1
    assert this.errors() == [None] and path.exists()
    this.checkpoints.finish()
    assert this.errors() == [None, None]
    assert this.reports[0].seconds >= this.reports[0].waited_seconds > 0
    this.checkpoints.finish()  # nothing is running
    return expected, this.weights()


@pytest.mark.parametrize(("layout", "ranks"), [("do", 1), ("dp2do", 2), ("tp2", 2)])
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
    checkpoint.available_host_memory = lambda: 1 << 30
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
        checkpoint.read_state = None  # only rank 0 reads it
    path = this.checkpoints.newest()
    return path.name, this.checkpoints.load(this.policy, path)


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
    from megatron_dapo.policy.checkpoint_files import write_files
    from megatron_dapo.trainer.state_files import state_files

    written = write_files(tmp_path, state_files(values))
    assert written["trainer.json"].bytes < 1000 and written["trainer.arrays"].bytes < 401_000
    found = read_state(tmp_path)
    for name in ("floats", "tokens", "mask", "none"):
        assert found[name].dtype == values[name].dtype and found[name].shape == values[name].shape
        assert found[name].tobytes() == values[name].tobytes() and found[name].flags.writeable
    assert found["nested"][0]["a"].tolist() == [7] and found["nested"][1] == [1, "two", None]
    assert found["number"] == 0.1


# ---- damage ----


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run directory with three checkpoints, and the weights of each."""
    run_dir = tmp_path_factory.mktemp("three")
    return run_dir, run(partial(saved_steps, keep=3), run_dir, (1, 2, 3))


def copy_of(three, tmp_path):
    shutil.copytree(three[0], tmp_path / "run")
    return tmp_path / "run", three[1]


def test_the_manifest_lists_every_file(three):
    folder = three[0] / "checkpoints" / "step_3"
    listed = orjson.loads((folder / "manifest.json").read_bytes())["files"]
    on_disk = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    del on_disk["manifest.json"]
    assert {name: record["bytes"] for name, record in listed.items()} == on_disk
    assert {"policy/__0_0.distcp", "policy/.metadata", "trainer.json", "rng/rank_0.json"} <= set(listed)


FILES = [
    "policy/__0_0.distcp", "policy/.metadata", "policy/common.pt", "policy/metadata.json", "trainer.json",
    "trainer.arrays", "rng/rank_0.json", "manifest.json",
]  # fmt: skip


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, os.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage, three, tmp_path):
    """Every kind of file, all in one run: the newest checkpoint is damaged, found and set aside, file after file."""
    run_dir, weights = copy_of(three, tmp_path)
    newest = run_dir / "checkpoints" / "step_3"
    for file in FILES:
        if not (newest / file).stat().st_size or (file == "manifest.json" and damage is os.unlink):
            continue  # an empty file; and without manifest it is a checkpoint of an older version
        whole = (newest / file).read_bytes()
        damage(newest / file)
        folder = Checks(run_dir)
        assert folder.newest() == "step_2", file
        (warning,) = folder.warnings
        assert f"{newest} is damaged" in warning and file in warning and "It is now step_3.damaged" in warning
        (run_dir / "checkpoints" / "step_3.damaged").rename(newest)
        (newest / file).write_bytes(whole)
        assert Checks(run_dir).newest() == "step_3"
    damage(newest / FILES[0])
    name, state, found, _ = run(resumed, run_dir)
    assert name == "step_2" and state["step"] == 2 and same(found, weights[2])


class Checks:
    """`newest` in a process group of one, without a policy."""

    def __init__(self, run_dir):
        self.run_dir, self.warnings = run_dir, []

    def newest(self):
        name, self.warnings = run(only_newest, self.run_dir)
        return name


def only_newest(rendezvous, run_dir):
    config = selfcheck_config(LayoutSpec.parse("single"))
    warnings = []
    runtime = initialize(config.policy, rendezvous=rendezvous)
    path = Checkpoints(run_dir, CheckpointConfig(), runtime, warn=warnings.append).newest()
    return path and path.name, warnings


def test_ranks_share_the_check(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    for file in ("policy/__0_0.distcp", "policy/common.pt"):
        flip_a_bit(run_dir / "checkpoints" / "step_3" / file)
    (first, warnings), (second, others) = run_ranks(2, only_newest, run_dir)
    assert first == second == "step_2" and "(and 1 more)" in warnings[0] and others == []


def test_without_a_usable_checkpoint_nothing_starts_from_scratch(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    for step in (1, 2, 3):
        flip_a_bit(run_dir / "checkpoints" / f"step_{step}" / FILES[0])
    with pytest.raises(RankError, match=r"no checkpoint in .* can be used: .*step_3 is damaged: .*; .*step_1 is dam"):
        Checks(run_dir).newest()
    assert names(run_dir) == ["step_1.damaged", "step_2.damaged", "step_3.damaged"]


def test_an_empty_run_has_no_checkpoint(tmp_path):
    assert Checks(tmp_path).newest() is None


def test_a_checkpoint_of_an_older_version_loads(three, tmp_path):
    """It has no manifest and lists instead of arrays."""
    run_dir, weights = copy_of(three, tmp_path)
    folder = run_dir / "checkpoints" / "step_3"
    state = read_state(folder)
    for file in ("manifest.json", "trainer.arrays"):
        (folder / file).unlink()
    (folder / "trainer.json").write_bytes(orjson.dumps({**state, "old": [1, 2]}))
    name, found, loaded, warnings = run(resumed, run_dir)
    assert name == "step_3" and found["old"] == [1, 2] and same(loaded, weights[3]) and warnings == []


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
    this.checkpoints._await_running()
    message = this.errors()[-1]
    if this.rank == 0:
        assert names(run_dir) == ["step_1"]
    fault_points.clear()
    this.update(1)
    this.save(3)  # there is room again
    this.checkpoints.finish()
    assert this.errors()[-1] is None
    if this.rank == failing:
        fault_points.on("checkpoint/write_file", full_disk)
    with pytest.raises(CheckpointError, match=r"step_4 was not saved: .* cannot be written: No space left on device"):
        this.save(4, wait=True)  # the last save of a run: the exit says so
    return message, this.weights()


@pytest.mark.parametrize("count", range(1, 8))
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
    checkpoint_folder.shutil.disk_usage = lambda path: usage._replace(free=1000)
    fault_points.on("checkpoint/before_write", fault_points.kill)  # nothing may be written
    this.save(2)
    return this.errors()[-1]


def test_space_is_checked_before_anything_is_written(tmp_path):
    message = run(save_without_space, tmp_path)
    assert "checkpoints has 0.00 GB free, the checkpoint needs 0.0" in message
    assert "lower trainer.checkpoint.keep" in message and names(tmp_path) == ["step_1"]


def save_until_full(rendezvous, run_dir):
    this = Run(rendezvous, run_dir, keep=100).start()
    checkpoint_folder.shutil.disk_usage = lambda path: (
        os.statvfs(path) and shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    )
    for step in range(1, 100):
        this.save(step)
        this.checkpoints._await_running()
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
    *(("checkpoint/write_file", 7 + n, "step_1") for n in range(1, 8)),
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
    folder = run_dir / "checkpoints"
    (folder / "step_3" / checkpoint_folder.REPLACED).touch()
    (folder / "step_3").rename(folder / ".step_3.old")
    assert Checks(run_dir).newest() == "step_3"
    assert names(run_dir) == ["step_1", "step_2", "step_3"]


# ---- pruning ----


def test_pruning_survives_old_and_foreign_files(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    folder = run_dir / "checkpoints"
    (folder / "step_9").write_text("a file")
    (folder / "step_x").mkdir()
    (folder / "scores.json").write_text("{")
    (folder / "step_0").mkdir()
    (folder / "step_0" / "trainer.json").write_text("not JSON")
    (folder / "step_1" / "manifest.json").write_text("[]")
    (folder / "step_2" / "manifest.json").write_text('{"score": "high"}')
    assert CheckpointFolder(run_dir, CheckpointConfig(keep=1)).prune() == []
    assert names(run_dir) == ["scores.json", "step_3", "step_9", "step_x"]


def test_the_best_checkpoint_is_kept(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    folder = CheckpointFolder(run_dir, CheckpointConfig(keep=1))
    assert folder.set_score("step_2", 0.5) == []  # known after the save
    assert names(run_dir) == ["best.json", "scores.json", "step_2", "step_3"]
    assert orjson.loads((run_dir / "checkpoints" / "best.json").read_bytes()) == {"checkpoint": "step_2", "score": 0.5}
    assert folder.set_score("step_3", 0.7) == []
    assert names(run_dir) == ["best.json", "scores.json", "step_3"]


def test_a_checkpoint_that_cannot_be_removed_is_reported(three, tmp_path, monkeypatch):
    run_dir, _ = copy_of(three, tmp_path)
    rename = type(run_dir).rename

    def refuse(self, target):
        if self.name == "step_1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(type(run_dir), "rename", refuse)
    (problem,) = CheckpointFolder(run_dir, CheckpointConfig(keep=1)).prune()
    assert "step_1 cannot be removed: Permission denied" in problem and names(run_dir) == ["step_1", "step_3"]
