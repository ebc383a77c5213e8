"""Seconds of the trainer's phases: arithmetic at the given MFU, plus the cost of the layout.

The MFU is that of one GPU's matrix products when they are very wide and long. Narrow and short products, attention,
small expert matrices, pipeline bubbles, the experts' all-to-all, and the exposed part of tensor-, context- and
data-parallel traffic are added. The slowest pipeline stage decides. With LoRA the base has no weight gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.hardware import Cluster, Gpu
from megatron_dapo.planner.parameters import count_parameters, stage_sizes, trained_parameters
from megatron_dapo.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Split:
    """A mini-batch, split over data-parallel ranks."""

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
    tokens = float(samples * work.mean_length)
    if work.lengths.constant:
        micro_batches = math.ceil(samples / max(1, policy.micro_batch_tokens // work.mean_length))
    else:
        if dp > 1:  # the rank with the longest response has at least its length
            tokens = max(tokens * assumptions.BALANCE, work.longest)
        micro_batches = max(1, math.ceil(tokens / (policy.micro_batch_tokens * assumptions.FILL)))
    if policy.virtual_pipeline > 1:
        micro_batches = math.ceil(micro_batches / policy.pipeline_parallel) * policy.pipeline_parallel
    return Split(tokens, tokens * work.mean_response / work.mean_length, micro_batches)


def most_micro_batches(policy: PolicyConfig, work: Workload, world: int) -> int:
    """Micro-batches per update when every sample has the maximum length: the worst case for memory."""
    samples = math.ceil(work.samples_per_update / (world // policy.model_ranks))
    return math.ceil(samples / max(1, policy.micro_batch_tokens // work.longest))


ADAM_BYTES = 28  # of memory traffic per parameter: gradient, main weight and two moments, read and written


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one pass over a mini-batch."""

    arithmetic: float
    bubble: float  # and the exchange between pipeline stages
    tensor: float
    context: float
    expert: float  # all-to-all, and the fixed cost of MoE layers
    data: float  # exposed reduction and gather, and the optimizer's step

    @property
    def total(self) -> float:
        return self.arithmetic + self.bubble + self.tensor + self.context + self.expert + self.data


def attention_flops(shape: ModelShape, length: float) -> float:
    """Forward FLOPs per token in the causal attention of all layers, over half of `length`. Gated DeltaNet layers
    update and read a state instead."""
    linear = shape.linear
    states = len(shape.linear_layers) * 6 * linear.value_heads * linear.key_dim * linear.value_dim if linear else 0
    return states + shape.attention_layers * 2 * shape.heads * shape.head_dim * length


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
        return self.attention * forward.attention + self.projections * forward.projections + self.mlp * forward.mlp


def layer_time(
    shape: ModelShape, policy: PolicyConfig, work: Workload, split: Split, rate: float, gpu: Gpu
) -> LayerTime:
    """At `rate` FLOP/s in very wide and long products."""
    cp, h = policy.context_parallel, shape.hidden
    tokens = split.micro_batch / cp
    rate_here = rate * tokens / (tokens + assumptions.HALF_SPEED_TOKENS)
    # Context parallelism gives each rank two chunks of every sequence, and attention works on chunks.
    chunk = work.mean_length / (2 * cp) if cp > 1 else work.mean_length
    attention_speed = rate * assumptions.ATTENTION_MFU_SHARE * chunk / (chunk + assumptions.HALF_SPEED_CHUNK)
    uneven = assumptions.EXPERT_WAIT if policy.expert_parallel > 1 else 1.0
    parameters = count_parameters(shape)
    dense, routed = 2.0 * parameters.mlp, 2.0 * parameters.routed
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = 2 * parameters.layer_matrices_active - dense - routed
    fp8 = policy.fp8.recipe != "none"
    traffic = gpu.traffic_cost if fp8 else None
    projections = products / rate_here / width_share(h, gpu)
    projections *= _fp8_share(traffic, 3 * h + 2 * q + 2 * kv, 2 * h * (q + kv))
    mlp = 0.0
    for flops, ffn in ((dense, shape.ffn_hidden), (routed * uneven, shape.expert_ffn_hidden)):
        if flops:
            speed = rate_here * width_share(min(h, ffn), gpu)
            mlp += flops / speed * _fp8_share(traffic, 2 * h + 3 * ffn, 3 * h * ffn)
    return LayerTime(attention_flops(shape, work.attended_length) / attention_speed, projections, mlp)


def width_share(width: float, gpu: Gpu) -> float:
    """Of the speed of very wide products."""
    return width / (width + assumptions.HALF_SPEED_WIDTH * gpu.traffic_cost)


def _fp8_share(traffic_cost: float | None, converted: int, weights: int) -> float:
    """Of the seconds of products in bf16. `converted`: inputs, and gradients of outputs, of one token."""
    if traffic_cost is None:  # not in fp8
        return 1.0
    return 1 / assumptions.FP8_SPEED + assumptions.FP8_CONVERSION * traffic_cost * converted / weights


def pass_time(
    shape: ModelShape, policy: PolicyConfig, cluster: Cluster, work: Workload, world: int, mfu: float, train: bool
) -> PhaseTime:
    """One mini-batch: forward and backward when `train`, else forward only (log-probs)."""
    split, pp = split_update(policy, work, world), policy.pipeline_parallel
    again = Recomputed.of(policy, shape.layers) if train else Recomputed()
    frozen = train and policy.lora.rank > 0
    # Backward: gradients of inputs and weights, which take as long as the forward pass each. The head's loss needs no
    # second forward pass. Attention has no weights.
    products = (2 if frozen else 3) if train else 1
    rate = cluster.gpu.tflops * 1e12 * mfu * policy.tensor_parallel * policy.context_parallel
    forward = layer_time(shape, policy, work, split, rate, cluster.gpu)
    linear = forward.projections + forward.mlp
    per_token = linear * products + forward.attention * (3 if train else 1) + again.seconds(forward)
    columns = 1 if shape.head == "value" else shape.vocab
    head = split.responses * 2 * shape.hidden * columns * products / (rate * width_share(shape.hidden, cluster.gpu))
    traffic = _Traffic(shape, policy, cluster, split)
    hideable = split.tokens / shape.layers * linear  # seconds of one layer's forward products
    tensor = traffic.tensor(train, again, hideable, frozen)
    context, expert = traffic.context(train, again), traffic.expert(train, again)
    layer = split.tokens * per_token / shape.layers + tensor + context + expert
    sizes = stage_sizes(shape, policy)
    last, most = sizes[-1], max(sizes)
    count = last if last * layer + head > most * layer else most
    slowest = count * layer + (head if count == last else 0.0)
    bubble = slowest * (pp - 1) / (policy.virtual_pipeline * split.micro_batches)
    data = _update(shape, policy, cluster, world, slowest / split.micro_batches) if train else 0.0
    arithmetic = slowest - count * (tensor + context + expert)
    pipeline = bubble + traffic.pipeline(train, world)
    return PhaseTime(arithmetic, pipeline, count * tensor, count * context, count * expert, data)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Seconds that one layer, or a pipeline stage, spends on communication, for all tokens of one mini-batch."""

    shape: ModelShape
    policy: PolicyConfig
    cluster: Cluster
    split: Split

    def _seconds(self, bytes_: float, span: int) -> float:
        return bytes_ / (self.cluster.wire(span) * assumptions.WIRE_SHARE)

    def tensor(self, train: bool, again: Recomputed, products: float, frozen: bool) -> float:
        """What is not hidden of the gathers and scatters of activations: two each forward (half of them around
        attention) and in a recomputation. Backward, the gradient of a row-parallel layer is gathered first; the gather
        of inputs and the scatter of input gradients, two each, run beside the products of the gradients.

        With `tp_comm_overlap` a product starts with the part of the tokens that is here: 1/TP of the exchange
        remains, unless the exchange takes longer than the `products` of a forward pass, in seconds."""
        tp, cp = self.policy.tensor_parallel, self.policy.context_parallel
        once = self._seconds(self.split.tokens / cp * self.shape.hidden * 2 * (tp - 1) / tp, tp)
        alone = once * (4 + (2 if train else 0) + 2 * again.projections + 2 * again.mlp)
        hidden = 4 * once if train else 0.0
        if self.policy.tp_comm_overlap:
            passes = 1 + (1 if train else 0) + (again.projections + again.mlp) / 2
            alone = alone / tp + max(0.0, alone * (1 - 1 / tp) - passes * products)
        return alone + max(0.0, hidden - (1 if frozen else 2) * products)

    def pipeline(self, train: bool, world: int) -> float:
        """Activations go to the next stage, and their gradients back; every chunk of a stage waits for them."""
        policy = self.policy
        if policy.pipeline_parallel == 1:
            return 0.0
        parts = policy.context_parallel * (policy.tensor_parallel if policy.uses_sequence_parallel else 1)
        sent = self.split.tokens / parts * self.shape.hidden * 2 * policy.virtual_pipeline
        return (2 if train else 1) * self._seconds(sent, world)

    def context(self, train: bool, again: Recomputed) -> float:
        """Keys and values pass around the ring forward; they and their gradients backward."""
        tp, cp = self.policy.tensor_parallel, self.policy.context_parallel
        times = 1 + (2 if train else 0) + again.attention
        width = 2 * self.shape.kv_heads * self.shape.head_dim / tp
        exposed = assumptions.EXPOSED_CONTEXT
        return exposed * self._seconds(times * self.split.tokens / cp * width * 2 * (cp - 1), tp * cp)

    def expert(self, train: bool, again: Recomputed) -> float:
        """Tokens are ordered by their experts, sent to them and back, inside the node and between nodes at the same
        time. The flex dispatcher sends a token once to each other node."""
        if not self.shape.is_moe:
            return 0.0
        passes = 1 + (2 if train else 0) + again.mlp
        moe = self.shape.moe_layers / self.shape.layers
        fixed = passes * moe * self.split.micro_batches * assumptions.MOE_LAYER_SECONDS
        ep, copies = self.policy.expert_parallel, self.shape.experts_per_token
        times = 2 + (2 if train else 0) + 2 * again.mlp  # to the experts and back
        routed = self.split.tokens / self.policy.context_parallel / self.policy.tensor_parallel
        sent = times * routed * moe * self.shape.hidden * 2 * assumptions.EXPERT_WAIT  # one copy of every token
        moved = sent * copies * assumptions.PERMUTATION_PASSES
        fixed += moved / (self.cluster.gpu.bandwidth * 1e12 * assumptions.READ_SHARE)
        if ep == 1:
            return fixed
        near = min(ep, self.cluster.gpus_per_node)
        seconds = self._seconds(sent * copies * (near - 1) / ep, near)
        if ep > near:
            far = copies * (ep - near) / ep
            if self.policy.moe.dispatcher == "flex":
                far = (1 - near / ep) * ep / near * (1 - (1 - near / ep) ** copies)
            seconds = max(seconds, self._seconds(sent * far, ep))
        return fixed + seconds


def _update(shape: ModelShape, policy: PolicyConfig, cluster: Cluster, world: int, micro_batch: float) -> float:
    """Gradients are reduced during the backward pass of the last micro-batch, which takes `micro_batch` seconds with
    its forward pass; after the optimizer's step new weights are gathered during the forward pass of the next update."""
    ranks = world // policy.pipeline_parallel // policy.tensor_parallel
    held = trained_parameters(shape, policy, 0)
    wire = cluster.wire_of_group(ranks, policy.tensor_parallel) * assumptions.WIRE_SHARE
    share = (ranks - 1) / ranks
    reduce = (2 if policy.gradient_reduction == "bf16" else 4) * held.total * share / wire
    gather = 2 * held.total * share / wire
    if not policy.distributed_optimizer:  # one all-reduce instead of scatter and gather
        reduce, gather = 2 * reduce, 0.0
    if policy.overlap_grad_reduce is not False:
        reduce = max(0.0, reduce - micro_batch * 2 / 3)
    if policy.overlap_param_gather is not False:
        gather = max(0.0, gather - micro_batch / 3)
    mine = held.total / (ranks if policy.distributed_optimizer else 1)
    offloaded = policy.optimizer.cpu_offload
    on_gpu = (1 - offloaded) * mine * ADAM_BYTES / (cluster.gpu.bandwidth * 1e12)
    on_host = offloaded * mine * ADAM_BYTES / assumptions.HOST_ADAM_BYTES_PER_SECOND
    copied = offloaded * mine * (4 + 2) / assumptions.HOST_BYTES_PER_SECOND  # gradients there, weights back
    return reduce + gather + on_gpu + on_host + copied
