"""Seconds of the trainer's phases: arithmetic at the given MFU, plus the cost of the layout.

The MFU is that of one GPU's kernels on long packed sequences. Shorter products, small expert matrices, pipeline
bubbles, tensor-parallel collectives, the experts' all-to-all and exposed context- and data-parallel traffic are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.parameters import Parameters, count_parameters, rank_parameters
from megatron_dapo.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Split:
    """A mini-batch, split over data-parallel ranks."""

    data_parallel: int
    tokens: float  # on the busiest rank (all its context-parallel ranks together)
    responses: float  # response tokens among them
    micro_batches: int

    @property
    def micro_batch(self) -> float:
        """Tokens of a micro-batch, on average."""
        return self.tokens / self.micro_batches


def split_update(policy: PolicyConfig, work: Workload, world: int) -> Split:
    dp = world // policy.model_ranks
    samples = math.ceil(work.samples_per_update / dp)
    # The rank with the longest response has at least its length; otherwise the balance is nearly perfect.
    tokens = max(samples * work.mean_length * (assumptions.BALANCE if dp > 1 else 1.0), work.longest if dp > 1 else 0)
    micro_batches = max(1, math.ceil(tokens / (policy.micro_batch_tokens * assumptions.FILL)))
    if policy.virtual_pipeline > 1:
        micro_batches = math.ceil(micro_batches / policy.pipeline_parallel) * policy.pipeline_parallel
    return Split(dp, tokens, tokens * work.mean_response / work.mean_length, micro_batches)


def most_micro_batches(policy: PolicyConfig, work: Workload, world: int) -> int:
    """Micro-batches per update when every sample has the maximum length: the worst case for memory."""
    samples = math.ceil(work.samples_per_update / (world // policy.model_ranks))
    return math.ceil(samples / max(1, policy.micro_batch_tokens // work.longest))


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one pass over a mini-batch."""

    arithmetic: float
    bubble: float
    tensor: float
    context: float
    expert: float  # all-to-all, and the fixed cost of MoE layers
    data: float

    @property
    def total(self) -> float:
        return self.arithmetic + self.bubble + self.tensor + self.context + self.expert + self.data


def attention_flops(shape: ModelShape, length: float) -> float:
    """Forward FLOPs per token in the causal attention of all layers, over half of `length`. Gated DeltaNet layers
    update and read a state instead."""
    linear = shape.linear
    states = len(shape.linear_layers) * 6 * linear.value_heads * linear.key_dim * linear.value_dim if linear else 0
    return states + shape.attention_layers * 2 * shape.heads * shape.head_dim * length


def expert_flops(shape: ModelShape) -> float:
    """Forward FLOPs per token in the experts that it is routed to."""
    return 2 * shape.layers * shape.experts_per_token * 3 * shape.hidden * shape.expert_ffn_hidden


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Forward seconds per token in all layers."""

    attention: float
    projections: float  # of attention, and the router
    mlp: float  # or the experts


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the backward pass computes again, as a share of the forward pass. Norms and activation functions (the
    modules layernorm and moe_act) cost next to nothing."""

    attention: float = 0.0
    projections: float = 0.0
    mlp: float = 0.0

    @classmethod
    def of(cls, policy: PolicyConfig, layers: int) -> Recomputed:
        if policy.recompute == "none":
            return cls()
        if policy.recompute == "full":
            chunk = layers / policy.pipeline_parallel / policy.virtual_pipeline
            share = min(1.0, (policy.recompute_layers or chunk) / chunk)
            return cls(share, share, share)
        modules = policy.recompute_modules
        return cls(attention=float("core_attn" in modules), mlp=float("mlp" in modules or "moe" in modules))

    def seconds(self, forward: LayerTime) -> float:
        return (
            self.attention * forward.attention + self.projections * forward.projections + self.mlp * forward.mlp
        )  # fmt: skip


def layer_time(
    shape: ModelShape, parameters: Parameters, policy: PolicyConfig, work: Workload, split: Split, rate: float
) -> LayerTime:
    """At `rate` FLOP/s in long products."""
    cp = policy.context_parallel
    tokens = split.micro_batch / cp
    product_speed = rate * tokens / (tokens + assumptions.HALF_SPEED_TOKENS)
    # Context parallelism gives each rank two chunks of every sequence, and attention works on chunks.
    chunk = work.mean_length / (2 * cp) if cp > 1 else work.mean_length
    attention_speed = rate * chunk / (chunk + assumptions.HALF_SPEED_CHUNK)
    mlp_speed, flops = product_speed, 6.0 * shape.layers * shape.hidden * shape.ffn_hidden
    if shape.is_moe:
        uneven = assumptions.EXPERT_WAIT if policy.expert_parallel > 1 else 1.0
        mlp_speed, flops = product_speed * assumptions.EXPERT_MFU_SHARE / uneven, expert_flops(shape)
    return LayerTime(
        attention=attention_flops(shape, work.mean_length) / attention_speed,
        projections=(2 * parameters.layer_matrices_active - flops) / product_speed,
        mlp=flops / mlp_speed,
    )


def pass_time(
    shape: ModelShape, policy: PolicyConfig, cluster: Cluster, work: Workload, world: int, mfu: float, train: bool
) -> PhaseTime:
    """One mini-batch: forward and backward when `train`, else forward only (log-probs)."""
    parameters, split = count_parameters(shape), split_update(policy, work, world)
    tp, pp, cp, vpp = (
        policy.tensor_parallel, policy.pipeline_parallel, policy.context_parallel, policy.virtual_pipeline,
    )  # fmt: skip
    again = Recomputed.of(policy, shape.layers) if train else Recomputed()
    # The head computes its logits again in the backward pass.
    layer_passes, head_passes = (3, 4) if train else (1, 1)
    rate = cluster.gpu.tflops * 1e12 * mfu * tp * cp
    forward = layer_time(shape, parameters, policy, work, split, rate)
    each = forward.attention + forward.projections + forward.mlp
    layers = split.tokens * (each * layer_passes + again.seconds(forward))
    columns = 1 if shape.head == "value" else shape.vocab
    head = split.responses * 2 * shape.hidden * columns * head_passes / rate
    slowest = layers / pp + head  # the last stage also has the head
    traffic = _Traffic(shape, policy, cluster, split)
    tensor, context, expert = traffic.tensor(train, again), traffic.context(train, again), traffic.expert(train, again)
    per_stage = slowest + tensor + context + expert
    bubble = per_stage * (pp - 1) / (vpp * split.micro_batches)
    last_backward = per_stage * 2 / 3 / split.micro_batches
    data = _data_parallel(shape, policy, cluster, world, last_backward) if train else 0.0
    return PhaseTime(slowest, bubble, tensor, context, expert, data)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Seconds that one stage spends on collectives inside its layers, for all tokens of one mini-batch."""

    shape: ModelShape
    policy: PolicyConfig
    cluster: Cluster
    split: Split

    @property
    def layers(self) -> float:
        return self.shape.layers / self.policy.pipeline_parallel

    def _seconds(self, bytes_: float, span: int) -> float:
        return self.layers * bytes_ / (self.cluster.wire(span) * assumptions.WIRE_SHARE)

    def tensor(self, train: bool, again: Recomputed) -> float:
        """Two gathers and two scatters of the activations forward, half of them around attention; six collectives
        backward."""
        tp, cp = self.policy.tensor_parallel, self.policy.context_parallel
        times = 4 + (6 if train else 0) + 2 * again.projections + 2 * again.mlp
        return self._seconds(times * self.split.tokens / cp * self.shape.hidden * 2 * (tp - 1) / tp, tp)

    def context(self, train: bool, again: Recomputed) -> float:
        """Keys and values pass around the ring forward; they and their gradients backward."""
        tp, cp = self.policy.tensor_parallel, self.policy.context_parallel
        times = 1 + (2 if train else 0) + again.attention
        width = 2 * self.shape.kv_heads * self.shape.head_dim / tp
        exposed = assumptions.EXPOSED_CONTEXT
        return exposed * self._seconds(times * self.split.tokens / cp * width * 2 * (cp - 1), tp * cp)

    def expert(self, train: bool, again: Recomputed) -> float:
        """Tokens are sent to their experts and back, inside the node and between nodes at the same time."""
        if not self.shape.is_moe:
            return 0.0
        passes = 1 + (2 if train else 0) + again.mlp
        fixed = passes * self.layers * self.split.micro_batches * assumptions.MOE_LAYER_SECONDS
        ep = self.policy.expert_parallel
        if ep == 1:
            return fixed
        times = 2 + (2 if train else 0) + 2 * again.mlp
        routed = self.split.tokens / self.policy.context_parallel / self.policy.tensor_parallel
        sent = times * routed * self.shape.experts_per_token * self.shape.hidden * 2 * assumptions.EXPERT_WAIT
        near = min(ep, self.cluster.gpus_per_node)
        seconds = self._seconds(sent * (near - 1) / ep, near)
        if ep > near:
            seconds = max(seconds, self._seconds(sent * (ep - near) / ep, ep))
        return fixed + seconds


def _data_parallel(
    shape: ModelShape, policy: PolicyConfig, cluster: Cluster, world: int, last_backward: float
) -> float:
    """Gradients are reduced during the backward pass of the last micro-batch; then new weights are gathered."""
    stage_ranks = world // policy.pipeline_parallel
    ranks = stage_ranks // policy.tensor_parallel
    held = rank_parameters(shape, policy, 0)
    wire = cluster.wire(stage_ranks) * assumptions.WIRE_SHARE
    share = (ranks - 1) / ranks
    reduce = (2 if policy.gradient_reduction == "bf16" else 4) * held.total * share / wire
    gather = 2 * held.total * share / wire
    if not policy.distributed_optimizer:  # one all-reduce instead of scatter and gather
        reduce, gather = 2 * reduce, 0.0
    adam = 28 * held.total / (ranks if policy.distributed_optimizer else 1) / (cluster.gpu.bandwidth * 1e12)
    return max(0.0, reduce - last_backward) + gather + adam
