"""Routing replay: tokens are computed by given experts instead of those that the router chooses now.

The experts of a token come with the mini-batch: reported by the engine that generated it (R3), or recorded by the pass
that computed the old log-probs (`policy.routing_replay`). Only the choice is replayed. Weights of the experts are
computed from the router's present scores, so its gradient flows.

A rank needs the experts of the tokens that its routers see, in its own layers: samples of its micro-batches, cut by
packing, context parallelism (zigzag) and sequence parallelism as the tokens are. Expert parallelism needs nothing more.
Where the experts of a token are not known, the router chooses: padding, the last token of a sample, lost ones. In the
reference policy the router always chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import ModelShape
from megatron_dapo.policy.batch import BatchError, PackedMicroBatch, TrainBatch
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.router import MicroBatchRouting
from megatron_dapo.types import RoutedExperts


@dataclass(frozen=True, slots=True)
class RoutingReplay:
    """The replay on this rank. `layers`: the numbers of its layers, counted from 1."""

    shape: ModelShape
    runtime: Runtime
    layers: tuple[int, ...]

    @property
    def _width(self) -> int:
        return self.shape.layers * self.shape.experts_per_token

    @property
    def _columns(self) -> list[int]:
        return [layer - 1 for layer in self.layers]

    def check(self, batch: TrainBatch) -> None:
        """Raises BatchError if the experts do not belong to this model."""
        for index, experts in enumerate(batch.routed_experts or ()):
            if experts is None:
                continue
            length = batch.lengths[index]
            if experts.ndim != 2 or experts.shape[1] != self._width or len(experts) > length:
                raise BatchError(
                    f"sample {index}: routed_experts is {experts.shape}, expected at most {length} tokens × ("
                    f"{self.shape.layers} layers × {self.shape.experts_per_token} experts per token)"
                )
            if int(experts.max(initial=0)) > self.shape.experts:
                raise BatchError(f"sample {index}: expert {experts.max() - 1} of {self.shape.experts} was routed to")

    def attach(self, batch: TrainBatch, micro: PackedMicroBatch) -> None:
        """Gives the micro-batch the experts of its tokens: [tokens, layers of this rank, k], 0 where not known."""
        assert batch.routed_experts is not None and micro.packed.routing is not None
        shape, rows = self.shape, micro.routed
        values = np.zeros((len(rows), len(self.layers), shape.experts_per_token), np.int16)
        samples = np.searchsorted(batch.token_offsets, rows, side="right") - 1
        for sample in np.unique(samples[rows >= 0]):
            experts = batch.routed_experts[sample]
            if experts is None:
                continue
            here = np.flatnonzero((samples == sample) & (rows >= 0))
            positions = rows[here] - batch.token_offsets[sample]
            known = positions < len(experts)
            table = experts.reshape(len(experts), shape.layers, shape.experts_per_token)
            values[here[known]] = table[positions[known]][:, self._columns]
        targets = torch.from_numpy(values).to(self.runtime.device, non_blocking=True)
        micro.packed.routing.targets = {layer: targets[:, i] for i, layer in enumerate(self.layers)}

    def recorded(self, batch: TrainBatch, micro_batches: Sequence[PackedMicroBatch]) -> list[RoutedExperts | None]:
        """Collective, after a pass that recorded. The experts of this data-parallel rank's samples in this rank's
        layers, whatever ranks their tokens were split over."""
        found: list[RoutedExperts | None] = [None] * batch.samples
        small = self.shape.experts < np.iinfo(np.uint8).max
        for micro in micro_batches:
            routing = micro.packed.routing
            assert routing is not None and routing.recorded is not None
            if not self.layers:  # a pipeline stage without experts
                continue
            stacked = torch.stack([routing.recorded[layer] for layer in self.layers], dim=1) + 1
            values = self._gather(stacked.to(torch.uint8 if small else torch.int32))
            rows = self._gather(torch.from_numpy(micro.routed).to(self.runtime.device)).astype(np.int64)
            samples = np.searchsorted(batch.token_offsets, rows, side="right") - 1
            for sample in np.unique(samples[rows >= 0]):
                here = np.flatnonzero((samples == sample) & (rows >= 0))
                table = np.zeros(
                    (batch.lengths[sample], self.shape.layers, self.shape.experts_per_token),
                    np.uint8 if small else np.uint16,
                )
                positions = rows[here] - batch.token_offsets[sample]
                table[np.ix_(positions, self._columns)] = values[here]
                found[sample] = table.reshape(len(table), -1)
        return found

    def collect(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]]) -> dict[int, RoutedExperts]:
        """Collective. On rank 0 what the ranks have recorded of these samples, by sample. One mini-batch at a time:
        each rank's message takes as much of rank 0's memory as the largest."""
        found: dict[int, RoutedExperts] = {}
        groups, runtime = self.runtime.groups, self.runtime
        assert batch.routed_experts is not None
        first = groups.tp.rank() == groups.cp.rank() == 0  # the others that share the tokens have the same
        for samples in mini_batches:
            mine = {i: experts for i in samples if first and (experts := batch.routed_experts[i]) is not None}
            everyone: list[Any] | None = [{}] * runtime.world_size if runtime.rank == 0 else None
            dist.gather_object(mine, everyone, dst=0, group=runtime.control)
            for i, experts in ((i, x) for theirs in everyone or () for i, x in theirs.items()):
                found[i] = np.maximum(experts, found.get(i, 0))
        return found

    def _gather(self, tensor: Tensor) -> Any:
        """Of all ranks that share the tokens of the micro-batch, on the host."""
        group = self.runtime.groups.tp_cp
        if group.size() > 1:
            out = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
            dist.all_gather_into_tensor(out, tensor.contiguous(), group=group)
            tensor = out
        return tensor.cpu().numpy()

    def metrics(self, micro_batches: Sequence[PackedMicroBatch]) -> dict[str, float]:
        """Collective. `routing_replayed`: share of the tokens whose experts were given. `routing_changed`: share of
        those choices that the router would have made otherwise, over all layers."""
        total = torch.zeros(3, dtype=torch.float64, device=self.runtime.device)
        for micro in micro_batches:
            routing = micro.packed.routing
            assert routing is not None
            for counts in routing.replayed.values():
                total += counts
        dist.all_reduce(total)
        tokens, known, changed = total.tolist()
        return {
            "routing_replayed": known / tokens if tokens else 0.0,
            "routing_changed": changed / known if known else 0.0,
        }


def record(micro_batches: Sequence[PackedMicroBatch]) -> None:
    """The next pass over these micro-batches records the experts of every token."""
    for micro in micro_batches:
        assert isinstance(micro.packed.routing, MicroBatchRouting)
        micro.packed.routing.recorded = {}


# The load of the experts over a whole mini-batch: from it come the load-balancing loss and its metrics.


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Sums over all tokens of a mini-batch that are not padding, the same on every rank."""

    dispatched: Tensor  # fp64 [layers, experts]: tokens sent to each expert
    probability: Tensor  # fp64 [layers, experts]: the sum of its softmax probabilities
    experts_per_token: int
    moe_layers: int  # layers without experts have zeros

    @classmethod
    def gather(cls, micro_batches: Sequence[PackedMicroBatch], shape: ModelShape, runtime: Runtime) -> ExpertLoad:
        """Collective, after a pass over the micro-batches: each rank knows its tokens in its layers."""
        table = torch.zeros(shape.layers, 2, shape.experts, dtype=torch.float64, device=runtime.device)
        for micro in micro_batches:
            assert micro.packed.routing is not None
            for layer, load in micro.packed.routing.load.items():
                table[layer - 1] += load
        dist.all_reduce(table)
        return cls(table[:, 0], table[:, 1], shape.experts_per_token, shape.moe_layers)

    @property
    def shares(self) -> Tensor:
        """[layers, experts]: f, which adds up to 1 in each layer with experts."""
        return self.dispatched / self.dispatched.sum(1, keepdim=True).clamp(min=1)

    @property
    def _tokens(self) -> Tensor:
        return self.dispatched.sum(1, keepdim=True).clamp(min=1) / self.experts_per_token

    def slopes(self, coefficient: float, denominator: int) -> Tensor:
        """[layers, experts]: the factor of each probability in the load-balancing loss. Megatron divides all gradients
        by the policy loss's denominator, so it is multiplied in here."""
        experts = self.dispatched.shape[1]
        return (coefficient * denominator * experts * self.shares / self._tokens).float()

    def metrics(self) -> dict[str, float]:
        """`expert_load_max`: tokens of the busiest expert of any layer, relative to the mean. `aux_loss`: E · Σ f·P,
        the mean over layers, without its coefficient. Both are 1 when the load is balanced."""
        experts = self.dispatched.shape[1]
        aux = experts * (self.shares * self.probability / self._tokens).sum(1)
        values = torch.stack([experts * self.shares.amax(), aux.sum() / self.moe_layers]).tolist()
        return dict(zip(("expert_load_max", "aux_loss"), values, strict=True))
