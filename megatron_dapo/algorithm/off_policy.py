"""Corrections for tokens that were not sampled from the policy being trained.

Three policies are involved. π is being updated. The proximal policy π_old is the trainer's before the first update of a
step: clipping keeps π near it. The behaviour policy π_engine is what the engine sampled from: its weights may be older,
and its kernels compute other log-probs. With w = π_old/π_engine of each token:

    importance weight   the loss is multiplied by min(w, cap), of the token or of the whole sequence
    normalised weight   the same, divided by its mean over the mini-batch
    token mask          w outside [low, high]: the token carries no gradient
    sequence mask       the geometric mean or the product of w outside [low, high]: the sequence is excluded
    veto                w of one token below a bound: the sequence is excluded
    OPSM                Â < 0 and mean(log π_engine − log π) > δ: the sequence carries no gradient

What counts in the denominator. An excluded sequence counts nothing, like a truncated one: it is rejected by π_old and
π_engine alone, whatever the update does, and the rest is averaged. A token mask and OPSM set a weight to zero: their
tokens were sampled, their loss is 0 and they count. Otherwise fewer usable tokens would mean a larger step from each,
and OPSM, which depends on π, would change the denominator while the weights change.

A removed token contributes nothing, also no KL term and no entropy bonus. An importance weight multiplies the objective
alone. Every decision needs only the token itself, sums over its whole sequence, and a mean weight that is known before
the mini-batch is split, so it is the same for every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dapo.algorithm.objective import Needs, Scores, Sums, TokenBatch
from megatron_dapo.config.algorithm import OffPolicyConfig


@dataclass(slots=True)
class Corrections:
    """Values [tokens], without gradient. `means` are the metrics of what was weighted and removed."""

    weights: Tensor | None = None  # multiply the objective's losses
    masked: Tensor | None = None  # bool: no gradient, but counted
    excluded: Tensor | None = None  # bool: no gradient and not counted
    means: dict[str, Tensor] = field(default_factory=dict)


class OffPolicy:
    """The corrections of one configuration. `needs` says what they read."""

    def __init__(self, config: OffPolicyConfig) -> None:
        self.config = config
        masks = config.sequence_masks
        self._sums_mismatch = config.importance_weight == "sequence" or masks not in ([], ["veto"])
        opsm = config.opsm_delta is not None
        whole = config.importance_weight == "sequence" or bool(masks) or opsm
        self.needs = Needs(whole_sequences=whole, engine=bool(config.reads_old_logprobs) or opsm)

    def mean_weight(self, batch: TokenBatch) -> float:
        """Of the active tokens of a whole mini-batch, or of its sequences that have some: what weights are divided
        by."""
        mismatch, ids = torch.where(batch.mask, _mismatch(batch), 0.0).double(), batch.sequence_ids
        counted = batch.mask
        if self.config.importance_weight == "sequence":
            mismatch = mismatch.new_zeros(batch.sequences).index_add_(0, ids, mismatch)
            counted = torch.zeros(batch.sequences, dtype=torch.bool).index_fill_(0, ids[batch.mask], True)
        weights = mismatch[counted].exp().clamp(max=self.config.weight_cap)
        return float(weights.mean()) if weights.numel() else 1.0

    def sequence_values(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        """[tokens] values to add up over each whole sequence; `correct` gets the totals."""
        values: dict[str, Tensor] = {}
        if self.config.geometric_mask is not None or self.config.opsm_delta is not None:
            values["length"] = batch.mask
        if self._sums_mismatch:
            values["mismatch"] = _mismatch(batch)
        if self.config.veto is not None:
            values["vetoes"] = _mismatch(batch) < math.log(self.config.veto)
        if self.config.opsm_delta is not None:
            assert batch.engine_logprobs is not None
            values["drift"] = batch.engine_logprobs - scores.logprobs
        return values

    def correct(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Corrections:
        """Elementwise over any slice of tokens once `sums` are known. Metrics only, if no correction is on."""
        found = Corrections()
        if batch.engine_logprobs is None:
            return found
        self._weigh(found, scores, batch, sums)
        self._mask_tokens(found, batch)
        self._exclude_sequences(found, batch, sums)
        self._mask_drifted(found, batch, sums)
        return found

    def _weigh(self, found: Corrections, scores: Scores, batch: TokenBatch, sums: Sums) -> None:
        level, cap = self.config.importance_weight, self.config.weight_cap
        if level == "off":
            proximal = batch.proximal_logprobs(scores)
            if proximal is not None and batch.engine_logprobs is not None:
                found.means["mismatch_over_cap"] = (proximal - batch.engine_logprobs).exp() > cap
            return
        weights = (sums["mismatch"] if level == "sequence" else _mismatch(batch)).exp()
        found.means["mismatch_over_cap"] = weights > cap
        found.weights = found.means["importance_weight"] = weights.clamp(max=cap) / batch.mean_weight

    def _mask_tokens(self, found: Corrections, batch: TokenBatch) -> None:
        if self.config.token_mask is not None:
            found.masked = found.means["token_mask_share"] = _outside(_mismatch(batch), self.config.token_mask)

    def _exclude_sequences(self, found: Corrections, batch: TokenBatch, sums: Sums) -> None:
        if not self.config.sequence_masks:
            return
        found.excluded = torch.zeros_like(batch.mask)
        if self.config.geometric_mask is not None:
            found.excluded = found.excluded | _outside(_per_token(sums, "mismatch"), self.config.geometric_mask)
        if self.config.product_mask is not None:
            found.excluded = found.excluded | _outside(sums["mismatch"], self.config.product_mask)
        if self.config.veto is not None:
            found.excluded = found.excluded | (sums["vetoes"] > 0)
        found.means["sequence_mask_share"] = found.excluded

    def _mask_drifted(self, found: Corrections, batch: TokenBatch, sums: Sums) -> None:
        if self.config.opsm_delta is not None:
            drifted = (batch.advantages < 0) & (_per_token(sums, "drift") > self.config.opsm_delta)
            found.means["opsm_share"] = drifted
            found.masked = drifted if found.masked is None else found.masked | drifted


def _mismatch(batch: TokenBatch) -> Tensor:
    assert batch.engine_logprobs is not None
    return batch.old_logprobs - batch.engine_logprobs


def _per_token(sums: Sums, name: str) -> Tensor:
    """The mean over the active tokens of each sequence; 0 where it has none."""
    return sums[name] / sums["length"].clamp_min(1)


def _outside(log_ratio: Tensor, bounds: list[float]) -> Tensor:
    """bool: exp(log_ratio) lies outside [low, high]. Compared as logarithms, which cannot overflow."""
    low, high = (math.log(bound) if bound else -math.inf for bound in bounds)
    return (log_ratio < low) | (log_ratio > high)
