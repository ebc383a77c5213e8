"""Memory of a packed micro-batch on one rank: activations saved for the backward pass, and working space.

Each number sums the tensors that the layer saves, so it can be compared with the code. There are two kinds of layers:
Transformer Engine's (`te`: norm and matrix product are one module, attention is fused), and ours on torch (`local`: the
norm saves an fp32 copy and the normalised values, the output of packed attention is concatenated once more).

`t` is the number of tokens on a rank, micro_batch_tokens / context_parallel; `ts` is its share under sequence
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.assumptions import EXPERT_IMBALANCE

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
    columns: int  # of the vocabulary

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
            kv=shape.kv_heads * shape.head_dim / tp,
            heads=shape.heads / tp,
            head_dim=shape.head_dim,
            ffn=shape.ffn_hidden / tp,
            columns=-(-shape.vocab // tp),
        )


def layer_saved(shape: ModelShape, policy: PolicyConfig, layers: Layers) -> dict[str, float]:
    """Bytes that one layer saves for the backward pass of one micro-batch, by module, without full recomputation."""
    s = Sizes.of(shape, policy)
    saved = {
        "norms": 2 * s.ts * s.hidden * 2 * s.bytes,  # input and output of each
        "attention": _attention(s, shape.qk_norm, layers),
        "mlp": _experts(shape, s) if shape.is_moe else s.t * 3 * s.ffn * s.bytes,
    }
    if policy.recompute == "selective":  # the core attention is recomputed: its statistics are not saved
        saved["attention"] -= s.t * s.heads * 4
    return saved


def _attention(s: Sizes, qk_norm: bool, layers: Layers) -> float:
    """q, k, v after RoPE, the output (the input of the projection), and one fp32 statistic per head."""
    saved = s.t * (2 * s.q + 2 * s.kv) * s.bytes + s.t * s.heads * 4
    if layers == "local":
        # v is a view that keeps the whole q, k, v product in memory; the outputs of the sequences are concatenated once
        # more. All layers share one RoPE table.
        saved += s.t * (2 * s.q + s.kv) * s.bytes
    if qk_norm:
        # The input of the norm; for k it is part of the product above where that is kept. RoPE does not save its input.
        saved += s.t * (s.q + (s.kv if layers == "te" else 0)) * s.bytes
    return saved


def _experts(shape: ModelShape, s: Sizes) -> float:
    """For each of `experts_per_token` copies of a token: fc1's input and output, fc2's input; fp32 router scores."""
    routed = s.ts * shape.experts_per_token * EXPERT_IMBALANCE
    return routed * (s.hidden + 3 * shape.expert_ffn_hidden) * s.bytes + s.ts * shape.experts * 4 * 2


def checkpoint_saved(shape: ModelShape, policy: PolicyConfig) -> float:
    """Bytes per layer under full recomputation, which saves only the layer's input."""
    s = Sizes.of(shape, policy)
    return s.ts * s.hidden * s.bytes


def layer_work(shape: ModelShape, policy: PolicyConfig) -> float:
    """Gradients and gathered activations during the backward pass of one layer."""
    s = Sizes.of(shape, policy)
    if shape.is_moe:
        routed = s.ts * shape.experts_per_token * EXPERT_IMBALANCE
        inner = routed * (3 * shape.expert_ffn_hidden + 2 * s.hidden)
    else:
        inner = s.t * 3 * s.ffn
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
