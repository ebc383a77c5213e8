"""A trace: losses, gradient norms, gradients and weights of a few updates, and the difference of two traces.

Gradients and weights are gathered into full HF-named tensors, so two layouts are compared tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.errors import UserError
from megatron_dapo.policy.megatron.runtime import Runtime, initialize
from megatron_dapo.policy.model.lora import load_adapters
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.selfcheck.cases import Case
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_adapters, random_experts, random_hf_weights
from megatron_dapo.weights.mapping import OUTPUT
from megatron_dapo.weights.model_weights import hf_tensors, unshard

TOKEN_TERM = 0.1  # what a token adds to a loss, about; such terms may cancel, and rounding is relative to them
AFTER_ADAM_FACTOR = 10  # Adam divides by the gradient's size: rounding in a tiny gradient is amplified


@dataclass(slots=True)
class Trace:
    """What a few updates produced. Gradients and weights are full HF-named tensors, on rank 0 only."""

    losses: list[float] = field(default_factory=list)  # of a model with experts also their load
    loss_terms: float = TOKEN_TERM  # the size of the terms of a loss
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Difference:
    """Largest relative difference of each kind, and the tensor that has it. `gradients` are those of the first update,
    `later_gradients` those of the others, whose weights differ already."""

    loss: float
    grad_norm: float
    gradients: float
    gradients_at: str
    later_gradients: float
    later_gradients_at: str
    weights: float
    weights_at: str

    def within(self, tolerance: float) -> bool:
        after_adam = (self.later_gradients / AFTER_ADAM_FACTOR, self.weights / AFTER_ADAM_FACTOR)
        # NaN is not within.
        return all(x <= tolerance for x in (self.loss, self.grad_norm, self.gradients, *after_adam))


def trace_updates(rendezvous: Rendezvous | None, case: Case, updates: int) -> Trace:
    """Runs the updates in this rank; rank 0 gets the gathered tensors, the others none.

    The ranks stay connected: the next layout needs only other model-parallel groups.
    """
    return trace_config(rendezvous, case.config, case.shape, updates)


def trace_config(rendezvous: Rendezvous | None, config: Config, shape: ModelShape, updates: int) -> Trace:
    """As `trace_updates`, with any configuration and any small model."""
    torch.set_num_threads(1)
    runtime = initialize(config.policy, seed=1, rendezvous=rendezvous)
    policy = Policy(config, shape, runtime)
    policy.load_hf(random_hf_weights(shape))
    if policy.trains_adapters:  # B is 0 at the start of a run, which makes the gradient of A 0
        load_adapters(policy.model, random_adapters(policy.trained_mappings), policy.position)
        policy.optimizer.reload_model_params()
    trace = Trace()
    for update in range(updates):
        batch = awkward_batch(shape, seed=update)
        if config.algorithm.aggregation == "seq-mean-token-sum":
            trace.loss_terms = TOKEN_TERM * float(batch.response_lengths.mean())
        if config.policy.routing_replay == "engine":
            batch.routed_experts = random_experts(shape, batch, seed=update)
        metrics = policy.gradients(batch)
        trace.gradients.append(gather_full(policy, runtime, gradient=True))
        metrics |= policy.step.step_optimizer()
        trace.losses += [metrics[name] for name in ("loss", "aux_loss", "expert_load_max") if name in metrics]
        trace.grad_norms.append(metrics["grad_norm"])
    trace.weights = gather_full(policy, runtime, gradient=False)
    return trace


def gather_full(policy: Policy, runtime: Runtime, *, gradient: bool) -> dict[str, Tensor]:
    """Collective. Full HF-named tensors on rank 0; {} elsewhere. For small models: everything is in memory at once."""
    policy.step.complete_weights()
    if gradient and policy.config.policy.distributed_optimizer:
        _complete_gradient_buffers(policy)
    position = policy.position
    mine = {
        mapping.name: (
            position.split(mapping)[0],
            (parameter.main_grad if gradient else parameter.data).detach().cpu().clone(),  # type: ignore[attr-defined]
        )
        for mapping, parameter in policy.trained_parameters()
    }
    everyone: list[Any] | None = [None] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return {}
    full: dict[str, Tensor] = {}
    for name, mapping in policy.trained_mappings.items():
        shards = _one_of_each(name, everyone)
        if not shards and name == OUTPUT and policy.shape.tied_embeddings:
            continue  # one stage holds embedding and head: there is no second copy
        full |= hf_tensors(mapping, unshard(mapping, [shards[rank] for rank in sorted(shards)]))
    return full


def _one_of_each(name: str, everyone: list[dict[str, tuple[int, Tensor]]]) -> dict[int, Tensor]:
    """Shards by (expert-)tensor-parallel rank. Replicas (data and context ranks) must hold the same bits."""
    shards: dict[int, Tensor] = {}
    for rank, held in enumerate(everyone):
        if name in held:
            tp_rank, tensor = held[name]
            if not torch.equal(_bits(shards.setdefault(tp_rank, tensor)), _bits(tensor)):
                raise UserError(
                    f"rank {rank} holds other values of {name} than its replicas: the replicas have diverged"
                )
    return shards


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _complete_gradient_buffers(policy: Policy) -> None:
    """Under the distributed optimizer each data-parallel rank holds only its reduced shard: gathers the others."""
    for chunk in policy.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def compare(found: Trace, reference: Trace) -> Difference:
    gradients = [_largest(a, b) for a, b in zip(found.gradients, reference.gradients, strict=True)]
    later, later_at = max(gradients[1:], key=lambda pair: _nan_first(pair[0]), default=(0.0, ""))
    weight, weight_at = _largest(found.weights, reference.weights)
    return Difference(
        loss=_largest_number(found.losses, reference.losses, reference.loss_terms),
        grad_norm=_largest_number(found.grad_norms, reference.grad_norms),
        gradients=gradients[0][0],
        gradients_at=gradients[0][1],
        later_gradients=later,
        later_gradients_at=later_at,
        weights=weight,
        weights_at=weight_at,
    )


def _nan_first(x: float) -> float:
    return float("inf") if x != x else x


def _largest_number(found: Sequence[float], reference: Sequence[float], at_least: float = 0.0) -> float:
    """Relative to the reference, or to `at_least` where that is larger."""
    pairs = zip(found, reference, strict=True)
    return max((_nan_first(abs(a - b) / max(abs(b), at_least)) for a, b in pairs), default=0.0)


def _largest(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """‖a − b‖ / ‖b‖ of the worst tensor, and its name; inf if the two have different tensors."""
    if found.keys() != reference.keys():
        return float("inf"), ", ".join(sorted(found.keys() ^ reference.keys()))
    differences = {
        name: _nan_first(float((found[name].double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)))
        for name, b in reference.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], worst
