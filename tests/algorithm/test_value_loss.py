"""The critic's loss against a plain loop in fp64; masked tokens and splits do not change it."""

import math

import pytest
import torch

from megatron_dapo.algorithm import TokenBatch, token_weights
from megatron_dapo.algorithm.value_loss import ValueLoss

LENGTHS = (3, 1, 4, 2)  # the second response is masked
VALUES = torch.tensor([0.1, 0.9, -0.4, 9.0, 0.7, 0.2, -2.0, 0.3, 1.4, 0.0], dtype=torch.float64)
OLD = torch.tensor([0.0, 0.1, -0.5, 0.0, -0.3, 0.2, 0.0, 0.9, 0.0, 0.4], dtype=torch.float64)
RETURNS = torch.tensor([1.0, 1.0, 1.0, 5.0, -1.0, -1.0, -1.0, -1.0, 0.5, 0.5], dtype=torch.float64)
MASK = torch.tensor([True] * 3 + [False] + [True] * 6)


def tokens(chosen=slice(None), **changes):
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    weights, counts = token_weights("token-mean", MASK, ids, len(LENGTHS), 8)
    known = {"old_values": OLD, "returns": RETURNS, "mask": MASK, "weights": weights.double(), "counts": counts}
    zeros = torch.zeros_like(OLD)
    batch = TokenBatch(old_logprobs=zeros, advantages=zeros, sequence_ids=ids, sequences=4, **(known | changes))
    return batch.part(chosen)


def by_hand(clip):
    total, clipped = 0.0, 0
    for value, old, target, active in zip(VALUES.tolist(), OLD.tolist(), RETURNS.tolist(), MASK.tolist(), strict=True):
        if active:
            held = value if clip is None else min(max(value, old - clip), old + clip)
            total += 0.5 * max((value - target) ** 2, (held - target) ** 2)
            clipped += (held - target) ** 2 > (value - target) ** 2
    return total, clipped


@pytest.mark.parametrize("clip", [None, 0.5, 0.05])
def test_it_is_the_clipped_squared_error(clip):
    values = VALUES.clone().requires_grad_()
    found = ValueLoss(clip)(values, tokens())
    total, clipped = by_hand(clip)
    assert math.isclose(found.loss_sum.item(), total, rel_tol=1e-14)
    assert found.denominator.item() == found.sums["tokens"].item() == 9
    assert found.sums["clip_fraction"].item() == clipped and (clipped > 0) == (clip is not None)
    found.loss_sum.backward()
    assert values.grad[3] == 0  # masked
    held = OLD + (VALUES - OLD).clamp(-(clip or 9e9), clip or 9e9)
    free = MASK & ((VALUES - RETURNS).square() >= (held - RETURNS).square())
    assert torch.allclose(values.grad, torch.where(free, VALUES - RETURNS, 0.0))


def test_a_value_within_the_bound_is_not_clipped():
    """In fp32, 0.2 + (0.01 − 0.2) is not 0.01."""
    old, values = torch.full((10,), 0.2), torch.full((10,), 0.01)
    found = ValueLoss(0.5)(values, tokens(old_values=old, returns=torch.zeros(10)))
    assert found.sums["clip_fraction"] == 0


def test_parts_add_up():
    whole, loss = ValueLoss(0.5)(VALUES, tokens()), ValueLoss(0.5)
    parts = [loss(VALUES[part], tokens(part)) for part in (slice(0, 4), slice(4, 5), slice(5, 10))]
    assert math.isclose(sum(p.loss_sum.item() for p in parts), whole.loss_sum.item(), rel_tol=1e-14)
    assert sum(p.denominator for p in parts) == whole.denominator


@pytest.mark.parametrize(("place", "count"), [(3, 0), (5, 1)])
def test_a_nan_counts_where_it_is_active_and_cannot_leave_a_masked_token(place, count):
    values = torch.where(torch.arange(10) == place, torch.nan, VALUES).requires_grad_()
    found = ValueLoss(0.5)(values, tokens())
    assert found.sums["nonfinite_tokens"] == count
    assert found.loss_sum.isfinite().item() == (count == 0)
