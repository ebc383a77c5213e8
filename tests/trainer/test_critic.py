"""Runs with a critic: the next batch is generated while it trains; exact resume, also in another layout; value
pre-training; the NaN guard; what they may start from."""

import json
import shutil
import signal
import threading
from functools import partial

import pytest
import torch
from forked import assert_same, at_point, fail_with, run, run_in_ranks, run_straight, send_signal, steps_of
from long_lists import some
from safetensors.torch import load_file, save_file
from tiny_run import evaluated_config, make_model, raw_config

from megatron_dapo import fault_points
from megatron_dapo.checkpoints.folder import check_resume
from megatron_dapo.config import ConfigError, check_config, parse_config
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.step import NonFiniteError, steps_with_updates
from megatron_dapo.trainer.loop import Trainer
from megatron_dapo.trainer.preflight import check_setup
from megatron_dapo.weights.verify import verify

STEPS = 3
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}, "epochs": 2}


def with_critic(make):
    def made(folder, run_dir, **overrides):
        raw = make(folder, run_dir, **overrides)
        raw.setdefault("algorithm", {})
        raw["algorithm"] |= {"advantage": "gae", "gae": {"alpha": 1.0}}
        raw["critic"] = CRITIC | raw.get("critic", {})
        raw["reward"]["grader"] = "python:tiny_reward.sometimes_ungraded"
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


def wait_for_batches(*awaited):
    """The critic's first update of step i waits until awaited[i] batches more are collected."""
    collected = threading.Semaphore(0)

    def wait(batches):
        assert all(collected.acquire(timeout=30) for _ in range(batches)), "no batch was collected meanwhile"

    for batch in range(1, sum(awaited) + 1):
        fault_points.on("rollouts/after_collect", collected.release, count=batch)
    for step, batches in enumerate(awaited):
        fault_points.on("loop/before_critic_update", partial(wait, batches), count=4 * step + 1)


def collect_afterwards():
    """As with engines that share the GPUs."""
    Trainer._collect_during_critic = lambda self: None


@pytest.mark.parametrize("when", [partial(wait_for_batches, 2, 1), collect_afterwards], ids=["meanwhile", "afterwards"])
def test_when_the_next_batch_is_collected_changes_no_number(when, straight, tmp_path):
    assert run(config(straight[0], tmp_path), when) == 0
    assert_same_critic(tmp_path, straight)
    assert all(step["reward/ungraded/by-grader"] for step in steps_of(tmp_path)), "no count that could be another's"


# Two mini-batches and two epochs: four updates of the critic after the policy's two.
MOMENTS = {
    "an update of the policy": ("loop/before_update", 4),
    "sending weights, the policy is done": ("loop/before_sync", 2),
    "an update of the critic": ("loop/before_critic_update", 4 + 3),
    "saving": ("checkpoint/before_publish", 2),
}


@pytest.mark.parametrize("moment", some(MOMENTS, "an update of the critic"))
def test_killed_and_resumed_is_the_same_run(moment, straight, tmp_path):
    raw = config(straight[0], tmp_path)
    assert run(raw, at_point(*MOMENTS[moment])) == -signal.SIGKILL
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def test_stopped_between_two_updates_of_the_policy(straight, tmp_path):
    """The values are part of the state; turns with the policy change nothing."""
    raw = config(straight[0], tmp_path, critic__offload=True)
    assert run(raw, at_point("loop/before_update", 3, send_signal(signal.SIGTERM))) == 75
    assert (tmp_path / "checkpoints" / "step_1+1").is_dir()
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def stop_while(arrival):
    """The critic's second update of step 1 waits until the rollout thread is there; then the run is stopped."""

    def plant():
        there = threading.Event()
        fault_points.on(arrival[0], there.set, count=arrival[1])
        fault_points.on("loop/before_critic_update", lambda: there.wait(30) and signal_self(), count=4 + 2)

    signal_self = send_signal(signal.SIGTERM)
    return plant


NEXT_BATCH = {"begun": ("rollouts/before_collect", 3), "complete": ("rollouts/after_collect", 3)}


@pytest.mark.parametrize("batch", NEXT_BATCH)
def test_stopped_between_two_updates_of_the_critic(batch, straight, tmp_path):
    """The policy's updates are done and not made again; the next batch is in the state as far as it is."""
    raw = config(straight[0], tmp_path, critic__offload=True)
    assert run(raw, stop_while(NEXT_BATCH[batch])) == 75
    assert (tmp_path / "checkpoints" / "step_1+4").is_dir()
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def test_lost_engines_between_the_policy_and_the_critic(straight, tmp_path):
    """Saved when the weights cannot be sent: a resumed run makes all updates of the critic and none of the policy."""

    async def fail(self, *arguments):
        raise EngineError("planted: no server is left")

    def lose():
        EmbeddedEngine.load_weights = fail

    raw = config(straight[0], tmp_path)
    assert run(raw, at_point("loop/before_update", 4, lose)) == 1
    assert (tmp_path / "checkpoints" / "step_1+2").is_dir()
    assert run(raw) == 0
    assert_same_critic(tmp_path, straight)


def test_another_layout_continues_with_the_same_numbers(straight, tmp_path):
    """Two steps and half of the third's updates of the critic in one process, the rest on two ranks."""
    stop = at_point("loop/before_critic_update", 2 * 4 + 2, send_signal(signal.SIGTERM))
    assert run(config(straight[0], tmp_path), stop) == 75
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
    assert "step 1, critic update 3 skipped: planted" in (tmp_path / "logs" / "warnings.log").read_text()
    assert (tmp_path / "dumps" / "step_1_critic_update_3.json").exists()


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
    sent = ["time/sync" in line for line in lines]  # the resume may send weights, too
    assert [sent[0], *sent[2:]] == [False, True, False]


def test_the_policys_learning_rate_decays_over_the_steps_that_train_it(straight, tmp_path):
    """Two steps of two updates after two of pre-training: 1, 3/4, 2/4, 1/4 of the rate. The critic has all steps."""
    raw = short(straight[0], tmp_path, trainer__steps=4, critic__pretraining={"steps": 2}, critic__epochs=1)
    for section in ("policy", "critic"):
        raw[section]["optimizer"] = {"lr": 1e-3, "warmup_steps": 0, "schedule": "linear"}
    assert run(raw) == 0
    found = steps_of(tmp_path)
    assert [step["train/lr"] for step in found[2:]] == pytest.approx([0.875e-3, 0.375e-3])
    assert [step["critic/lr"] for step in found] == pytest.approx([(15 - 4 * step) / 16 * 1e-3 for step in range(4)])
    for model, updates in (("policy", 4), ("critic", 8)):
        state = torch.load(tmp_path / "checkpoints" / "step_4" / model / "common.pt", weights_only=False)
        assert state["opt_param_scheduler"]["lr_decay_steps"] == updates, "Megatron-LM would go on in another schedule"


def test_a_pretraining_that_may_end_earlier_does_not_shorten_the_schedule():
    """The rate would be min_lr for the rest of the run."""
    algorithm, pretraining = {"preset": "vapo"}, {"steps": 50}
    raw = {"algorithm": algorithm, "critic": {"pretraining": pretraining}, "trainer": {"steps": 100}}
    assert [steps_with_updates(parse_config(raw), critic) for critic in (False, True)] == [50, 100]
    pretraining["explained_variance"] = 0.5
    assert steps_with_updates(parse_config(raw), False) == 100


def test_a_run_may_start_from_the_critic_of_another(straight, tmp_path):
    critic = critic_of(straight[1], STEPS)
    assert run(short(straight[0], tmp_path / "again", trainer__steps=1, critic__model=str(critic))) == 0
    assert run(short(straight[0], tmp_path / "fresh", trainer__steps=1)) == 0
    again, fresh = (steps_of(tmp_path / name)[0]["critic/explained_variance"] for name in ("again", "fresh"))
    assert fresh == pytest.approx(0, abs=1e-9) != again  # its values are 0


def test_pretraining_generates_the_next_batch_meanwhile(straight, tmp_path):
    """It is the policy's own: of the same weights."""
    raw = short(straight[0], tmp_path, trainer__steps=3, critic__pretraining={"steps": 2})
    assert run(raw, partial(wait_for_batches, 2, 1)) == 0
    assert steps_of(tmp_path)[2]["train/mismatch_mean"] < 1e-5


def test_pretraining_stopped_between_two_updates(straight, tmp_path):
    pretrained = partial(short, straight[0], trainer__steps=3, critic__pretraining={"steps": 2})
    undisturbed, raw = tmp_path / "undisturbed", pretrained(tmp_path / "stopped")
    assert run(pretrained(undisturbed)) == 0
    assert run(raw, stop_while(NEXT_BATCH["complete"])) == 75
    assert (tmp_path / "stopped" / "checkpoints" / "step_1+2").is_dir()
    assert run(raw) == 0
    assert_same_critic(tmp_path / "stopped", (straight[0], undisturbed))


def share_gpus():
    RolloutConfig.shares_gpus = property(lambda self: True)


@pytest.mark.parametrize("way", ["colocated", "ahead"])
def test_pretraining_does_not_make_groups_stale_elsewhere(way, straight, tmp_path):
    """As below, with engines that share the GPUs, or generate ahead. Only the first need the weights again."""
    raw = short(
        straight[0], tmp_path, trainer__steps=6, critic__pretraining={"steps": 4}, rollout__dynamic_sampling=False,
        rollout__sampler={"oversampling": 4}, rollout__max_staleness=int(way == "ahead"),
    )  # fmt: skip
    assert run(raw, share_gpus if way == "colocated" else None) == 0
    found = steps_of(tmp_path)
    assert [step["rollout/groups_submitted"] for step in found] == [16, 0, 0, 0, 16, 0]
    assert not any("rollout/dropped/stale" in step for step in found)
    assert max(step["rollout/staleness_max"] for step in found) == 1
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["time/sync" in line for line in lines[1:4]] == [way == "colocated"] * 3


def test_pretraining_does_not_make_groups_stale(straight, tmp_path):
    """Steps 1 to 3 train on surplus groups of step 0, also after a resume before step 2, and step 5 on those of step 4:
    pre-training of four steps changes no weights."""
    make = partial(
        short, straight[0], trainer__steps=6, critic__pretraining={"steps": 4}, rollout__dynamic_sampling=False,
        rollout__sampler={"oversampling": 4},
    )  # fmt: skip
    undisturbed, raw = tmp_path / "undisturbed", make(tmp_path / "killed")
    assert run(make(undisturbed)) == 0
    assert run(raw, at_point("loop/before_critic_update", 2 * 4 + 2)) == -signal.SIGKILL
    assert run(raw) == 0
    for run_dir in (undisturbed, tmp_path / "killed"):
        found = steps_of(run_dir)
        assert [step["rollout/groups_submitted"] for step in found] == [16, 0, 0, 0, 16, 0]
        assert [step["rollout/staleness_max"] for step in found] == [0, 0, 0, 0, 0, 1]
    assert_same_critic(tmp_path / "killed", (straight[0], undisturbed), 6)


def test_a_checkpoint_without_critic_is_refused_and_stays(straight, tmp_path, capfd):
    raw = raw_config(straight[0], tmp_path, trainer__steps=1)
    assert run(raw) == 0
    assert run(short(straight[0], tmp_path, trainer__steps=2)) == 2
    assert "no critic" in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "step_1").is_dir()


def test_a_critic_of_another_shape_is_refused_before_the_engines_start(straight, tmp_path):
    """At a resume by its config.json; at any start by the headers of its files."""
    make_model(tmp_path / "larger", intermediate_size=96)
    raw = config(straight[0], straight[1])
    same = parse_config(raw)
    assert check_resume(same, check_config(same)) == []
    raw["critic"]["model"] = str(tmp_path / "larger")
    other = parse_config(raw)
    with pytest.raises(ConfigError, match=r"cannot resume: the model of .*larger has ffn_hidden 96, but that of"):
        check_resume(other, check_config(other))
    check_setup(other, check_config(other))
    file = tmp_path / "larger" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 80}))
    with pytest.raises(ConfigError, match=r"critic\.model: .*shape .*, but config.json says"):
        check_setup(other, check_config(other))


def test_a_head_of_two_labels_is_refused(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "judge")
    weights = load_file(tmp_path / "judge" / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(2, 32)}, tmp_path / "judge" / "model.safetensors")
    raw = config(straight[0], tmp_path / "run")
    raw["critic"]["model"] = str(tmp_path / "judge")
    parsed = parse_config(raw)
    with pytest.raises(ConfigError, match=r"critic\.model: .*tensor score\.weight: shape \(2, 32\), but .* \(1, 32\)"):
        check_setup(parsed, check_config(parsed))
