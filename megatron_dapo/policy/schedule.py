"""Which rank trains on which sample, and in which micro-batch. Plain Python, the same on every rank.

Invariants: every sample is in exactly one micro-batch of exactly one data-parallel rank; no micro-batch exceeds the
token budget; all ranks have the same number of micro-batches (an empty one runs as a masked placeholder, because every
rank must make the same collectives inside the layers); the result depends on the lengths alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_dapo.errors import UserError

MicroBatches = list[list[int]]  # sample indices of each micro-batch


def partition(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assigns samples to ranks so that token sums are balanced: longest first, each to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return shares


def first_fit_decreasing(indices: Sequence[int], lengths: Sequence[int], budget: int) -> MicroBatches:
    """Packs samples into as few micro-batches of at most `budget` tokens as first-fit-decreasing finds."""
    bins: MicroBatches = []
    room: list[int] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > budget:
            raise UserError(f"sample {index} has {length} tokens, more than the micro-batch budget of {budget}")
        slot = next((b for b, free in enumerate(room) if free >= length), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= length
    return bins


def shares_of_ranks(
    lengths: Sequence[int], ranks: int, mini_batches: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """The samples that each data-parallel rank needs for the updates on these mini-batches; default: one of all."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for mini_batch in [range(len(lengths))] if mini_batches is None else mini_batches:
        for share, chosen in zip(shares, partition([lengths[i] for i in mini_batch], ranks), strict=True):
            share += [mini_batch[i] for i in chosen]
    return shares


def schedule_micro_batches(
    lengths: Sequence[int],
    ranks: int,
    budget: int,
    multiple: int = 1,
    mini_batches: Sequence[Sequence[int]] | None = None,
) -> list[MicroBatches]:
    """The micro-batches of every data-parallel rank. Their number is a multiple of `multiple` (interleaved PP). With
    `mini_batches` every rank gets the samples that it also gets in the updates on them."""
    shares = shares_of_ranks(lengths, ranks, mini_batches)
    per_rank = [first_fit_decreasing(share, lengths, budget) for share in shares]
    count = max(1, max(len(bins) for bins in per_rank))
    count = -(-count // multiple) * multiple
    return [_spread(bins, lengths, count) for bins in per_rank]


def _spread(bins: MicroBatches, lengths: Sequence[int], count: int) -> MicroBatches:
    """Exactly `count` micro-batches: splits the fullest while any has two samples, then adds empty ones."""
    bins = [list(b) for b in bins]
    while len(bins) < count:
        fullest = max(
            (b for b in bins if len(b) > 1), key=lambda b: (sum(lengths[i] for i in b), -min(b)), default=None
        )
        if fullest is None:
            bins.append([])
            continue
        bins.remove(fullest)
        bins.extend(_partition_half(fullest, lengths))
    return bins


def _partition_half(indices: Sequence[int], lengths: Sequence[int]) -> MicroBatches:
    halves = partition([lengths[i] for i in indices], 2)
    return [[indices[i] for i in half] for half in halves]
