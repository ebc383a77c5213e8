"""Length penalties, and which samples carry loss."""

import pytest
import torch

from megatron_dapo.algorithm import (
    carries_loss,
    group_advantages,
    length_penalty,
    linear_overlong_penalty,
    relative_overlong_penalty,
    soft_overlong_penalty,
)
from megatron_dapo.config import parse_config
from megatron_dapo.config.algorithm import OverlongConfig
from megatron_dapo.types import FinishReason, Grade, Sample, as_logprobs, as_tokens

# L_max 20480, L_cache 4096: the penalty starts at 16384; 17408 is a quarter of the cache, 18432 half of it.
LENGTHS = [0, 16384, 17408, 18432, 20480, 24576]
SHARES = [0, 0, -0.25, -0.5, -1, -1]  # at 24576 a penalty without the floor would be −2


def test_soft_penalty_has_three_stages():
    assert soft_overlong_penalty(LENGTHS, 20480, 4096).tolist() == SHARES
    assert soft_overlong_penalty(torch.tensor(LENGTHS), 20480, 4096, 0.5).tolist() == [x / 2 for x in SHARES]


def test_linear_penalty_starts_at_its_threshold():
    # λ = 2, threshold 100, L_max 200: 150 is halfway, −1; 300 is bounded by −2.
    assert linear_overlong_penalty([50, 100, 150, 200, 300], 100, 200, 2.0).tolist() == [0, 0, -1, -2, -2]


def test_relative_penalty_has_no_floor():
    # weight 2, L_max 100: at 150 −2·50/100 = −1, at 400 −2·300/100 = −6.
    assert relative_overlong_penalty([99, 100, 150, 400], 100, 2.0).tolist() == [0, 0, -1, -6]


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [("none", [0, 0, 0]), ("soft", [0, -1, -2]), ("linear", [0, -1, -2]), ("relative", [0, 0, -2])],
)
def test_the_configuration_chooses_the_penalty(penalty, expected):
    config = OverlongConfig(penalty=penalty, cache_length=50, factor=2.0)
    penalties = length_penalty([50, 75, 200], config, max_length=100)
    assert penalties.tolist() == expected
    assert penalties.dtype == torch.float32


def test_impossible_lengths_are_errors():
    with pytest.raises(ValueError, match="cache_length: expected between 1 and max_length − 1 = 99, found 100"):
        soft_overlong_penalty([1], 100, 100)
    with pytest.raises(ValueError, match="threshold: expected between 0 and max_length − 1 = 99, found 100"):
        linear_overlong_penalty([1], 100, 100)
    with pytest.raises(ValueError, match="max_length: expected above 0, found 0"):
        relative_overlong_penalty([1], 0)


def sample(finish: str, correct: bool | None = True, graded: bool = True) -> Sample:
    grade = Grade(correct, 1.0) if graded else None
    return Sample("p", 0, as_tokens([1]), as_tokens([2, 3]), as_logprobs([-1, -1]), FinishReason(finish), grade=grade)


def test_ungraded_samples_and_filtered_truncated_ones_carry_no_loss():
    on, off = OverlongConfig(filter=True), OverlongConfig(filter=False)
    assert carries_loss(sample("stop"), on)
    assert carries_loss(sample("stop", correct=False), on)
    assert carries_loss(sample("length"), off)
    assert not carries_loss(sample("length"), on)
    assert not carries_loss(sample("stop", correct=None), off)
    assert not carries_loss(sample("stop", graded=False), off)


@pytest.mark.parametrize(
    ("penalty", "dynamic_sampling", "advantage", "warned"),
    [
        ("soft", False, "group-std", True),
        ("soft", True, "group-std", False),
        ("soft", False, "group-mean", False),
        ("none", False, "group-std", False),
    ],
)
def test_a_penalty_in_groups_without_a_right_response_is_warned_of(penalty, dynamic_sampling, advantage, warned):
    """There it is the only difference: however small, it becomes an advantage of about 1 for a short wrong response."""
    config = parse_config(
        {
            "rollout": {"dynamic_sampling": dynamic_sampling, "max_response_tokens": 20480},
            "algorithm": {"advantage": advantage, "overlong": {"penalty": penalty, "factor": 0.01}},
        }
    )
    assert [("short wrong responses are reinforced" in line) for line in config.warnings] == [True] * warned
    penalties = soft_overlong_penalty([100, 20480], 20480, 4096, 0.01)
    advantages = group_advantages(penalties - 1, [0, 0], normalize_std=True)
    assert advantages[0] == pytest.approx(0.7071, abs=1e-3)
