"""Rewards of single turns: advantages computed by hand, and nothing changes without them."""

import numpy as np
import pytest

from megatron_dapo.config import parse_config
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch, TurnSpan, as_logprobs, as_tokens


def rollout(index, score, rewards, correct=True, part=0):
    """Turns of two generated tokens, each followed by an appended one."""
    spans, trained = [], []
    for i, reward in enumerate(rewards):
        spans += [TurnSpan("assistant", 3 * i, 3 * i + 2, reward=reward), TurnSpan("tool", 3 * i + 2, 3 * i + 3)]
        trained += [True, True, False]
    tokens = as_tokens(range(5, 5 + len(trained)))
    return Sample(
        "p", index, as_tokens([1]), tokens, as_logprobs([-1.0] * len(tokens)), FinishReason.STOP,
        grade=Grade(correct, score), trained=np.array(trained), turns=spans, part=part,
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


def test_the_turns_of_a_rollout_are_counted_through_its_samples():
    """Rollout 0 has turns 0 and 1 in its first sample and turn 2 in its second. Before turn 1 it earned 4 and before
    turn 2 it earned 5; rollout 1 has ended after turn 0, with 2."""
    first, second = rollout(0, 5.0, [4.0, 1.0]), rollout(0, 5.0, [0.0], part=1)
    batch = shaped([first, second, rollout(1, 2.0, [2.0])])
    by_turn = [*[0, 0, 0], *[-1.0, -1.0, 0], *[-1.5, -1.5, 0], *[0, 0, 0]]
    assert batch.token_advantages.tolist() == by_turn
    assert batch.rollouts.tolist() == [0, 0, 1]


def test_penalties_are_part_of_the_scale_and_ungraded_rollouts_are_not():
    """Scores 1 and 1, of which the longer has a penalty of −1: their std is that of 1 and 0."""
    overlong = {"penalty": "soft", "max_length": 6, "cache_length": 3}
    samples = [rollout(0, 1.0, [2.0, 0.0]), rollout(1, 1.0, [0.0]), rollout(2, 50.0, [9.0], correct=None)]
    batch = shaped(samples, advantage="group-std", advantage_eps=0.0, overlong=overlong)
    assert batch.token_advantages[3] == pytest.approx(-(2.0 - 1.0) / np.std([0.0, 1.0], ddof=1))
    assert not batch.token_advantages[6:].any()


def test_the_scale_of_a_group_is_its_own():
    config = parse_config({"algorithm": {"turn_credit": "turn", "advantage_eps": 0.0}})
    groups = [
        Group(Prompt(name, "q", as_tokens([1])), [rollout(0, scale, [1.0, 0.0]), rollout(1, -scale, [0.0, 0.0])])
        for name, scale in (("a", 1.0), ("b", 10.0))
    ]
    batch, _ = shape_batch(StepBatch(0, groups), config)
    a, b = batch.token_advantages[3], batch.token_advantages[15]
    assert a == pytest.approx(-0.5 / np.std([1, -1], ddof=1)) and b == pytest.approx(a / 10)


def test_distillation_is_added_to_turn_credit():
    samples = [rollout(0, 3.0, [2.0, 0.0]), rollout(1, 1.0, [1.0])]
    for sample in samples:
        sample.teacher_logprobs = as_logprobs([-0.5] * sample.length)  # half a nat above the engine's
    plain = shaped(samples).token_advantages
    both = shaped(samples, distillation={"model": "teacher", "weight": 2.0}).token_advantages
    generated = np.concatenate([sample.trained_mask for sample in samples])
    assert both.tolist() == (plain + np.where(generated, 1.0, 0.0)).tolist() and plain.any()
