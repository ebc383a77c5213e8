"""VAPO's positive-example loss: μ · the mean of −log π over the tokens of right responses, whatever the split."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from loss_cases import Sequence, pack, poison, policy_loss

from megatron_dapo.algorithm import PolicyLoss, positive_weights
from megatron_dapo.config import parse_config
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch

# Two of three responses are right; the masked one is right as well and must not count. Right tokens: 4 and 1 of 8.
CASE = [
    Sequence([1, 1.5, 0.5, 1.2], 1.0),
    Sequence([1, 0.5, 2], -2.0),
    Sequence([1.1], 1.0),
    Sequence([3, 0.1], 5.0, active=[False, False]),
]
RIGHT = [True, False, True, True]
MU = 0.3


def inputs(aggregation="token-mean", right=RIGHT, coefficient=MU, **off_policy):
    config = AlgorithmConfig(aggregation=aggregation, positive_coefficient=coefficient, off_policy=off_policy)
    found = poison(pack(CASE, config))
    marks = found.mask & torch.tensor(right)[found.batch.sequence_ids]
    found.batch.positive = positive_weights(coefficient, marks, int(found.batch.counts.sum()))
    return config, found, marks


def gradient(outputs, found, denominator):
    (outputs.loss_sum / denominator).backward()
    return found.logprobs.grad


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_term_has_its_own_denominator(aggregation):
    config, found, right = inputs(aggregation)
    outputs = policy_loss(found.scores, found.batch, config)
    with_term = gradient(outputs, found, outputs.denominator)
    plain_config, plain, _ = inputs(aggregation, coefficient=0.0)
    plain.batch.positive = None
    without = policy_loss(plain.scores, plain.batch, plain_config)
    difference = with_term - gradient(without, plain, without.denominator)
    torch.testing.assert_close(difference, -MU * right.double() / 5, rtol=0, atol=1e-7)
    expected = -MU * found.logprobs.detach()[right].mean()
    term = outputs.loss_sum / outputs.denominator - without.loss_sum / without.denominator
    assert term.item() == pytest.approx(expected.item(), rel=1e-6)
    assert outputs.sums["positive_share"] == 5


@pytest.mark.parametrize("splits", [[4], [1, 3], [1, 1, 1, 1], [2, 1, 1]])
def test_the_gradient_does_not_depend_on_micro_batches(splits):
    """Divided by each micro-batch's own count it would: right tokens are 4, 0, 1 and 0."""
    config, found, _ = inputs()
    for first, last in pairwise(np.cumsum([0, *splits])):
        own = (found.batch.sequence_ids >= int(first)) & (found.batch.sequence_ids < int(last))
        places = own.nonzero().flatten()
        chunk = slice(int(places[0]), int(places[-1]) + 1)
        outputs = policy_loss(found.scores.part(chunk), found.batch.part(chunk), config)
        (outputs.loss_sum / 8).backward()
    whole_config, whole, _ = inputs()
    expected = gradient(policy_loss(whole.scores, whole.batch, whole_config), whole, 8)
    torch.testing.assert_close(found.logprobs.grad, expected)


@pytest.mark.parametrize("off_policy", [{}, {"importance_weight": "token", "token_mask": [0.9, 1.1]}])
def test_the_losses_of_single_tokens_add_up_to_the_loss(off_policy):
    """What `explain` shows."""
    config, found, _ = inputs(**off_policy)
    with torch.no_grad():
        losses = PolicyLoss(config).details(found.scores, found.batch)["loss"]
        expected = policy_loss(found.scores, found.batch, config).loss_sum
    torch.testing.assert_close(losses.sum(), expected)
    assert not losses[~found.mask].any()


def test_no_right_response_adds_nothing():
    config, found, _ = inputs(right=[False] * 4)
    outputs = policy_loss(found.scores, found.batch, config)
    assert outputs.sums["positive_loss"] == 0 and outputs.loss_sum.isfinite()
    assert not found.batch.positive.any()


def test_right_is_the_verdict_and_not_the_reward():
    """A right answer whose length penalty takes away its whole reward is a positive example; a high score is none."""

    def sample(index, length, correct, score):
        tokens, zeros = np.arange(length, dtype=np.int32), np.zeros(length, np.float32)
        return Sample("p", index, tokens[:1], tokens, zeros, FinishReason.STOP, grade=Grade(correct, score))

    overlong = {"penalty": "soft", "max_length": 20, "cache_length": 10}
    config = parse_config({
        "algorithm": {"positive_coefficient": 0.1, "overlong": overlong},
        "rollout": {"max_response_tokens": 20, "max_prompt_tokens": 4},
    })  # fmt: skip
    samples = [sample(0, 20, True, 1.0), sample(1, 5, False, 3.0), sample(2, 5, None, 0.0), sample(3, 5, True, 1.0)]
    batch, _ = shape_batch(StepBatch(0, [Group(Prompt("p", "", samples[0].prompt_tokens), samples)]), config)
    assert batch.right.tolist() == [True, False, False, True]
    assert batch.select([3, 1]).right.tolist() == [True, False]
