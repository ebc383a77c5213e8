"""The load of the experts over a whole mini-batch: from it come the load-balancing loss and its metrics.

`model/router.py` defines the loss; here its parts are summed over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import ModelShape
from megatron_dapo.policy.packing import PackedMicroBatch
from megatron_dapo.policy.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Sums over all tokens of a mini-batch that are not padding, the same on every rank."""

    dispatched: Tensor  # fp64 [layers, experts]: tokens sent to each expert
    probability: Tensor  # fp64 [layers, experts]: the sum of its softmax probabilities
    experts_per_token: int

    @classmethod
    def gather(cls, micro_batches: Sequence[PackedMicroBatch], shape: ModelShape, runtime: Runtime) -> ExpertLoad:
        """Collective, after a pass over the micro-batches: each rank knows its tokens in its layers."""
        table = torch.zeros(shape.layers, 2, shape.experts, dtype=torch.float64, device=runtime.device)
        for micro in micro_batches:
            assert micro.packed.routing is not None
            for layer, load in micro.packed.routing.load.items():
                table[layer - 1] += load
        dist.all_reduce(table)
        return cls(table[:, 0], table[:, 1], shape.experts_per_token)

    @property
    def shares(self) -> Tensor:
        """[layers, experts]: f, which adds up to 1 in each layer."""
        return self.dispatched / self.dispatched.sum(1, keepdim=True)

    @property
    def _tokens(self) -> Tensor:
        return self.dispatched.sum(1, keepdim=True) / self.experts_per_token

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
        values = torch.stack([experts * self.shares.amax(), aux.mean()]).tolist()
        return dict(zip(("expert_load_max", "aux_loss"), values, strict=True))
