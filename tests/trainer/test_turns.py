"""Responses of several turns in the trainer: appended tokens carry no loss and no count, and the samples of one rollout
share its advantage."""

import numpy as np
import pytest
import torch

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.errors import GateError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.train_step import check_gate
from megatron_dapo.types import (
    FinishReason,
    Grade,
    Group,
    Prompt,
    Sample,
    StepBatch,
    TurnSpan,
    as_logprobs,
    as_tokens,
)

SHAPE = synthetic_shape("dense")


def sample(index, correct, *turns, part=0, prompt=(1,), finish=FinishReason.STOP):
    """`turns`: token counts; every second one is appended and took a quarter of a second."""
    edges = np.cumsum([0, *turns]).tolist()
    roles = ["assistant", "tool"]
    spans = [TurnSpan(roles[i % 2], edges[i], edges[i + 1], 0.25) for i in range(len(turns))]
    trained = np.repeat(np.arange(len(turns)) % 2 == 0, turns)
    tokens, logprobs = as_tokens(np.arange(edges[-1]) % 90 + 5), as_logprobs(np.where(trained, -1.0, 0.0))
    grade = Grade(correct, 1.0 if correct else -1.0)
    return Sample(
        "p", index, as_tokens(prompt), tokens, logprobs, finish, grade=grade, trained=trained, turns=spans, part=part
    )


def groups_of_turns():
    """Group a: two rollouts, the second with two samples; group b: three rollouts, one truncated."""
    later = sample(1, False, 2, part=1, prompt=range(1, 6))  # its prompt is four tokens longer than that of the first
    a = [sample(0, True, 2, 3, 1), sample(1, False, 3), later]
    b = [sample(0, True, 1), sample(1, True, 1, 5, 2, finish=FinishReason.LENGTH), sample(2, False, 4)]
    return [Group(Prompt(name, "", as_tokens([1])), samples) for name, samples in (("a", a), ("b", b))]


def config_of(**overlong):
    return parse_config(
        {
            "rollout": {"max_response_tokens": 8},
            "algorithm": {"overlong": overlong},
            "trainer": {"prompts_per_step": 2, "mini_batch_prompts": 1},
        }
    )


def test_advantages_and_counts_are_those_of_rollouts():
    groups = groups_of_turns()
    assert [len(g.rollouts) for g in groups] == [2, 3] and groups[0].accuracies == [True, False]
    batch, metrics = shape_batch(StepBatch(0, groups), config_of(filter=True, penalty="soft", cache_length=4))
    # Lengths after the prompt, appended tokens included: a: 6 and 4 + 2; b: 1, 8, 4. The penalty starts at 4 and is −1
    # at 8. a: 1 − 0.5 and −1 − 0.5, ±0.7071. b: 1, 1 − 1, −1: mean 0, std 1.
    expected = [0.7071, -0.7071, -0.7071, 1, 0, -1]
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-4)
    masks = [[1, 1, 0, 0, 0, 1], [1, 1, 1], [1, 1], [1], [0] * 8, [1, 1, 1, 1]]  # the truncated sample has no loss
    assert batch.loss_mask.astype(int).tolist() == [bit for mask in masks for bit in mask]
    assert mini_batches(StepBatch(0, groups), config_of()) == [[0, 1, 2], [3, 4, 5]]
    assert metrics["reward/mean"] == pytest.approx((0.5 - 1.5 + 1 + 0 - 1) / 5)
    assert metrics["reward/accuracy"] == pytest.approx(3 / 5)
    assert metrics["rollout/length_mean"] == pytest.approx((3 + 5 + 1 + 3 + 4) / 5)  # generated tokens
    assert metrics["rollout/length_max"] == 5
    assert metrics["rollout/turns_mean"] == pytest.approx((2 + 2 + 1 + 2 + 1) / 5)
    assert metrics["rollout/turns_max"] == 2
    assert metrics["rollout/tool_seconds"] == pytest.approx(2 * 0.25 / 5)
    assert metrics["rollout/appended_share"] == pytest.approx(8 / 24)
    assert metrics["rollout/samples_per_rollout"] == pytest.approx(6 / 5)


def test_masked_rollouts_can_be_left_out_of_the_statistics_of_their_group():
    """In group b the truncated rollout is right, and masked. With all rewards the mean of 1, 1, −1 is 1/3."""
    _, b = groups_of_turns()
    std = np.std([1, 1, -1], ddof=1)
    for statistics, expected in (("all", [2 / 3 / std, -4 / 3 / std]), ("in_loss", [0.7071, -0.7071])):
        batch, _ = shape_batch(StepBatch(0, [b]), config_of(filter=True, group_statistics=statistics))
        np.testing.assert_allclose(batch.advantages[[0, 2]], expected, atol=1e-4)
        assert not batch.loss_mask[1:9].any()
    assert batch.advantages[1] == 0
    with pytest.raises(ConfigError, match="in_loss, but filter is false"):
        config_of(group_statistics="in_loss")
    with pytest.raises(ConfigError, match="turn_credit is turn and overlong"):
        overlong = {"filter": True, "group_statistics": "in_loss"}
        parse_config({"algorithm": {"turn_credit": "turn", "overlong": overlong}})


def test_the_gate_compares_generated_tokens_only():
    batch, _ = shape_batch(StepBatch(0, groups_of_turns()), config_of())
    trained = np.concatenate([s.trained_mask for g in groups_of_turns() for s in g.samples])
    gate = parse_config({"trainer": {"gate": {"max_mean_gap": 0.01, "max_gap": 0.02}}}).trainer.gate
    logprobs = np.where(trained, -1.005, -9.0).astype(np.float32)
    assert "mean |gap| 0.005 nats, largest 0.005, KL 1.25e-05, over 16 tokens" in str(
        check_gate(batch, logprobs, gate, trained)
    )
    with pytest.raises(GateError):
        check_gate(batch, logprobs, gate)


def updates_with_other_values_at_appended_tokens(rendezvous):
    raw = selfcheck_config(LayoutSpec.parse("single")).model_dump(mode="json")
    raw["algorithm"] |= {"entropy_coefficient": 0.0, "positive_coefficient": 0.0}
    raw["algorithm"]["kl"]["coefficient"] = 0.0
    found, config = [], parse_config(raw)
    runtime = initialize(config.policy, rendezvous=rendezvous)
    for value in (0.0, -7.0, -np.inf):
        policy = Policy(config, SHAPE, runtime)
        policy.load_hf(random_hf_weights(SHAPE))
        samples = [s for g in groups_of_turns() for s in g.samples]
        batch = TrainBatch.from_samples(samples, [1, -2, -2, 0.5, 3, -1], [True] * 6)
        scores, _ = policy.log_probs(batch)
        batch.engine_logprobs = np.where(batch.loss_mask, scores, value).astype(np.float32)
        batch.old_logprobs, batch.ref_logprobs = batch.engine_logprobs.copy(), batch.engine_logprobs.copy()
        metrics = policy.update(batch)
        found.append(
            ({k: v for k, v in metrics.items() if "seconds" not in k}, gather_full(policy, runtime, gradient=False))
        )
    return found


def test_appended_tokens_carry_no_loss_and_no_count():
    """The ratio is 1 everywhere: the loss is −Σ Â · generated tokens ÷ Σ generated tokens, whatever stands at the
    appended ones."""
    first, *others = run_ranks(1, updates_with_other_values_at_appended_tokens)[0]
    metrics, weights = first
    generated = np.array([3, 3, 2, 1, 3, 4])
    assert metrics["tokens"] == metrics["denominator"] == generated.sum()
    assert metrics["loss"] == pytest.approx(-np.dot([1, -2, -2, 0.5, 3, -1], generated) / generated.sum(), abs=1e-6)
    for other_metrics, other_weights in others:
        assert other_metrics == metrics
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
