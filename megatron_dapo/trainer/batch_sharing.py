"""Rank 0's batch on all ranks: what every rank needs is broadcast, the rest goes to the ranks that train on it.

Every rank needs the lengths, advantages and masks of all samples, because the schedule and the loss's counts depend on
the whole mini-batch. Tokens and log-probs are read only by the data-parallel rank that a sample is assigned to. The
others have zeros there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise

import numpy as np

from megatron_dapo.policy.batch import Ints, TrainBatch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.types import RoutedExperts

MiniBatches = list[list[int]]
Shares = Callable[[Ints, MiniBatches], list[list[int]]]  # lengths, mini-batches: samples of each data-parallel rank
PER_SAMPLE = ("prompt_lengths", "response_lengths", "advantages")
SHARED_OTHERWISE = ("loss_mask", "routed_experts")


def share_batch(
    collectives: Collectives,
    batch: TrainBatch | None,
    mini_batches: MiniBatches | None,
    shares: Shares,
    *,
    whole_log_probs: bool = False,
) -> tuple[TrainBatch, MiniBatches]:
    """Collective. Rank 0 passes the batch and its mini-batches. `whole_log_probs`: every rank needs all of them."""
    sizes = collectives.share_array(None if mini_batches is None else np.array([len(m) for m in mini_batches]))
    assert sizes is not None
    indices = [list(range(a, b)) for a, b in pairwise([0, *np.cumsum(sizes).tolist()])]
    values = {name: collectives.share_array(None if batch is None else getattr(batch, name)) for name in PER_SAMPLE}
    bits = collectives.share_array(None if batch is None else np.packbits(batch.loss_mask))
    assert bits is not None and values["response_lengths"] is not None
    mask = np.unpackbits(bits, count=int(values["response_lengths"].sum())).astype(np.bool_)
    everywhere = TrainBatch(tokens=np.empty(0, np.int32), loss_mask=mask, **values)  # type: ignore[arg-type]
    places = shares(everywhere.lengths, indices)
    everywhere.routed_experts = _share_experts(
        collectives, None if batch is None else batch.routed_experts, everywhere, indices, shares
    )
    for name in (field.name for field in fields(TrainBatch) if field.name not in (*PER_SAMPLE, *SHARED_OTHERWISE)):
        array = None if batch is None else getattr(batch, name)
        if name == "tokens":
            found = collectives.scatter_array(array, everywhere.token_offsets, places)
        elif whole_log_probs:
            found = collectives.share_array(array)
        else:
            found = collectives.scatter_array(array, everywhere.response_offsets, places)
        setattr(everywhere, name, found)
    return everywhere, indices


def _share_experts(
    collectives: Collectives,
    routed: list[RoutedExperts | None] | None,
    batch: TrainBatch,
    mini_batches: MiniBatches,
    shares: Shares,
) -> list[RoutedExperts | None] | None:
    """Hundreds of bytes for each token, so one mini-batch at a time, and only to the ranks that train on it."""
    known = [experts for experts in routed or () if experts is not None]
    largest = max(known, key=lambda experts: experts.itemsize, default=None)
    header = collectives.share_array(None if largest is None else np.array([largest.shape[1], largest.itemsize]))
    if header is None:
        return None
    width, dtype = int(header[0]), np.dtype(f"u{header[1]}")
    lengths = None if routed is None else np.array([0 if x is None else len(x) for x in routed], np.int64)
    rows = collectives.share_array(lengths)
    assert rows is not None
    found: list[RoutedExperts | None] = [None] * batch.samples if routed is None else routed
    empty = np.zeros((0, width), dtype)
    for samples in mini_batches:
        offsets = np.concatenate([[0], np.cumsum(rows[samples])]).astype(np.int64) * width * dtype.itemsize
        if not offsets[-1]:
            continue
        places = [[samples.index(i) for i in share] for share in shares(batch.lengths, [samples])]
        flat = None
        if routed is not None:
            parts = [empty if (experts := routed[i]) is None else experts.astype(dtype) for i in samples]
            flat = np.concatenate(parts).reshape(-1).view(np.uint8)
        received = collectives.scatter_array(flat, offsets, places)
        assert received is not None
        if routed is None:
            for place in places[collectives.runtime.groups.dp.rank()]:
                values = received[offsets[place] : offsets[place + 1]].view(dtype).reshape(-1, width)
                found[samples[place]] = values.copy() if len(values) else None
    return found
