"""The worked example of docs/concepts.md, computed with the functions that the trainer uses."""

from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithm import group_advantages, token_weights
from megatron_dapo.algorithm.filtering import keep_group
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens

PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text().split())

# A: 1, 2, 3. B: 6. C: 9, 9, truncated.
LOSSES = torch.tensor([1.0, 2.0, 3.0, 6.0, 9.0, 9.0])
SEQUENCES = torch.tensor([0, 0, 0, 1, 2, 2])
MASK = torch.tensor([True, True, True, True, False, False])


def sums(aggregation, part):
    """(Σ weight · loss, Σ count) of some of the tokens; weights and counts are fixed before the cut."""
    weights, counts = token_weights(aggregation, MASK, SEQUENCES, 3)
    return (weights * LOSSES)[part].sum().item(), counts[part].sum().item()


@pytest.mark.parametrize(
    ("aggregation", "part", "numerator", "count"),
    [
        ("token-mean", [0, 1, 2], 6, 3),  # micro-batch 1
        ("token-mean", [3, 4, 5], 6, 1),  # micro-batch 2
        ("token-mean", [0, 1], 3, 2),  # A on two context-parallel ranks
        ("token-mean", [2], 3, 1),
        ("token-mean", [0, 1, 2, 3, 4, 5], 12, 4),
        ("seq-mean-token-mean", [0, 1, 2, 3, 4, 5], 8, 2),
        ("seq-mean-token-mean", [0, 1], 1, 1),
        ("seq-mean-token-mean", [2], 1, 0),
    ],
)
def test_sums_by_hand(aggregation, part, numerator, count):
    assert sums(aggregation, part) == (pytest.approx(numerator), count)


def test_the_page_says_these_numbers():
    assert "| micro-batch 1: A | 1 + 2 + 3 = 6 | 3 |" in PAGE
    assert "| micro-batch 2: B, C | 6 + 0 = 6 | 1 |" in PAGE
    assert "12 / 4 = **3**" in PAGE and "(2 + 6) / 2 = 4" in PAGE and "12 / 6 = 2" in PAGE
    assert "= 8 over 2, the loss is **4**" in PAGE


def test_the_filter_example():
    """Four right answers, one of them punished for its length: nothing to learn, although the rewards differ."""
    tokens, logprobs = as_tokens([1]), as_logprobs([-1.0])
    samples = [
        Sample("p", i, tokens, tokens, logprobs, FinishReason.STOP, grade=Grade(correct=True, score=1.0))
        for i in range(4)
    ]
    assert keep_group(Group(Prompt("p", "?", tokens), samples)) == (False, "all-correct")
    shaped = group_advantages([1.0, 1.0, 1.0, 0.5], [0] * 4)
    assert shaped.abs().max() > 1
