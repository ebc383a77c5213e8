"""Length penalties, and which samples carry loss."""

import pytest
import torch

from megatron_dapo.algorithm.advantages import group_advantages
from megatron_dapo.algorithm.overlong import carries_loss, length_penalty
from megatron_dapo.config import parse_config
from megatron_dapo.config.algorithm import OverlongConfig
from megatron_dapo.types import FinishReason, Grade, Sample, as_logprobs, as_tokens

# L_max 20480, L_cache 4096: the penalty starts at 16384; 17408 is a quarter of the cache, 18432 half of it.
LENGTHS = [0, 16384, 17408, 18432, 20480, 24576]
SHARES = [0, 0, -0.25, -0.5, -1, -1]  # at 24576 a penalty without the floor would be −2


def penalties(lengths, penalty, max_length, cache_length=4096, factor=1.0):
    config = OverlongConfig(penalty=penalty, cache_length=cache_length, factor=factor)
    return length_penalty(lengths, config, max_length)


@pytest.mark.parametrize("penalty", ["soft", "linear"])
def test_soft_penalty_has_three_stages(penalty):
    assert penalties(LENGTHS, penalty, 20480).tolist() == SHARES
    assert penalties(torch.tensor(LENGTHS), penalty, 20480, factor=0.5).tolist() == [x / 2 for x in SHARES]
    # factor 2, from 100 to 200: 150 is halfway, −1; 300 is bounded by −2.
    assert penalties([50, 100, 150, 200, 300], penalty, 200, 100, 2.0).tolist() == [0, 0, -1, -2, -2]


def test_relative_penalty_has_no_floor():
    # weight 2, L_max 100: at 150 −2·50/100 = −1, at 400 −2·300/100 = −6.
    assert penalties([99, 100, 150, 400], "relative", 100, factor=2.0).tolist() == [0, 0, -1, -6]


def test_no_penalty_is_a_plus_zero_in_fp32():
    found = penalties([50, 200], "none", 100)
    assert found.tolist() == [0, 0] and not found.signbit().any() and found.dtype == torch.float32


def test_impossible_lengths_are_errors():
    for penalty in ("soft", "linear"):
        with pytest.raises(ValueError, match="cache_length: expected between 1 and max_length − 1 = 99, found 100"):
            penalties([1], penalty, 100, 100)
    with pytest.raises(ValueError, match="max_length: expected above 0, found 0"):
        penalties([1], "relative", 0)


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
    advantages = group_advantages(penalties([100, 20480], "soft", 20480, factor=0.01) - 1, [0, 0], normalize_std=True)
    assert advantages[0] == pytest.approx(0.7071, abs=1e-3)
