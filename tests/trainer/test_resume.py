"""Exact resume: killed at any moment and started again, a run gives the numbers of one that was never interrupted."""

import errno
import os
import signal
import time

import pytest
from forked import assert_same, at_call, at_point, records, run
from tiny_run import raw_config

from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.policy.policy import Policy
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.trainer.loop import REQUEUE
from megatron_dapo.trainer.rollout_driver import Rollouts
from megatron_dapo.weights.sync import WeightBuckets

STEPS = 6
OPTIONS = {"trainer__steps": STEPS, "evaluate__every": 3}


def config(folder, run_dir, **changes):
    raw = raw_config(folder, run_dir, **OPTIONS, **changes)
    raw["evaluate"] |= {"data": {"path": str(folder / "problems.jsonl"), "template": "plain"}, "samples": 2}
    return raw


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps without interruption."""
    folder, run_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("straight")
    assert run(config(folder, run_dir)) == 0
    return folder, run_dir


def test_the_run_itself(straight):
    _, run_dir = straight
    found = records(run_dir)
    assert [step for step, kind, _ in found if kind == "step"] == list(range(1, STEPS + 1))
    assert [step for step, kind, _ in found if kind == "eval"] == [0, 3, 6]
    losses = [metrics["train/loss"] for _, kind, metrics in found if kind == "step"]
    assert len(set(losses)) == STEPS  # something happens in every step


# One update per mini-batch, two per step; generate and grade are called at least 16 times a step.
MOMENTS = {
    "sampling": (EmbeddedEngine, "generate", 60),
    "grading": (RewardPool, "grade", 70),
    "first update of a step": (Policy, "update", 7),
    "second update of a step": (Policy, "update", 8),
    "old log-probs": (Policy, "log_probs", 4),
    "sync": (WeightBuckets, "_exchange", 3),
}
# A checkpoint of this run has seven files.
SAVING = {
    "checkpoint/before_stage": 3,
    "checkpoint/before_write": 3,
    "checkpoint/write_file": 3 * 7 + 4,
    "checkpoint/after_write": 4,
    "checkpoint/before_publish": 4,
    "checkpoint/before_prune": 4,
}


@pytest.mark.parametrize("moment", [*MOMENTS, *SAVING])
def test_killed_and_resumed_is_the_same_run(moment, straight, tmp_path):
    folder, straight_dir = straight
    raw = config(folder, tmp_path)
    plant = at_call(*MOMENTS[moment]) if moment in MOMENTS else at_point(moment, SAVING[moment])
    assert run(raw, plant) == -signal.SIGKILL
    assert len(records(tmp_path)) < len(records(straight_dir))
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_killed_twice_with_rare_checkpoints(straight, tmp_path):
    """Steps since the last checkpoint are done again, not counted twice."""
    folder, straight_dir = straight
    raw = config(folder, tmp_path, trainer__checkpoint={"every": 2})
    assert run(raw, at_call(Policy, "update", 8)) == -signal.SIGKILL
    assert run(raw, at_call(EmbeddedEngine, "generate", 40)) == -signal.SIGKILL
    assert run(raw) == 0
    assert records(tmp_path) == records(straight_dir)


def terminate_self():
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_self_and_linger():
    """Holds the rollouts' thread, so that the batch cannot be complete before the loop has looked."""
    terminate_self()
    time.sleep(2)


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ((Policy, "update", 7), "step_3+1"),
        ((EmbeddedEngine, "generate", 60), "step_"),
        ((Policy, "update", 8), "step_4"),
    ],
    ids=["in the middle of a step", "while sampling", "at the end of a step"],
)
def test_asked_to_stop_saves_and_says_so(moment, name, straight, tmp_path):
    """SIGTERM finishes the mini-batch, saves, and ends with the code that means "start me again"."""
    folder, _ = straight
    raw = config(folder, tmp_path)
    sampling = moment[0] is EmbeddedEngine
    assert run(raw, at_call(*moment, terminate_self_and_linger if sampling else terminate_self)) == REQUEUE
    saved = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    assert any(found.startswith(name) for found in saved), saved
    assert any("+0" in found for found in saved) == sampling, saved
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_a_batch_that_is_complete_when_the_stop_comes_is_kept(straight, tmp_path):
    """The loop cancels it at the very moment at which it has left the sampler."""
    folder, _ = straight
    raw, collect = config(folder, tmp_path), Rollouts._collect

    async def then_stop(self, step):
        batch = await collect(self, step)
        if step == 3:
            terminate_self_and_linger()
        return batch

    def plant():
        Rollouts._collect = then_stop

    assert run(raw, plant) == REQUEUE
    assert (tmp_path / "checkpoints" / "step_3+0").is_dir()
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_a_damaged_checkpoint_costs_its_steps_only(straight, tmp_path):
    folder, _ = straight
    raw = config(folder, tmp_path)
    assert run(raw, at_call(Policy, "update", 9)) == -signal.SIGKILL
    newest = max((tmp_path / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    content = bytearray((newest / "policy" / "__0_0.distcp").read_bytes())
    content[len(content) // 3] ^= 1
    (newest / "policy" / "__0_0.distcp").write_bytes(content)
    assert run(raw) == 0
    assert f"{newest} is damaged" in (tmp_path / "logs" / "warnings.log").read_text()
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert_same(tmp_path, straight, STEPS)


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(straight, tmp_path):
    folder, _ = straight
    assert run(config(folder, tmp_path), at_point("checkpoint/before_write", 3, full_disk)) == 0
    assert "step_3 was not saved: " in (tmp_path / "logs" / "warnings.log").read_text()
    assert_same(tmp_path, straight, STEPS)


def test_a_full_disk_at_the_last_checkpoint_is_an_error(straight, tmp_path):
    folder, _ = straight
    assert run(config(folder, tmp_path), at_point("checkpoint/before_write", STEPS, full_disk)) == 1
    assert (tmp_path / "checkpoints" / f"step_{STEPS - 1}").is_dir()
    assert run(config(folder, tmp_path)) == 0
    assert_same(tmp_path, straight, STEPS)


def test_a_finished_run_does_nothing_more(straight):
    folder, run_dir = straight
    before = records(run_dir)
    assert run(config(folder, run_dir)) == 0
    assert records(run_dir) == before


def test_old_checkpoints_go_and_the_best_stays(straight):
    _, run_dir = straight
    names = {p.name for p in (run_dir / "checkpoints").iterdir() if p.is_dir()}
    assert {f"step_{STEPS}", f"step_{STEPS - 1}"} <= names
    assert len(names) <= 3
    assert not any(name.startswith(".") for name in names)
