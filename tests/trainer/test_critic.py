"""Runs with a critic: exact resume, also in another layout; value pre-training; the NaN guard; what they may start
from."""

import json
import signal
import threading
from functools import partial

import pytest
from forked import assert_same, at_point, fail_with, run, run_in_ranks, run_straight, send_signal, steps_of
from long_lists import some
from tiny_run import evaluated_config, raw_config

from megatron_dapo import fault_points
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.weights.verify import verify

STEPS = 3
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}, "epochs": 2}


def with_critic(make):
    def made(folder, run_dir, **overrides):
        raw = make(folder, run_dir, **overrides)
        raw.setdefault("algorithm", {})
        raw["algorithm"] |= {"advantage": "gae", "gae": {"alpha": 1.0}}
        raw["critic"] = CRITIC | raw.get("critic", {})
        return raw

    return made


config = with_critic(partial(evaluated_config, steps=STEPS))
short = with_critic(raw_config)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_straight(config, tmp_path_factory)


def critic_of(run_dir, steps=STEPS):
    return run_dir / "checkpoints" / f"step_{steps}" / "critic"


def assert_same_critic(run_dir, straight, steps=STEPS):
    assert_same(run_dir, straight, steps)
    compared = verify(critic_of(run_dir, steps), critic_of(straight[1], steps))
    assert compared.same, compared.differences


def test_every_step_trains_both(straight):
    found = steps_of(straight[1])
    for name in ("train/loss", "critic/loss", "critic/grad_norm"):
        assert len({step[name] for step in found}) == STEPS
    assert all("critic/explained_variance" in step and step["critic/lambda_mean"] > 0.5 for step in found)


# Two mini-batches and two epochs: four updates of the critic before the policy's two.
MOMENTS = {
    "an update of the critic": ("loop/before_critic_update", 4 + 3),
    "an update of the policy, the critic is done": ("loop/before_update", 4),
    "saving": ("checkpoint/before_publish", 2),
}


@pytest.mark.parametrize("moment", some(MOMENTS, "an update of the policy, the critic is done"))
def test_killed_and_resumed_is_the_same_run(moment, straight, tmp_path):
    raw = config(straight[0], tmp_path)
    assert run(raw, at_point(*MOMENTS[moment])) == -signal.SIGKILL
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def test_stopped_between_two_updates_of_the_policy(straight, tmp_path):
    """The values before the critic's updates are part of the state; turns with the policy change nothing."""
    raw = config(straight[0], tmp_path, critic__offload=True)
    assert run(raw, at_point("loop/before_update", 3, send_signal(signal.SIGTERM))) == 75
    assert (tmp_path / "checkpoints" / "step_1+1").is_dir()
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def test_another_layout_continues_with_the_same_numbers(straight, tmp_path):
    """Two steps in one process, the third on two ranks."""
    assert run(config(straight[0], tmp_path), at_point("loop/before_critic_update", 2 * 4 + 2)) == -signal.SIGKILL
    assert run_in_ranks(config(straight[0], tmp_path, policy__tensor_parallel=2)) == [0, 0]
    for ours, theirs in zip(steps_of(tmp_path), steps_of(straight[1]), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        for name in ("train/loss", "critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/bias"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    found = verify(critic_of(tmp_path), critic_of(straight[1]), tolerance=1e-4)
    assert found.same, found.differences


def test_an_update_that_is_not_finite_is_skipped(straight, tmp_path):
    raw = short(straight[0], tmp_path, trainer__steps=2)
    assert run(raw, at_point("loop/before_critic_update", 3, fail_with(NonFiniteError("planted")))) == 0
    found = steps_of(tmp_path)
    assert [step["critic/update_skipped"] for step in found] == [1, 0]
    assert [step["train/update_skipped"] for step in found] == [0, 0]
    assert "step 0, critic update 2 skipped: planted" in (tmp_path / "logs" / "warnings.log").read_text()
    assert (tmp_path / "dumps" / "step_0_critic_update_2.json").exists()


PRETRAINING = {
    "by steps": ({"steps": 2}, [False, False, True, True]),
    "by explained variance": ({"steps": 3, "explained_variance": -1e9}, [False, True, True, True]),
}


@pytest.mark.parametrize("how", PRETRAINING)
def test_pretraining_leaves_the_policy_and_its_engines_alone(how, straight, tmp_path):
    """Killed in the middle and resumed, too."""
    pretraining, trains = PRETRAINING[how]
    raw = short(straight[0], tmp_path, trainer__steps=4, critic__pretraining=pretraining)
    assert run(raw, at_point("loop/before_critic_update", 4 + 2)) == -signal.SIGKILL
    assert run(raw) == 0
    found = steps_of(tmp_path)
    assert ["train/loss" in step for step in found] == trains
    assert all("critic/loss" in step for step in found)
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["time/sync" in line for line in lines[2:]] == trains[1:3]  # after each step; the resume sends weights, too


def test_a_run_may_start_from_the_critic_of_another(straight, tmp_path):
    critic = critic_of(straight[1], STEPS)
    assert run(short(straight[0], tmp_path / "again", trainer__steps=1, critic__model=str(critic))) == 0
    assert run(short(straight[0], tmp_path / "fresh", trainer__steps=1)) == 0
    again, fresh = (steps_of(tmp_path / name)[0]["critic/explained_variance"] for name in ("again", "fresh"))
    assert fresh == pytest.approx(0, abs=1e-9) != again  # its values are 0


def test_pretraining_generates_the_next_batch_meanwhile(straight, tmp_path):
    """The critic's first update of a step waits for the next batch, which is the policy's own: of the same weights."""

    def plant():
        collected = threading.Semaphore(0)

        def wait_for(batches):
            assert all(collected.acquire(timeout=60) for _ in range(batches)), "no batch was collected meanwhile"

        for batch in range(1, 4):
            fault_points.on("rollouts/after_collect", collected.release, count=batch)
        fault_points.on("loop/before_critic_update", lambda: wait_for(2), count=1)
        fault_points.on("loop/before_critic_update", lambda: wait_for(1), count=4 + 1)

    assert run(short(straight[0], tmp_path, trainer__steps=3, critic__pretraining={"steps": 2}), plant) == 0
    assert steps_of(tmp_path)[2]["train/mismatch_mean"] < 1e-5


def test_a_checkpoint_without_critic_is_refused_and_stays(straight, tmp_path, capfd):
    raw = raw_config(straight[0], tmp_path, trainer__steps=1)
    assert run(raw) == 0
    assert run(short(straight[0], tmp_path, trainer__steps=2)) == 2
    assert "step_1 has no critic" in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "step_1").is_dir()
