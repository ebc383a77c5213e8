"""Weights and counts of every aggregation: Σ weight·loss / Σ count, counted after masking."""

import pytest
import torch

from megatron_dapo.algorithm import token_weights

# Sequence 0: a prompt position and two active tokens. 1: three active tokens. 2: fully masked.
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
PER_SEQUENCE = [0, 1, 0, 1, 0, 0, 0, 0]  # two sequences have an active token: never three, never eight
third = 1 / 3


@pytest.mark.parametrize(
    ("aggregation", "weights", "counts"),
    [
        ("token-mean", [0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0]),
        ("seq-mean-token-sum", [0, 1, 1, 1, 1, 1, 0, 0], PER_SEQUENCE),
        ("seq-mean-token-mean", [0, 0.5, 0.5, third, third, third, 0, 0], PER_SEQUENCE),
        ("seq-mean-token-sum-norm", [0, 0.1, 0.1, 0.1, 0.1, 0.1, 0, 0], PER_SEQUENCE),
    ],
)
def test_weights_and_counts(aggregation, weights, counts):
    got_weights, got_counts = token_weights(aggregation, MASK, IDS, 3, norm_length=10)
    torch.testing.assert_close(got_weights, torch.tensor(weights, dtype=torch.float32))
    assert got_counts.dtype == torch.int64
    assert got_counts.tolist() == counts


def test_tokens_of_a_sequence_need_not_be_adjacent():
    mask, ids = torch.tensor([True, True, False, True, True]), torch.tensor([1, 0, 0, 1, 0])
    weights, counts = token_weights("seq-mean-token-mean", mask, ids, 2)
    assert counts.tolist() == [1, 1, 0, 0, 0]
    assert weights.tolist() == [0.5, 0.5, 0, 0.5, 0.5]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_batch_without_active_tokens_counts_zero(aggregation, tokens):
    mask, ids = torch.zeros(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.int64)
    weights, counts = token_weights(aggregation, mask, ids, 1)
    assert counts.sum() == 0
    assert weights.tolist() == [0.0] * tokens


def test_errors_name_the_tensor():
    with pytest.raises(ValueError, match=r"sequence_ids: expected torch.int64 \(8,\).*found torch.int64 \(7,\)"):
        token_weights("token-mean", MASK, IDS[:7], 3)
    with pytest.raises(ValueError, match="mask: expected bool"):
        token_weights("token-mean", MASK.long(), IDS, 3)
    with pytest.raises(ValueError, match="norm_length above 0, found None"):
        token_weights("seq-mean-token-sum-norm", MASK, IDS, 3)
