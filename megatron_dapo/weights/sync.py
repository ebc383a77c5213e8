"""Weight sync, the trainer's side: Megatron shards become buckets of full tensors under HF names, on rank 0.

Every shard is sent once, from the lowest rank that holds it directly to rank 0. Rank 0 assembles full tensors and
yields them in buckets of bounded size. The engines' side (`Engine.update_weights`) reads one bucket while the next
one is gathered. All ranks iterate over the same buckets in the same order, whether they hold a shard or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dapo.config.model import ModelShape
from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.weights.mapping import OUTPUT, ParameterMapping, WeightsError, parameter_mappings
from megatron_dapo.weights.model_weights import RankPosition, live_mappings
from megatron_dapo.weights.sharding import hf_tensors, unshard


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard of a parameter: the rank that sends it, and its shape."""

    rank: int
    shape: tuple[int, ...]


class WeightBuckets:
    """Created once, when the model exists (collective). `buckets` can then be iterated any number of times."""

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        shape: ModelShape,
        position: RankPosition,
        *,
        bucket_bytes: int = 512 << 20,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is called before weights are read, on every rank and in the thread that iterates."""
        self._before = before
        self._mine = {mapping.name: parameter for mapping, parameter in live_mappings(model_chunks, shape, position)}
        self._rank = dist.get_rank()
        example = next(iter(self._mine.values()))
        self._device, self._dtype = example.device, example.dtype
        self._mappings = {n: m for n, m in parameter_mappings(shape).items() if not m.tied or n != OUTPUT}
        self._shards = self._exchange_shapes(position)
        self._bucket_mappings = list(self._partition(bucket_bytes))

    def _exchange_shapes(self, position: RankPosition) -> dict[str, list[_Shard]]:
        """All ranks learn which rank holds which shard, and its shape."""
        held = {
            name: (position.split(self._mappings[name])[0], tuple(parameter.shape))
            for name, parameter in self._mine.items()
            if name in self._mappings
        }
        everyone: list[dict[str, tuple[int, tuple[int, ...]]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, held)
        shards: dict[str, list[_Shard]] = {}
        for name in self._mappings:
            found: dict[int, _Shard] = {}
            for rank, theirs in enumerate(everyone):
                if name in theirs:
                    found.setdefault(theirs[name][0], _Shard(rank, theirs[name][1]))
            if not found or sorted(found) != list(range(len(found))):
                raise WeightsError(f"{name}: the ranks hold shards {sorted(found)} of it, so it cannot be assembled")
            shards[name] = [found[i] for i in sorted(found)]
        return shards

    def _partition(self, limit: int) -> Iterator[list[ParameterMapping]]:
        """The parameters in table order, at most `limit` bytes per bucket (a larger one is a bucket of its own)."""
        bucket: list[ParameterMapping] = []
        filled = 0
        for mapping in self._mappings.values():
            size = torch.Size(mapping.shape).numel() * self._dtype.itemsize
            if bucket and filled + size > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(mapping)
            filled += size
        if bucket:
            yield bucket

    @property
    def total_bytes(self) -> int:
        return sum(torch.Size(mapping.shape).numel() for mapping in self._mappings.values()) * self._dtype.itemsize

    def buckets(self) -> Iterator[Bucket]:
        """Collective: every rank must exhaust it. Rank 0 gets the tensors, the others empty buckets."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread, and this may be another thread
        self._before()
        for mappings in self._bucket_mappings:
            shards = self._exchange(mappings)
            if self._rank != 0:
                yield []
                continue
            yield [pair for m in mappings for pair in hf_tensors(m, unshard(m, shards[m.name])).items()]

    @torch.no_grad()
    def _exchange(self, mappings: Sequence[ParameterMapping]) -> dict[str, list[Tensor]]:
        """Sends the shards of one bucket to rank 0, in one batch of operations."""
        operations: list[dist.P2POp] = []
        received: dict[str, list[Tensor]] = {}
        for mapping in mappings:
            received[mapping.name] = []
            for shard in self._shards[mapping.name]:
                if shard.rank == self._rank:
                    mine = self._mine[mapping.name].detach().contiguous()
                    if self._rank == 0:
                        received[mapping.name].append(mine)
                    else:
                        operations.append(dist.P2POp(dist.isend, mine, 0))
                elif self._rank == 0:
                    buffer = torch.empty(shard.shape, dtype=self._dtype, device=self._device)
                    received[mapping.name].append(buffer)
                    operations.append(dist.P2POp(dist.irecv, buffer, shard.rank))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received


def discard(buckets: Iterator[Bucket]) -> None:
    """For ranks without an engine: take part in every bucket, so that rank 0 receives their shards."""
    for _ in buckets:
        pass
