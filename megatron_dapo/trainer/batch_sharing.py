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

MiniBatches = list[list[int]]
Shares = Callable[[Ints, MiniBatches], list[list[int]]]  # lengths, mini-batches: samples of each data-parallel rank
PER_SAMPLE = ("prompt_lengths", "response_lengths", "advantages")


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
    for name in (field.name for field in fields(TrainBatch) if field.name not in (*PER_SAMPLE, "loss_mask")):
        array = None if batch is None else getattr(batch, name)
        if name == "tokens":
            found = collectives.scatter_array(array, everywhere.token_offsets, places)
        elif whole_log_probs:
            found = collectives.share_array(array)
        else:
            found = collectives.scatter_array(array, everywhere.response_offsets, places)
        setattr(everywhere, name, found)
    return everywhere, indices
