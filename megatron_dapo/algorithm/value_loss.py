"""The critic's loss: ½ (V − return)² of each token, clipped around the value before the update, as sums.

The promises are those of the policy loss (`loss`): sums over active tokens that any split adds up to, and no NaN of an
active token is repaired.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dapo.algorithm.loss import LossOutputs, Reduce, identity
from megatron_dapo.algorithm.objective import Needs, TokenBatch, blank


class ValueLoss:
    """The larger one of ½ (V − R)² and ½ (V' − R)², where V' is V held within `clip` of the old value."""

    needs = Needs()

    def __init__(self, clip: float | None) -> None:
        self._clip = float("inf") if clip is None else clip

    def __call__(self, values: Tensor, batch: TokenBatch, reduce: Reduce = identity) -> LossOutputs:
        """`values` [tokens]."""
        assert batch.old_values is not None and batch.returns is not None
        values, batch = blank(values, batch.mask), batch.blanked()
        returns, old = batch.returns, batch.old_values
        assert old is not None and returns is not None
        errors, moved = (values - returns).square(), values - old
        clipped = (old + moved.clamp(-self._clip, self._clip) - returns).square()
        held = torch.where(moved.abs() > self._clip, clipped, errors)  # old + moved is not quite the value
        losses = 0.5 * torch.maximum(errors, held)
        with torch.no_grad():
            read = torch.stack([values, returns, old, losses]).isfinite().all(0)
            means = {"tokens": batch.mask, "nonfinite_tokens": ~read, "clip_fraction": held > errors}
            means |= {"value_mean": values, "return_mean": returns}
            sums = {name: blank(value, batch.mask).double().sum() for name, value in means.items()}
        return LossOutputs((batch.weights * losses).sum(), batch.counts.sum(), sums, {})
