"""Weight sync, the trainer's side: Megatron shards become buckets of full tensors under HF names, on rank 0.

Every shard travels once, from the lowest rank that holds it straight to rank 0, which puts tensors together and yields
them in buckets of bounded size. The engines' side (`Engine.update_weights`) reads one bucket while the next one is
gathered. All ranks run through the same buckets in the same order, whether they hold something or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dapo.config.model import ModelShape
from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.weights.mapping import OUTPUT, Row, table
from megatron_dapo.weights.model_weights import Place, live_rows
from megatron_dapo.weights.sharding import WeightsError, hf_tensors, unshard


@dataclass(frozen=True, slots=True)
class _Piece:
    """One shard of a row: which rank sends it, and its shape."""

    rank: int
    shape: tuple[int, ...]


class WeightStream:
    """Made once, when the model exists (collective); `buckets` may then be run through any number of times."""

    def __init__(
        self, model_chunks: Sequence[nn.Module], shape: ModelShape, place: Place, *, bucket_bytes: int = 512 << 20
    ) -> None:
        self._mine = {row.name: parameter for row, parameter in live_rows(model_chunks, shape, place)}
        self._rank = dist.get_rank()
        example = next(iter(self._mine.values()))
        self._device, self._dtype = example.device, example.dtype
        self._rows = {name: row for name, row in table(shape).items() if not row.tied or name != OUTPUT}
        self._holders = self._publish(place)
        self._plan = list(self._cut(bucket_bytes))

    def _publish(self, place: Place) -> dict[str, list[_Piece]]:
        """Who holds which shard: every rank tells, every rank knows."""
        held = {n: (place.cut(self._rows[n])[0], tuple(p.shape)) for n, p in self._mine.items() if n in self._rows}
        everyone: list[dict[str, tuple[int, tuple[int, ...]]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, held)
        holders: dict[str, list[_Piece]] = {}
        for name in self._rows:
            found: dict[int, _Piece] = {}
            for rank, theirs in enumerate(everyone):
                if name in theirs:
                    found.setdefault(theirs[name][0], _Piece(rank, theirs[name][1]))
            if not found or sorted(found) != list(range(len(found))):
                raise WeightsError(f"{name}: the ranks hold shards {sorted(found)} of it, so it cannot be put together")
            holders[name] = [found[i] for i in sorted(found)]
        return holders

    def _cut(self, limit: int) -> Iterator[list[Row]]:
        """Rows in table order, in buckets of at most `limit` bytes (a larger row is a bucket of its own)."""
        bucket: list[Row] = []
        filled = 0
        for row in self._rows.values():
            size = torch.Size(row.shape).numel() * self._dtype.itemsize
            if bucket and filled + size > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(row)
            filled += size
        if bucket:
            yield bucket

    @property
    def total_bytes(self) -> int:
        return sum(torch.Size(row.shape).numel() for row in self._rows.values()) * self._dtype.itemsize

    def buckets(self) -> Iterator[Bucket]:
        """Collective: every rank must run through all of it. Rank 0 gets the tensors, the others empty buckets."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device belongs to the thread, and this may be another
        for rows in self._plan:
            parts = self._exchange(rows)
            if self._rank != 0:
                yield []
                continue
            yield [pair for row in rows for pair in hf_tensors(row, unshard(row, parts[row.name])).items()]

    @torch.no_grad()
    def _exchange(self, rows: Sequence[Row]) -> dict[str, list[Tensor]]:
        """Moves the shards of one bucket to rank 0, all at once."""
        operations: list[dist.P2POp] = []
        parts: dict[str, list[Tensor]] = {}
        for row in rows:
            parts[row.name] = []
            for piece in self._holders[row.name]:
                if piece.rank == self._rank:
                    mine = self._mine[row.name].detach().contiguous()
                    if self._rank == 0:
                        parts[row.name].append(mine)
                    else:
                        operations.append(dist.P2POp(dist.isend, mine, 0))
                elif self._rank == 0:
                    buffer = torch.empty(piece.shape, dtype=self._dtype, device=self._device)
                    parts[row.name].append(buffer)
                    operations.append(dist.P2POp(dist.irecv, buffer, piece.rank))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return parts


def discard(buckets: Iterator[Bucket]) -> None:
    """What the ranks that talk to no engine do: run through the buckets, so that rank 0 gets their shards."""
    for _ in buckets:
        pass
