"""The trainer's memory on one rank, part by part, for every pipeline stage; the fullest stage decides.

Weights, gradients and optimizer state exist all the time; what the optimizer keeps in host memory does not count.
Beyond them, the peak is the largest of three moments: the head (all activations, plus the logits of a chunk), the
backward pass of a layer (all activations, plus the gradients inside it), and the optimizer's step.

The activations of a packed micro-batch sum the tensors that a layer saves, so they can be compared with the code. There
are two kinds of layers: Transformer Engine's (`te`: norm and matrix product are one module, attention is fused), and
ours on torch (`local`: the norm saves an fp32 copy and the normalised values, the output of packed attention is
concatenated once more). `t` is the number of tokens on a rank, micro_batch_tokens / context_parallel; `ts` is its share
under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.assumptions import CONTEXT_BYTES, EXPERT_IMBALANCE, FRAGMENTATION, NCCL_BYTES
from megatron_dapo.planner.parameters import (
    RankParameters,
    adapter_parameters,
    count_parameters,
    rank_parameters,
    stage_sizes,
    trained_parameters,
)

Layers = Literal["te", "local"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and token counts on one rank."""

    t: int
    ts: int
    bytes: int
    hidden: int
    q: float  # query width per tensor-parallel rank
    kv: float
    heads: float
    head_dim: int
    ffn: float
    expert_ffn: float
    columns: int  # of the vocabulary
    linear_bytes: int  # of a value that a linear layer saves: 1 in fp8

    @classmethod
    def of(cls, shape: ModelShape, policy: PolicyConfig) -> Sizes:
        tp = policy.tensor_parallel
        t = -(-policy.micro_batch_tokens // policy.context_parallel)
        return cls(
            t=t,
            ts=-(-t // tp) if policy.uses_sequence_parallel else t,
            bytes=2 if policy.precision == "bf16" else 4,
            hidden=shape.hidden,
            q=shape.heads * shape.head_dim / tp,
            kv=max(1.0, shape.kv_heads / tp) * shape.head_dim,
            heads=shape.heads / tp,
            head_dim=shape.head_dim,
            ffn=shape.ffn_hidden / tp,
            expert_ffn=shape.expert_ffn_hidden / policy.expert_tensor_parallel,
            columns=-(-shape.vocab // tp),
            linear_bytes=1 if policy.fp8.recipe != "none" else 2 if policy.precision == "bf16" else 4,
        )


def layer_saved(shape: ModelShape, policy: PolicyConfig, layers: Layers) -> dict[str, float]:
    """Bytes that one layer saves for the backward pass of one micro-batch, by module, without full recomputation."""
    s = Sizes.of(shape, policy)
    saved = {
        "norms": 2 * s.ts * s.hidden * (s.bytes + s.linear_bytes),  # input and output of each
        "attention": _mixers(shape, policy, s, layers),
        "mlp": _mean(shape, _experts(shape, policy, s), s.t * s.ffn * (2 * s.bytes + s.linear_bytes)),
    }
    for part, size in _recomputed(shape, policy, layers):
        saved[part] -= size
    return saved


def _mean(shape: ModelShape, moe: float, dense: float = 0.0) -> float:
    """Of a value of all layers, from that of a layer with experts and of one without."""
    return (shape.moe_layers * moe + (shape.layers - shape.moe_layers) * dense) / shape.layers


def _recomputed(shape: ModelShape, policy: PolicyConfig, layers: Layers) -> list[tuple[str, float]]:
    """(part of the layer, bytes that it does not save) of each module in selective recomputation.

    Transformer Engine's dense layers have their norms inside the linear layers: `layernorm` does not recompute them,
    and `mlp` recomputes the second one. Its MoE layers have a norm of their own before the experts.
    """
    if policy.recompute != "selective":
        return []
    s = Sizes.of(shape, policy)
    output = s.ts * s.hidden * s.linear_bytes  # of one norm
    separate_norms = 2 if layers == "local" else _mean(shape, 1.0)
    activation = _routed(shape, policy, s) * s.expert_ffn * s.linear_bytes  # fc2's input
    found = [
        ("core_attn", "attention", s.t * s.heads * 4.0),  # the statistics of its softmax
        ("layernorm", "norms", separate_norms * output),
        ("moe", "mlp", _mean(shape, _experts(shape, policy, s))),
        ("moe_act", "mlp", 0.0 if "moe" in policy.recompute_modules else _mean(shape, activation)),
        ("mlp", "mlp", _mean(shape, 0.0, s.t * s.ffn * (2 * s.bytes + s.linear_bytes))),
        ("mlp", "norms", _mean(shape, 0.0, output) if layers == "te" else 0.0),
    ]
    return [(part, size) for module, part, size in found if module in policy.recompute_modules]


def _mixers(shape: ModelShape, policy: PolicyConfig, s: Sizes, layers: Layers) -> float:
    """Attention, or the average of attention and gated DeltaNet layers. The latter save the projection, the
    convolution's input and output, the rule's output, the norm's, and its input in fp32. Gated attention also saves
    gate and output."""
    attention = _attention(s, shape.qk_norm, layers) + (2 * s.t * s.q * s.bytes if shape.attention_gate else 0)
    linear = shape.linear
    if linear is None:
        return attention
    channels, values = sum(linear.parts[:3]), linear.parts[3]
    delta = s.t * ((sum(linear.parts) + 2 * channels + 2 * values) * s.bytes + 4 * values) / policy.tensor_parallel
    return (attention * shape.attention_layers + delta * len(linear.layers)) / shape.layers


def _attention(s: Sizes, qk_norm: bool, layers: Layers) -> float:
    """q, k, v after RoPE, the output (the input of the projection), and one fp32 statistic per head. In fp8 the
    projection saves an input of its own."""
    saved = s.t * (2 * s.q + 2 * s.kv) * s.bytes + s.t * s.heads * 4
    if s.linear_bytes != s.bytes:
        saved += s.t * s.q * s.linear_bytes
    if layers == "local":
        # v is a view that keeps the whole q, k, v product in memory; the outputs of the sequences are concatenated once
        # more. All layers share one RoPE table.
        saved += s.t * (2 * s.q + s.kv) * s.bytes
    if qk_norm:
        # The input of the norm; for k it is part of the product above where that is kept. RoPE does not save its input.
        saved += s.t * (s.q + (s.kv if layers == "te" else 0)) * s.bytes
    return saved


def _routed(shape: ModelShape, policy: PolicyConfig, s: Sizes) -> float:
    """Copies of tokens that the fullest rank's experts get. Ranks that share an expert gather each other's tokens."""
    return s.ts * shape.experts_per_token * EXPERT_IMBALANCE * policy.expert_tensor_parallel


def _experts(shape: ModelShape, policy: PolicyConfig, s: Sizes) -> float:
    """For each of `experts_per_token` copies of a token: fc1's input and output, fc2's input; fp32 router scores.
    The shared expert is like a dense MLP."""
    each = (s.hidden + s.expert_ffn) * s.linear_bytes + 2 * s.expert_ffn * s.bytes
    shared = s.t * shape.shared_ffn_hidden / policy.tensor_parallel * (2 * s.bytes + s.linear_bytes)
    return _routed(shape, policy, s) * each + s.ts * shape.experts * 4 * 2 + shared


def layer_work(shape: ModelShape, policy: PolicyConfig) -> float:
    """Gradients and gathered activations during the backward pass of one layer."""
    s = Sizes.of(shape, policy)
    experts = _routed(shape, policy, s) * (3 * s.expert_ffn + 2 * s.hidden) if shape.is_moe else 0.0
    inner = max(experts, s.t * 3 * s.ffn if shape.moe_layers < shape.layers else 0.0)
    return (inner + 2 * s.t * s.hidden) * s.bytes


def in_flight(policy: PolicyConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at the peak, in units of all layers of the stage."""
    pp, vpp = policy.pipeline_parallel, policy.virtual_pipeline
    if vpp == 1:
        return float(min(pp - stage, micro_batches))
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(chunks, micro_batches * vpp) / vpp


@dataclass(frozen=True, slots=True)
class Head:
    """Bytes of the output layer on the last stage. See policy/head/fused.py."""

    saved: float  # the scored hidden states, from forward to backward
    work: float  # logits of a chunk and gradients, in the backward pass
    kept_gradient: float  # a tied weight's gradient is kept until the embedding's backward pass


def head_memory(shape: ModelShape, policy: PolicyConfig) -> Head:
    s = Sizes.of(shape, policy)
    if shape.head == "value":  # hidden states in fp32, and their gradient
        return Head(saved=s.t * s.hidden * (s.bytes + 4), work=s.t * s.hidden * (s.bytes + 4), kept_gradient=0.0)
    chunk = min(policy.head_chunk(shape.vocab), s.t)
    table = s.columns * s.hidden
    tied_here = shape.tied_embeddings and policy.pipeline_parallel == 1
    # The one-pass head needs one buffer of logits, in which their gradient replaces them; the gradient of the hidden
    # states; and, unless the weight is tied, a placeholder for the weight's gradient.
    placeholder = 0 if tied_here else table * s.bytes
    return Head(
        saved=s.t * s.hidden * s.bytes,
        work=chunk * s.columns * s.bytes + placeholder + s.t * s.hidden * s.bytes,
        kept_gradient=table * s.bytes if tied_here else 0.0,
    )


STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one rank of pipeline stage `stage`."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved by the layers, for all micro-batches in flight
    layer: float  # recomputed layer and its gradients
    head: float
    step: float  # temporaries of the optimizer's step
    libraries: float  # CUDA, NCCL
    fragmentation: float = FRAGMENTATION
    buffers: float = 0.0  # of weight sync, which a sender keeps between updates
    other: float = 0.0  # static parts of the other model, critic or policy, unless they take turns

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def passes(self) -> float:
        """Beyond the static parts, at the peak of forward and backward. The head and a layer never run together."""
        return self.activations + max(self.layer, self.head)

    @property
    def allocated(self) -> float:
        """The prediction for torch.cuda.max_memory_allocated."""
        return self.static + self.buffers + self.other + max(self.passes, self.step)

    @property
    def reserve(self) -> float:
        return self.libraries + self.fragmentation * max(self.passes, self.step)

    @property
    def total(self) -> float:
        return self.allocated + self.reserve

    @property
    def parts(self) -> dict[str, float]:
        """Adds up to `total`. Of head and layer, only the larger is part of the peak."""
        working = ("head", self.head) if self.head >= self.layer else ("layer", self.layer)
        if self.step > self.passes:
            moment = {"optimizer step": self.step}
        else:
            moment = {"activations": self.activations, working[0]: working[1]}
        static = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        kept = {"weight sync": self.buffers, "other model": self.other}
        return {**static, **moment, **{part: size for part, size in kept.items() if size}, "reserve": self.reserve}


def stage_memory(
    shape: ModelShape, policy: PolicyConfig, world: int, micro_batches: int, stage: int, layers: Layers = "te"
) -> TrainerMemory:
    """Memory of one rank of `stage` when `world` ranks train with at most `micro_batches` per update."""
    held, trained = rank_parameters(shape, policy, stage).total, trained_parameters(shape, policy, stage)
    if policy.lora.rank:  # on torch layers; the base has neither gradients nor optimizer state
        held, layers = held + adapter_parameters(shape, policy, stage).total, "local"
    size = 2 if policy.precision == "bf16" else 4
    optimizer, step = _optimizer(trained, policy, world, fused=layers == "te")
    last = stage == policy.pipeline_parallel - 1
    activations, layer = _passes(shape, policy, stage, micro_batches, layers)
    head = head_memory(shape, policy)
    return TrainerMemory(
        stage=stage,
        weights=size * held + _fp8_copies(shape, policy, stage),
        gradients=(4 if policy.gradient_reduction == "fp32" else 2) * trained.total,
        optimizer=optimizer,
        activations=activations + (head.saved if last else 0.0),
        layer=layer + (head.kept_gradient if last else 0.0),
        head=head.work if last else 0.0,
        step=step,
        libraries=library_bytes(world),
    )


def trainer_memory(
    shape: ModelShape, policy: PolicyConfig, world: int, micro_batches: int, layers: Layers = "te"
) -> TrainerMemory:
    """The fullest stage's memory. Of the stages in the middle, the second is the largest."""
    stages = sorted({0, min(1, policy.pipeline_parallel - 1), policy.pipeline_parallel - 1})
    memories = [stage_memory(shape, policy, world, micro_batches, stage, layers) for stage in stages]
    return max(memories, key=lambda memory: memory.total)


def library_bytes(world: int) -> float:
    """Of CUDA and NCCL. A trainer that shares its GPU with an engine cannot offload them."""
    return CONTEXT_BYTES + (NCCL_BYTES if world > 1 else 0.0)


def _fp8_copies(shape: ModelShape, policy: PolicyConfig, stage: int) -> float:
    """Transformer Engine keeps each weight matrix of the layers in fp8, once as it is and once transposed."""
    if policy.fp8.recipe == "none":
        return 0.0
    matrices = count_parameters(shape)
    layers = stage_sizes(shape, policy)[stage] / shape.layers
    parts = policy.expert_parallel * policy.expert_tensor_parallel
    return 2 * layers * (matrices.divided / policy.tensor_parallel + matrices.experts / parts)


def _optimizer(held: RankParameters, policy: PolicyConfig, world: int, fused: bool) -> tuple[float, float]:
    """Bytes of optimizer state on the GPU (main weights in bf16 training, two Adam moments), and of temporaries in a
    step."""
    stage_ranks = world // policy.pipeline_parallel
    dense, experts = float(held.dense), float(held.experts)
    if policy.distributed_optimizer:
        dense /= stage_ranks // policy.tensor_parallel
        experts /= stage_ranks // (policy.expert_parallel * policy.expert_tensor_parallel)
    mine, options = dense + experts, policy.optimizer
    # torch's AdamW without a fused kernel holds the root of the second moment of all parameters.
    step = 0.0 if fused or options.fused is not False else 4 * mine
    if policy.gradient_reduction == "bf16" and not options.precision_aware:
        step += 4 * mine  # the step's fp32 copy of the gradients
    return _state_bytes(policy) * mine * (1 - options.cpu_offload), step


def _state_bytes(policy: PolicyConfig) -> int:
    """Per parameter: main weights (in bf16 training) and Adam's two moments."""
    options = policy.optimizer
    if not options.precision_aware or options.cpu_offload:
        return 12 if policy.precision == "bf16" else 8
    types = (options.main_params_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype)
    return sum(STATE_BYTES[name] for name in types)


def _passes(
    shape: ModelShape, policy: PolicyConfig, stage: int, micro_batches: int, layers: Layers
) -> tuple[float, float]:
    """Saved activations of all micro-batches in flight, and the working space of one layer."""
    count = stage_sizes(shape, policy)[stage]
    flying = in_flight(policy, stage, micro_batches)
    one, work = sum(layer_saved(shape, policy, layers).values()), layer_work(shape, policy)
    if policy.recompute != "full":
        return flying * count * one, work + sum(size for _, size in _recomputed(shape, policy, layers))
    again = count if policy.recompute_layers is None else min(count, policy.recompute_layers * policy.virtual_pipeline)
    s = Sizes.of(shape, policy)
    layer_input = s.ts * s.hidden * s.bytes
    return flying * (again * layer_input + (count - again) * one), one + work
