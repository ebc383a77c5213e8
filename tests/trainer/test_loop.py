"""Small whole runs: every option trains, layouts agree, the gate and the NaN guard stop bad runs, errors say why."""

import json
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from forked import at_point, fail_with, run, send_signal, start_command, steps_of
from long_lists import some
from tiny_run import HERE, make_model, raw_config, write_config

from megatron_dapo import cli, fault_points
from megatron_dapo.config import parse_config
from megatron_dapo.errors import GateError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.signals import REQUEUE
from megatron_dapo.trainer.train_step import check_gate
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch, as_logprobs, as_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


# ---- the same run in other layouts ----


def test_tp1_and_tp2_give_the_same_curve(folder, tmp_path):
    """Same samples, same rewards; losses agree to rounding. The second run starts its ranks from the command. Data
    parallelism: test_batch_sharing.py."""
    assert run(raw_config(folder, tmp_path / "one", trainer__steps=2)) == 0
    tp2 = raw_config(
        folder, tmp_path / "tp2", trainer__steps=2, trainer__ranks=2, policy__tensor_parallel=2, observe__report=True
    )
    command = start_command(write_config(tp2, tmp_path / "tp2.yaml"))
    command.join(200)
    assert command.exitcode == 0
    assert "</html>" in (tmp_path / "tp2" / "report.html").read_text()
    for ours, theirs in zip(steps_of(tmp_path / "tp2"), steps_of(tmp_path / "one"), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["rollout/length_mean"] == theirs["rollout/length_mean"]
        for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/mismatch_mean"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric


# ---- every option ----

OPTIONS = {
    "naive GRPO": {
        "algorithm__clip_high": 0.2, "algorithm__aggregation": "seq-mean-token-mean",
        "rollout__dynamic_sampling": False,
    },
    "overlong filtering": {"algorithm__overlong": {"filter": True}},
    "soft punishment": {"algorithm__overlong": {"penalty": "soft", "cache_length": 4}},
    "kl": {"algorithm__kl": {"coefficient": 0.1}},
    "gspo": {"algorithm__objective": "gspo", "algorithm__aggregation": "seq-mean-token-mean"},
    "importance sampling": {"algorithm__off_policy": {"importance_weight": "token"}},
    "one update a step": {"trainer__mini_batch_prompts": 4},
    "partial rollouts": {"rollout__sampler": {"oversampling": 2.0, "unfinished": "continue", "order": "completion"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "option",
    some(OPTIONS, "naive GRPO", "overlong filtering", "soft punishment", "kl", "gspo", "partial rollouts"),
)
def test_every_option_trains(option, folder, tmp_path):
    raw = raw_config(folder, tmp_path, trainer__steps=3, **OPTIONS[option])
    assert run(raw) == 0
    found = steps_of(tmp_path)
    assert len(found) == 3
    trained = [m for m in found if m["train/tokens"]]  # a step without an active token has no loss
    assert trained and all(np.isfinite(m["train/loss"]) for m in trained)
    assert not any("train/loss" in m for m in found if not m["train/tokens"])
    if option == "kl":
        assert found[0]["train/reference_kl"] == pytest.approx(0, abs=1e-3)  # the first batch is the reference's own
        assert found[-1]["train/reference_kl"] > 0
    if option == "soft punishment":
        assert min(m["reward/penalty"] for m in found) < 0
    if option == "overlong filtering":
        assert any(m["rollout/masked_share"] > 0 for m in found)


def stop_while_waiting_for_the_batch_ahead():
    """The rollout thread holds the second batch, the one ahead, until the loop waits for it; then the signal comes."""
    waiting = threading.Event()

    def hold():
        waiting.wait(60)
        send_signal(signal.SIGTERM, hold=True)()

    fault_points.on("rollouts/before_collect", hold, count=2)
    fault_points.on("loop/before_await_ahead", waiting.set)


STOPS_AHEAD = {
    "waiting for the batch ahead": (stop_while_waiting_for_the_batch_ahead, "step_1"),
    "training": (at_point("loop/before_update", 3, send_signal(signal.SIGTERM)), "step_1+1"),
}


@pytest.mark.parametrize("moment", STOPS_AHEAD)
def test_run_that_generates_ahead_can_be_stopped(moment, folder, tmp_path, capfd):
    """The rest of the batch ahead is sampled from newer weights then, so the numbers differ; nothing is lost."""
    plant, saved = STOPS_AHEAD[moment]
    options = {"rollout__max_staleness": 1, "rollout__weights": {"in_flight": False}}
    raw = raw_config(folder, tmp_path, trainer__steps=3, **options)
    assert run(raw, plant) == REQUEUE
    said = capfd.readouterr().err
    assert "ahead" in said or moment == "training"
    assert f"{saved}; start the same command again" in said
    assert run(raw) == 0
    found = steps_of(tmp_path)
    assert len(found) == 3 and all(m["rollout/samples_trained"] == 16 for m in found)
    served = re.findall(r"weights: .*", (tmp_path / "logs" / "trainer.log").read_text())
    assert len(served) == 3  # versions 1, 2 and 3 once each; weights between two versions are never served


# ---- rewards and advantages, by hand ----


def sample(correct, length, finish=FinishReason.STOP):
    grade = Grade(correct, 0.0 if correct is None else (1.0 if correct else -1.0))
    tokens, logprobs = as_tokens(range(length)), as_logprobs([-1.0] * length)
    return Sample("p", 0, as_tokens([1]), tokens, logprobs, finish, grade=grade)


def test_rewards_advantages_and_masks_of_two_groups():
    """Penalty after scoring; ungraded samples out of the statistics and the loss; truncated ones out of the loss."""
    groups = [
        Group(Prompt("a", "", as_tokens([1])), [sample(True, 2), sample(False, 8, FinishReason.LENGTH)]),
        Group(Prompt("b", "", as_tokens([1])), [sample(True, 3), sample(None, 3), sample(False, 3)]),
    ]
    config = parse_config(
        {
            "rollout": {"max_response_tokens": 8},
            "algorithm": {"overlong": {"filter": True, "penalty": "soft", "cache_length": 4}},
            "trainer": {"prompts_per_step": 2, "mini_batch_prompts": 1},
        }
    )
    batch, metrics = shape_batch(StepBatch(0, groups), config)
    # group a: 1 and −1 − 1 (8 tokens is L_max): mean −0.5, unbiased std of (1, −2) = 2.1213; ±1.5/2.1213 = ±0.7071
    # group b: 1 and −1 over the graded two: mean 0, std 1.4142; ±0.7071; the ungraded one 0
    np.testing.assert_allclose(batch.advantages, [0.7071, -0.7071, 0.7071, 0, -0.7071], atol=1e-4)
    active = [bool(part.all()) for part in np.split(batch.loss_mask, np.cumsum([2, 8, 3, 3])[:4])]
    assert active == [True, False, True, False, True]
    assert metrics["reward/mean"] == pytest.approx(-1 / 4)  # 1, −2, 1, −1 over the graded four
    assert metrics["reward/score"] == pytest.approx(0.0)
    assert metrics["reward/score_in_loss"] == pytest.approx(1 / 3)  # 1, 1, −1: neither the truncated nor the ungraded
    assert metrics["reward/accuracy"] == pytest.approx(0.5)
    assert metrics["reward/penalty"] == pytest.approx(-1 / 5)
    assert metrics["reward/ungraded_share"] == pytest.approx(1 / 5)
    assert metrics["reward/truncated_advantage_share"] == 0.0, "truncated samples carry no loss"
    assert metrics["rollout/long_token_weight"] == 1.0, "token-mean"
    assert mini_batches(StepBatch(0, groups), config) == [[0, 1], [2, 3, 4]]


def test_metrics_of_where_the_signal_is():
    """Three groups, the second all right. |advantage| of the first and third: 4 times 0.7071, one of it truncated.
    Lengths in the loss 2, 8, 3, 3, 3, 3; with a mean per sequence a token of the 8 weighs 1/8, the mean token 6/22."""
    pairs = [[sample(True, 2), sample(False, 8, FinishReason.LENGTH)], [sample(True, 3), sample(True, 3)]]
    pairs.append([sample(True, 3), sample(False, 3)])
    groups = [Group(Prompt(name, "", as_tokens([1])), pair) for name, pair in zip("abc", pairs, strict=True)]
    config = parse_config(
        {"rollout": {"max_response_tokens": 8}, "algorithm": {"aggregation": "seq-mean-token-mean"},
         "trainer": {"prompts_per_step": 3, "mini_batch_prompts": 3}}
    )  # fmt: skip
    _, metrics = shape_batch(StepBatch(0, groups), config)
    assert metrics["reward/zero_advantage_share"] == pytest.approx(1 / 3)
    assert metrics["reward/truncated_advantage_share"] == pytest.approx(1 / 4)
    # the upper quartile of 2, 3, 3, 3, 3, 8 is 3: the longest quarter are 8 and the four of 3 tokens
    assert metrics["rollout/long_token_weight"] == pytest.approx((5 / 20) / (6 / 22))
    assert metrics["rollout/length_wrong"] == pytest.approx(5.5)


# ---- the gate ----


def test_gate_measures_the_gap_and_names_the_worst_token():
    batch = TrainBatch(
        np.zeros(6, np.int32), np.array([1, 1]), np.array([2, 2]), np.zeros(2, np.float32), np.ones(4, bool),
        engine_logprobs=np.array([-1, -2, -3, -4], np.float32),
    )  # fmt: skip
    gate = parse_config({"trainer": {"gate": {"max_mean_gap": 0.1, "max_gap": 0.5}}}).trainer.gate
    gap = check_gate(batch, np.array([-1.1, -2, -3, -4.1], np.float32), gate)
    assert "mean |gap| 0.05 nats, largest 0.1, KL 0.00242, over 4 tokens" in str(gap)
    expected = {"gate/mean_gap": 0.05, "gate/max_gap": 0.1, "gate/kl": 2 * (np.exp(-0.1) - 0.9) / 4}
    assert gap.metrics == pytest.approx(expected, rel=1e-4)
    with pytest.raises(GateError, match=r"largest 0\.6 .* in sample 1, response token 0"):
        check_gate(batch, np.array([-1, -2, -3.6, -4], np.float32), gate)
    with pytest.raises(GateError):
        check_gate(batch, np.array([-1, -2, np.nan, -4], np.float32), gate)
    with pytest.raises(GateError):  # one bad token, though the mean is good
        check_gate(batch, np.array([-1, -2, -3.6, -4], np.float32), gate.model_copy(update={"max_mean_gap": 0.2}))


def wrong_rope_base(raw):
    """The engine and the trainer read different configurations, as after a wrong conversion."""
    config = Path(raw["policy"]["model"]) / "config.json"
    settings = json.loads(config.read_text())

    def plant():
        from megatron_dapo.config.model import ModelShape

        original = ModelShape.from_dir.__func__

        def planted(cls, path):
            shape = original(cls, path)
            object.__setattr__(shape, "rope_theta", 100.0)
            return shape

        ModelShape.from_dir = classmethod(planted)

    assert settings["rope_parameters"]["rope_theta"] == 10000.0
    return plant


def test_wrong_rope_base_stops_the_run_before_the_first_update(folder, tmp_path, capfd):
    raw = raw_config(folder, tmp_path, trainer__gate={"max_mean_gap": 1e-4})
    assert run(raw, wrong_rope_base(raw)) == 1
    said = capfd.readouterr().err
    assert "trainer and engine disagree about the engine's own samples" in said
    assert "Not saved: no update was made. There is no checkpoint." in said
    assert not steps_of(tmp_path)


def test_the_gap_is_recorded_with_the_first_step_and_printed_at_every_start(folder, tmp_path, capfd):
    for total in (1, 2):
        raw = raw_config(folder, tmp_path, trainer__steps=total, observe__console="plain")
        assert run(raw) == 0
        assert capfd.readouterr().out.count("] trainer and engine agree: mean |gap| ") == 1
    first, second = steps_of(tmp_path)
    assert 0 < first["gate/mean_gap"] < first["gate/max_gap"] < 1e-3
    assert 0 <= first["gate/kl"] < 1e-6
    assert not [name for name in second if name.startswith("gate/")]  # a resumed run has the metrics of any other


# ---- guards ----


def test_skipped_update_is_dumped_and_the_run_continues(folder, tmp_path):
    raw = raw_config(folder, tmp_path, trainer__steps=3)
    assert run(raw, at_point("loop/before_update", 3, fail_with(NonFiniteError("planted")))) == 0
    assert [m["train/update_skipped"] for m in steps_of(tmp_path)] == [0, 1, 0]
    dumped = json.loads((tmp_path / "dumps" / "step_2_update_1.json").read_bytes())
    assert len(dumped) == 8 and "response_tokens" in dumped[0]
    assert "step 2, update 1 skipped: planted" in (tmp_path / "logs" / "warnings.log").read_text()


def test_too_many_skipped_updates_end_the_run_without_a_save(folder, tmp_path, capfd):
    """Their cause may be in the weights: the checkpoint from before is what the user is pointed to."""

    def plant():
        for count in (3, 4, 5):
            fault_points.on("loop/before_update", fail_with(NonFiniteError("planted")), count=count)

    assert run(raw_config(folder, tmp_path, trainer__max_skipped_updates=2), plant) == 1
    said = capfd.readouterr().err
    assert "3 updates in a row were skipped" in said
    assert "Not saved: the weights, the optimizer state or the data may be the cause." in said
    assert f"The last checkpoint of this run is {tmp_path / 'checkpoints' / 'step_2'}" in said


# ---- the command; tests/test_bad_inputs.py has wrong configurations ----


def test_dry_run_checks_everything_and_trains_nothing(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(HERE)
    config = write_config(raw_config(folder, tmp_path / "run"), tmp_path / "c.yaml")
    assert cli.main(["train", str(config), "--dry-run", "--set", "algorithm.clip_high=0.3"]) == 0
    assert "clip_high: 0.3" in (tmp_path / "run" / "config.yaml").read_text()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
