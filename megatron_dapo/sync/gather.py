"""Weight sync, the trainer's side: Megatron shards become buckets of full tensors under HF names.

Every bucket has an owner, the rank that assembles it in one block of memory. Every shard is sent once, from the lowest
rank that holds it directly to the owner. Who owns what is the caller's choice (`Senders`):

- one: rank 0 owns everything.
- stage: the lowest rank of a pipeline stage owns the stage's parameters, so nothing travels between stages.
- expert_group: experts belong to the lowest rank that holds them, so they do not travel between expert-parallel ranks.

Owners take turns, so that one gathers its next bucket while another one sends. With `receivers` the owner passes each
bucket on to other ranks, which hand it to the engines on their node. All ranks iterate over the same buckets in the
same order, whether they take part in one or not. A rank uses two blocks of memory, of the largest bucket's size each:
a bucket is valid until the bucket after the next one is requested. A copy from a bucket may finish
later if its event is in `readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dapo import fault_points
from megatron_dapo.config.families.tensors import OUTPUT, Split
from megatron_dapo.config.model import ModelShape
from megatron_dapo.config.rollout import Quantization, Senders
from megatron_dapo.sync.bucket import Bucket, FlatBucket, RemoteBucket, bucket_in, wait_for_readers
from megatron_dapo.weights.fp8 import quantise_pairs, quantised_specs
from megatron_dapo.weights.mapping import ParameterMapping, WeightsError, parameter_mappings
from megatron_dapo.weights.model_weights import RankPosition, live_adapters, live_mappings, shard_places
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size, in_flat_order


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard of a parameter: the rank that sends it, its shape and type."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _BucketPlan:
    """What one bucket contains, the rank that assembles it, and the ranks that hand it to engines."""

    owner: int
    receivers: tuple[int, ...]
    mappings: tuple[ParameterMapping, ...]
    gathered: tuple[TensorSpec, ...]  # as the model has them
    specs: tuple[TensorSpec, ...]  # as they are sent


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
        merge: Callable[[str, Tensor], Tensor] | None = None,
        adapters: Mapping[str, ParameterMapping] | None = None,
        senders: Senders = "one",
        nodes: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
        quantization: Quantization = "none",
    ) -> None:
        """`before` is called before weights are read, on every rank and in the thread that iterates. `merge` makes of
        a shard, by the parameter's name, what is sent. `adapters`: LoRA's are gathered instead of the weights. `nodes`:
        the ranks of each node, where ranks hand weights to the engines on their own node. `keep_memory`: the two blocks
        are kept between updates, on a GPU. `quantization`: what the owner does with a bucket before it sends it."""
        self._before = before
        self._merge = merge
        self._quantization = quantization
        live = live_mappings(model_chunks, shape, position) if adapters is None else live_adapters(model_chunks)
        self._mine = {mapping.name: parameter for mapping, parameter in live}
        self._rank = dist.get_rank()
        self._device = next(iter(self._mine.values())).device
        # Host memory is shared by name, and torch removes the name once readers have opened and closed it: a call that
        # is repeated because its reply was lost counts twice.
        self._keep_memory = keep_memory and self._device.type == "cuda"
        table = parameter_mappings(shape) if adapters is None else adapters
        self._mappings = {n: m for n, m in table.items() if not m.tied or n != OUTPUT}
        self._shards = self._exchange_shapes(position)
        self.nodes = [list(ranks) for ranks in nodes]
        self.plans = self._schedule(bucket_bytes, senders)
        self._groups = self._receiver_groups()
        self._memory: list[Tensor | None] = [None, None, None]
        self._readers: list[list[torch.cuda.Event]] = [[], [], []]  # by block
        self._gathered: Tensor | None = None  # where the owner assembles a bucket that it quantises
        self._views: dict[int, FlatBucket] = {}  # by the bucket's number, while the memory exists

    def _exchange_shapes(self, position: RankPosition) -> dict[str, list[_Shard]]:
        """All ranks learn which rank holds which shard, and its shape."""
        held = {
            name: (position.split(m)[0] if m.split is not Split.NONE else 0, tuple(parameter.shape), parameter.dtype)
            for name, parameter in self._mine.items()
            if (m := self._mappings.get(name))
        }
        everyone: list[dict[str, tuple[int, tuple[int, ...], torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, held)
        shards: dict[str, list[_Shard]] = {}
        for name in self._mappings:
            found: dict[int, _Shard] = {}
            for rank, theirs in enumerate(everyone):
                if name in theirs:
                    index, shape, dtype = theirs[name]
                    found.setdefault(index, _Shard(rank, shape, dtype))
            if not found or sorted(found) != list(range(len(found))):
                raise WeightsError(f"{name}: the ranks hold shards {sorted(found)} of it, so it cannot be assembled")
            shards[name] = [found[i] for i in sorted(found)]
        return shards

    # ---- the schedule, the same on every rank ----

    def _owner(self, mapping: ParameterMapping, senders: Senders, first_of_layer: dict[int, int]) -> int:
        if senders == "one":
            return 0
        if senders == "stage" and mapping.layer is not None:
            return first_of_layer[mapping.layer]
        return self._shards[mapping.name][0].rank

    def _schedule(self, limit: int, senders: Senders) -> list[_BucketPlan]:
        first_of_layer: dict[int, int] = {}
        for mapping in self._mappings.values():
            if mapping.layer is not None:
                rank = self._shards[mapping.name][0].rank
                first_of_layer[mapping.layer] = min(rank, first_of_layer.get(mapping.layer, rank))
        owned: dict[int, list[ParameterMapping]] = {}
        for mapping in self._mappings.values():
            owned.setdefault(self._owner(mapping, senders, first_of_layer), []).append(mapping)
        partitions = [
            [(owner, part) for part in self._partition(mappings, limit)] for owner, mappings in sorted(owned.items())
        ]
        turns = [turn for round_ in zip_longest(*partitions) for turn in round_ if turn is not None]
        plans = []
        for i, (owner, part) in enumerate(turns):
            specs, receivers = self._specs(part), tuple(ranks[i % len(ranks)] for ranks in self.nodes)
            sent = specs if self._quantization == "none" else quantised_specs(specs)
            plans.append(_BucketPlan(owner, receivers, part, specs, sent))
        return plans

    def _partition(self, mappings: Sequence[ParameterMapping], limit: int) -> Iterator[tuple[ParameterMapping, ...]]:
        """The parameters in table order, at most `limit` bytes per bucket (a larger one is a bucket of its own). The
        parameters of an expert stay together, so that experts can be packed."""
        bucket: list[ParameterMapping] = []
        filled = 0
        for _, together in groupby(mappings, lambda m: m.name if m.expert is None else (m.layer, m.expert)):
            unit = list(together)
            size = sum(torch.Size(m.shape).numel() * self._shards[m.name][0].dtype.itemsize for m in unit)
            if bucket and filled + size > limit:
                yield tuple(bucket)
                bucket, filled = [], 0
            bucket += unit
            filled += size
        if bucket:
            yield tuple(bucket)

    def _specs(self, mappings: Sequence[ParameterMapping]) -> tuple[TensorSpec, ...]:
        specs = [
            TensorSpec(name, self._shards[mapping.name][0].dtype, shape)
            for mapping in mappings
            for name, shape in zip(mapping.hf, mapping.hf_shapes, strict=True)
        ]
        return in_flat_order(specs)

    def _receiver_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
        """Collective: the groups in which owners pass buckets on."""
        members = dict.fromkeys(tuple(sorted({plan.owner, *plan.receivers})) for plan in self.plans)
        return {ranks: dist.new_group(list(ranks)) for ranks in members if len(ranks) > 1}

    @property
    def senders(self) -> list[int]:
        """The ranks that give buckets to engines."""
        return sorted({rank for plan in self.plans for rank in plan.receivers or (plan.owner,)})

    @property
    def has_remote_senders(self) -> bool:
        return self.senders != [0]

    # ---- one update ----

    def buckets(self) -> Iterator[Bucket]:
        """Collective: every rank must exhaust it. A rank gets the tensors of the buckets that it owns or hands to
        engines. For the others rank 0 gets a `RemoteBucket`, and the other ranks an empty bucket."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread, and this may be another thread
        self._before()
        turn = 0
        for number, plan in enumerate(self.plans):
            fault_points.reach("sync/before_bucket")
            shards, ranks = self._exchange(plan), {plan.owner, *plan.receivers}
            sends = self._rank in (plan.receivers or (plan.owner,))  # to engines
            found: Bucket = RemoteBucket(plan.owner, plan.receivers, plan.specs) if self._rank == 0 else []
            if self._rank in ranks:
                # A bucket that only passes through has a block of its own: engines may still read both of the others.
                bucket = self._bucket(number, turn % 2 if sends else 2)
                wait_for_readers(bucket)
                if self._rank == plan.owner:
                    self._fill(plan, bucket, shards)
                if group := self._groups.get(tuple(sorted(ranks))):
                    dist.broadcast(bucket.flat, plan.owner, group=group)
                found = bucket if sends else found
                turn += sends
            yield found
        if not self._keep_memory:
            self._memory, self._views, self._gathered = [None, None, None], {}, None
            self._readers = [[], [], []]

    def _bucket(self, number: int, turn: int) -> FlatBucket:
        if number not in self._views:
            plan, memory = self.plans[number], self._memory[turn]
            if memory is None:
                largest = max(flat_size(plan.specs) for plan in self.plans)
                memory = self._memory[turn] = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._views[number] = bucket_in(memory, plan.specs, plan.receivers, self._readers[turn])
        return self._views[number]

    @torch.no_grad()
    def _exchange(self, plan: _BucketPlan) -> dict[str, list[Tensor]]:
        """Sends the shards of one bucket to its owner, in one batch of operations."""
        operations: list[dist.P2POp] = []
        received: dict[str, list[Tensor]] = {}
        for mapping in plan.mappings:
            received[mapping.name] = []
            for shard in self._shards[mapping.name]:
                if shard.rank == self._rank:
                    mine = self._mine[mapping.name].detach()
                    mine = (mine if self._merge is None else self._merge(mapping.name, mine)).contiguous()
                    if self._rank == plan.owner:
                        received[mapping.name].append(mine)
                    else:
                        operations.append(dist.P2POp(dist.isend, mine, plan.owner))
                elif self._rank == plan.owner:
                    buffer = torch.empty(shard.shape, dtype=shard.dtype, device=self._device)
                    received[mapping.name].append(buffer)
                    operations.append(dist.P2POp(dist.irecv, buffer, shard.rank))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    def _fill(self, plan: _BucketPlan, bucket: FlatBucket, shards: dict[str, list[Tensor]]) -> None:
        if plan.gathered == plan.specs:
            self._assemble(plan, bucket, shards)
            return
        if self._gathered is None:
            largest = max(flat_size(plan.gathered) for plan in self.plans)
            self._gathered = torch.empty(largest, dtype=torch.uint8, device=self._device)
        whole = bucket_in(self._gathered, plan.gathered)
        self._assemble(plan, whole, shards)
        quantise_pairs(whole, bucket)

    @torch.no_grad()
    def _assemble(self, plan: _BucketPlan, bucket: FlatBucket, shards: dict[str, list[Tensor]]) -> None:
        """Copies every shard to its place in the HF tensors: one fused copy for all blocks of whole rows."""
        targets = dict(bucket)
        destinations: list[Tensor] = []
        sources: list[Tensor] = []
        for mapping in plan.mappings:
            for place, block in shard_places(mapping, shards[mapping.name], targets):
                if place.is_contiguous():
                    destinations.append(place)
                    sources.append(block)
                else:
                    place.copy_(block)
        if destinations:
            torch._foreach_copy_(destinations, sources)
