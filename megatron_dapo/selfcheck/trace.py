"""A trace: losses, gradient norms, gradients and weights of a few updates, and the difference of two traces.

Gradients and weights are gathered into full HF-named tensors, so two layouts are compared tensor by tensor. Each may
differ by a fixed tolerance, or by NOISE_FACTOR × the noise of this tensor: what the single process differs from itself
when it splits its micro-batches otherwise and, in bf16 and fp8, when it computes in fp32. The factor: a layout and its
reference each have that error against fp32, and tensor parallelism rounds partial sums once more.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.families.tensors import OUTPUT
from megatron_dapo.errors import UserError
from megatron_dapo.policy.head.fused import has_triton
from megatron_dapo.policy.megatron.options import adam_provider, torch_layers
from megatron_dapo.policy.megatron.runtime import Runtime, initialize
from megatron_dapo.policy.model.delta_rule import has_fla
from megatron_dapo.policy.model.local_spec import CoreAttention, can_attend_packed
from megatron_dapo.policy.model.lora import load_adapters
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.selfcheck.cases import Case
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_adapters, random_experts, random_hf_weights
from megatron_dapo.weights.model_weights import hf_tensors

TOKEN_TERM = 0.1  # what a token adds to a loss, about; such terms may cancel, and rounding is relative to them
AFTER_ADAM_FACTOR = 10  # Adam divides by the gradient's size: rounding in a tiny gradient is amplified
NOISE_FACTOR = 3.0
LARGEST_LIMIT = 0.5  # where the noise is larger, the comparison would not see a missing factor of two
Measured = Mapping[str, Mapping[str, float]]  # kind of number, tensor: relative difference


@dataclass(slots=True)
class Trace:
    """What a few updates produced. Gradients and weights are full HF-named tensors, on rank 0 only."""

    losses: list[float] = field(default_factory=list)  # of a model with experts also their load
    loss_terms: float = TOKEN_TERM  # the size of the terms of a loss
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)  # of all ranks


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
    worst: str  # the number that is nearest to its limit, or furthest beyond it
    worst_limit: float
    share: float  # of that limit; NaN counts as infinite

    @property
    def ok(self) -> bool:
        return self.share <= 1


def trace_updates(rendezvous: Rendezvous | None, case: Case, updates: int) -> Trace:
    """Runs the updates in this rank; rank 0 gets the gathered tensors, the others none.

    The ranks stay connected: the next layout needs only other model-parallel groups.
    """
    with torch_layers() if case.layers == "torch" else nullcontext():
        unknown = 0.0 if "fixed_experts" in case.options else 0.2
        return trace_config(rendezvous, case.config, case.shape, updates, unknown_experts=unknown)


def trace_config(
    rendezvous: Rendezvous | None, config: Config, shape: ModelShape, updates: int, *, unknown_experts: float = 0.2
) -> Trace:
    """As `trace_updates`, with any configuration and any small model."""
    torch.set_num_threads(1)
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine multiplies fp32 matrices in TF32
    runtime = initialize(config.policy, seed=1, rendezvous=rendezvous)
    policy = Policy(config, shape, runtime)
    weights = random_hf_weights(shape, scale=min(0.1, 0.57 * shape.hidden**-0.5))
    policy.load_hf({name: weight.bfloat16().float() for name, weight in weights.items()})  # the same in bf16 and fp32
    if policy.trains_adapters:  # B is 0 at the start of a run, which makes the gradient of A 0
        load_adapters(policy.model, random_adapters(policy.trained_mappings), policy.position)
        policy.optimizer.reload_model_params()
    trace = Trace()
    for update in range(updates):
        batch = awkward_batch(shape, seed=update)
        if config.algorithm.aggregation == "seq-mean-token-sum":
            trace.loss_terms = TOKEN_TERM * float(batch.response_lengths.mean())
        if config.policy.routing_replay == "engine":
            batch.routed_experts = random_experts(shape, batch, update, unknown_experts)
        metrics = policy.gradients(batch)
        trace.gradients.append(gather_full(policy, runtime, gradient=True))
        metrics |= policy.step.step_optimizer()
        trace.losses += [metrics[name] for name in ("loss", "aux_loss", "expert_load_max") if name in metrics]
        trace.grad_norms.append(metrics["grad_norm"])
    trace.weights = gather_full(policy, runtime, gradient=False)
    found: list[Any] | None = [None] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(_kernels(policy), found)
    trace.kernels = sorted({kernel for kernels in found or () for kernel in kernels})
    return trace


def _kernels(policy: Policy) -> set[str]:
    """What computed this rank's part: the classes of its modules, and the kernels that they chose in the last pass."""
    modules = [module for chunk in policy.model for module in chunk.modules()]
    names = {type(module).__name__ for module in modules}
    found = {name for name in names if name.endswith(("Linear", "MLP", "GatedDeltaNet"))}
    found |= {type(module.token_dispatcher).__name__ for module in modules if hasattr(module, "token_dispatcher")}
    on_cuda, config = policy.runtime.device.type == "cuda", policy.config.policy
    if any(isinstance(module, CoreAttention) for module in modules):
        probe = next(policy.model[0].parameters())
        found.add(f"attention: {'varlen' if config.context_parallel == 1 and can_attend_packed(probe) else 'sdpa'}")
    elif any("DotProductAttention" in name for name in names):
        found.add(f"attention: {_te_attention()}{' ' + (config.cp_comm_type or 'p2p') * (config.context_parallel > 1)}")
    if "GatedDeltaNet" in names:
        found.add(f"delta rule: {'fla' if on_cuda and has_fla() else 'torch'}")
    if policy.model[-1].post_process:
        found.add(f"head: {'triton' if on_cuda and has_triton() else 'torch'}")
    return found | {f"Adam: {adam_provider()}"}


def _te_attention() -> str:
    """The backend of Transformer Engine's last attention."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: dict[str, Any] = getattr(module, "_attention_backends", {})
    backends = [name for name in ("flash", "fused", "unfused") if chosen.get(f"use_{name}_attention")]
    return f"TE {backends[0]}" if backends else "TE"


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
    full: dict[str, Tensor] = {}
    error: Exception | None = None
    try:
        if everyone is not None:
            full = _full_tensors(policy, everyone)
    except UserError as found:
        error = found
    runtime.raise_together(error, "comparing replicas")  # otherwise other ranks would wait for rank 0 in the next pass
    return full


def _full_tensors(policy: Policy, everyone: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    full: dict[str, Tensor] = {}
    for name, mapping in policy.trained_mappings.items():
        shards = _one_of_each(name, everyone)
        if not shards and name == OUTPUT and policy.shape.tied_embeddings:
            continue  # one stage holds embedding and head: there is no second copy
        full |= hf_tensors(mapping, [shards[rank] for rank in sorted(shards)])
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


def measure(found: Trace, reference: Trace) -> dict[str, dict[str, float]]:
    """The relative difference of every number and tensor."""
    first, *later = [_relative(a, b) for a, b in zip(found.gradients, reference.gradients, strict=True)]
    return {
        "loss": {"": _largest_number(found.losses, reference.losses, reference.loss_terms)},
        "grad_norm": {"": _largest_number(found.grad_norms, reference.grad_norms)},
        "gradients": first,
        "later_gradients": {name: max(update.get(name, math.inf) for update in later) for name in later[0]}
        if later
        else {"": 0.0},
        "weights": _relative(found.weights, reference.weights),
    }


def compare(found: Trace, reference: Trace, tolerance: float = 1e-5, noise: Sequence[Measured] = ()) -> Difference:
    """`noise`: what equally right traces differ from the reference."""
    measured = measure(found, reference)
    share, limit, worst = max(
        (difference / limit, limit, " of ".join(filter(None, [kind.replace("_", " "), name])))
        for kind, differences in measured.items()
        for name, limit, difference in _limited(kind, differences, tolerance, noise)
    )
    at = {kind: max(differences, key=lambda name: differences[name]) for kind, differences in measured.items()}
    numbers: dict[str, Any] = {kind: measured[kind][name] for kind, name in at.items()}
    places: dict[str, Any] = {f"{kind}_at": name for kind, name in at.items() if kind not in ("loss", "grad_norm")}
    return Difference(**numbers, **places, worst=worst, worst_limit=limit, share=share)


def _limited(
    kind: str, differences: Mapping[str, float], tolerance: float, noise: Sequence[Measured]
) -> list[tuple[str, float, float]]:
    """Name, limit and difference. One number, or a tensor of few elements, may have little noise by chance: what is
    usual counts too."""
    least = tolerance * (AFTER_ADAM_FACTOR if kind in ("later_gradients", "weights") else 1)
    seen = {name: max((one[kind].get(name, 0.0) for one in noise), default=0.0) for name in differences}
    gradients = [statistics.median(one["gradients"].values()) for one in noise]
    usual = statistics.median(seen.values()) if len(seen) > 1 else max(gradients, default=0.0)
    limits = {name: min(LARGEST_LIMIT, NOISE_FACTOR * max(own, usual)) for name, own in seen.items()}
    return [(name, max(least, limits[name]), difference) for name, difference in differences.items()]


def _finite(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _largest_number(found: Sequence[float], reference: Sequence[float], at_least: float = 0.0) -> float:
    """Relative to the reference, or to `at_least` where that is larger."""
    pairs = zip(found, reference, strict=True)
    return max((_finite(abs(a - b) / max(abs(b), at_least)) for a, b in pairs), default=0.0)


def _relative(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ of every tensor; inf for one that only one side has."""
    both = {
        name: _finite(float((found[name].double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)))
        for name, b in reference.items()
        if name in found
    }
    return both | dict.fromkeys(found.keys() ^ reference.keys(), math.inf)
