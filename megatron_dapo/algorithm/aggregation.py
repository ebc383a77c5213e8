"""How per-token losses become one number, written as (per-token weight, additive denominator).

The loss is Σ weight·loss / Σ count. Both sums may be taken in any order and anywhere: over packed micro-batches,
context-parallel shares, data-parallel ranks. That works because weights and counts are computed here, on whole
sequences and after masking, before the batch is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dapo.config.algorithm import Aggregation


def token_weights(
    aggregation: Aggregation, mask: Tensor, sequence_ids: Tensor, sequences: int, norm_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """(weights fp32 [tokens], counts int64 [tokens]) of whole sequences; both are zero where `mask` is False.

    mask          bool [tokens]: tokens that carry loss, truncated and ungraded samples already masked out
    sequence_ids  int64 [tokens], 0..sequences−1

    token-mean                weight 1            count 1 at every active token
    seq-mean-token-sum        weight 1            count 1 at the first active token of each sequence
    seq-mean-token-mean       weight 1/length     same; length = the sequence's active tokens
    seq-mean-token-sum-norm   weight 1/norm_length   same

    A sequence without an active token counts nothing. A sequence here is a response: the samples of one rollout have
    the same id, so that they count once.
    """
    _check(mask, sequence_ids)
    if aggregation == "token-mean":
        return mask.float(), mask.long()
    counts = _first_active(mask, sequence_ids, sequences).long()
    if aggregation == "seq-mean-token-sum":
        return mask.float(), counts
    if aggregation == "seq-mean-token-mean":
        lengths = torch.zeros(sequences, dtype=torch.long, device=mask.device)
        lengths.index_add_(0, sequence_ids, mask.long())
        # At least one where the mask is True; the bound only avoids 0/0 at masked positions.
        return mask / lengths[sequence_ids].clamp_min(1), counts
    if aggregation == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(f"seq-mean-token-sum-norm: expected norm_length above 0, found {norm_length}")
        return mask.float() / norm_length, counts
    raise ValueError(f"unknown aggregation {aggregation!r}")


def positive_weights(coefficient: float, right: Tensor, denominator: int) -> Tensor:
    """fp32 [tokens]: weights of −log π, so that their sum over the loss's denominator is coefficient · the mean over
    the tokens in `right`, which is another denominator. 0 where no token is right.

    right  bool [tokens]: tokens of right responses that carry loss, of the whole mini-batch
    """
    return right.float() * (coefficient * denominator / max(1, int(right.sum())))


def _first_active(mask: Tensor, sequence_ids: Tensor, sequences: int) -> Tensor:
    """bool [tokens]: True at the first active token of every sequence that has one."""
    positions = torch.arange(mask.numel(), device=mask.device)
    first = torch.full((sequences,), mask.numel(), device=mask.device)
    first = first.scatter_reduce(0, sequence_ids, torch.where(mask, positions, mask.numel()), reduce="amin")
    return mask & (positions == first[sequence_ids])


def _check(mask: Tensor, sequence_ids: Tensor) -> None:
    if mask.ndim != 1 or mask.dtype != torch.bool:
        raise ValueError(f"mask: expected bool [tokens], found {mask.dtype} {tuple(mask.shape)}")
    if sequence_ids.shape != mask.shape or sequence_ids.dtype != torch.int64:
        raise ValueError(
            f"sequence_ids: expected torch.int64 {tuple(mask.shape)} like mask, "
            f"found {sequence_ids.dtype} {tuple(sequence_ids.shape)}"
        )
