"""Rewards of single turns: advantages computed by hand, and nothing changes without them."""

import numpy as np
import pytest

from megatron_dapo.config import parse_config
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch, TurnSpan, as_logprobs, as_tokens


def rollout(index, score, rewards, correct=True):
    """Turns of two generated tokens, each followed by an appended one."""
    spans, trained = [], []
    for i, reward in enumerate(rewards):
        spans += [TurnSpan("assistant", 3 * i, 3 * i + 2, reward=reward), TurnSpan("tool", 3 * i + 2, 3 * i + 3)]
        trained += [True, True, False]
    tokens = as_tokens(range(5, 5 + len(trained)))
    return Sample(
        "p", index, as_tokens([1]), tokens, as_logprobs([-1.0] * len(tokens)), FinishReason.STOP,
        grade=Grade(correct, score), trained=np.array(trained), turns=spans,
    )  # fmt: skip


def shaped(samples, **algorithm):
    config = parse_config({"algorithm": {"turn_credit": "turn", "advantage": "group-mean", **algorithm}})
    batch, _ = shape_batch(StepBatch(0, [Group(Prompt("p", "q", as_tokens([1])), samples)]), config)
    return batch


def test_a_turn_is_not_credited_with_earlier_rewards():
    # Scores with the rewards: 3 = 1 + 2 + 0 and 1 = 0 + 1; the third is ungraded.
    samples = [rollout(0, 3.0, [2.0, 0.0]), rollout(1, 1.0, [1.0]), rollout(2, 9.0, [5.0, 5.0], correct=None)]
    batch = shaped(samples)
    assert batch.advantages.tolist() == [1.0, -1.0, 0.0]
    # Before turn 1, 2 and 1 were earned (the second has no turn 1: all of its rewards); the mean is 1.5.
    assert batch.token_advantages.tolist() == [0, 0, 0, -0.5, -0.5, 0, *[0] * 3, *[0] * 6]
    scaled = shaped(samples, advantage="group-std", advantage_eps=0.0)
    assert scaled.token_advantages[3] == pytest.approx(-0.5 / np.std([3, 1], ddof=1))


@pytest.mark.parametrize("graded", [2, 3, 7, 10, 15])
@pytest.mark.parametrize("score", [1.0, 0.1, 0.7, -1 / 3, 1e-3, 1e5])
def test_equal_scores_give_no_turn_any_credit(score, graded):
    """The std of equal floats is 1e-17, not 0. And the same rewards in another order add up to another last digit."""
    samples = [rollout(i, score, [1.0, 0.0] if i % 2 else [0.0, 1.0]) for i in range(graded)]
    samples[0].grade = Grade(True, float(np.nextafter(score, 9e9)))
    samples.append(rollout(graded, 0.0, [5.0, 0.0], correct=None))
    assert not shaped(samples, advantage="group-std").token_advantages.any()
    assert shaped(samples, advantage="group-mean").token_advantages[3] != 0  # nothing is divided
    samples[0].grade = Grade(True, score + 1e-3 * abs(score))
    assert shaped(samples, advantage="group-std").token_advantages[3] != 0


def test_without_rewards_nothing_changes():
    samples = [rollout(0, 1.0, [None, None, None]), rollout(1, -1.0, [None], correct=False)]
    assert not shaped(samples).token_advantages.any()
    assert shaped(samples, turn_credit="rollout").token_advantages is None
