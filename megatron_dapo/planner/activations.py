"""Memory that a packed micro-batch takes on one rank: what layers save for the backward pass, and working space.

Each number is a list of the tensors that the layer really saves, so that it can be compared with the code. Two kinds
of layers: Transformer Engine's (`te`: norm and matrix product are one module, attention is fused), and ours on torch
(`local`: the norm saves its own fp32 copy and normalised values, packed attention is concatenated once more).

`t` below is the tokens of a rank: micro_batch_tokens / context_parallel; `ts` is its share under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig

Layers = Literal["te", "local"]
# A router spreads tokens unevenly: the fullest rank gets this many times the mean.
EXPERT_IMBALANCE = 1.25


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and token counts as one rank sees them."""

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
    if policy.recompute == "selective":  # the core attention runs again: its statistics are not kept
        saved["attention"] -= s.t * s.heads * 4
    return saved


def _attention(s: Sizes, qk_norm: bool, layers: Layers) -> float:
    """q, k, v after RoPE, the output (also the input of the projection), and one fp32 statistic per head."""
    saved = s.t * (2 * s.q + 2 * s.kv) * s.bytes + s.t * s.heads * 4
    if layers == "local":
        # v is a view that keeps the whole q, k, v product alive; the sequences' outputs are concatenated once more.
        # RoPE's table is one for all layers.
        saved += s.t * (2 * s.q + s.kv) * s.bytes
    if qk_norm:
        # Its input, which for k is part of the product above where that is kept. The output goes on into RoPE, which
        # keeps nothing of it.
        saved += s.t * (s.q + (s.kv if layers == "te" else 0)) * s.bytes
    return saved


def _experts(shape: ModelShape, s: Sizes) -> float:
    """Every token `experts_per_token` times: input of fc1, its output, input of fc2; fp32 router probabilities."""
    routed = s.ts * shape.experts_per_token * EXPERT_IMBALANCE
    return routed * (s.hidden + 3 * shape.expert_ffn_hidden) * s.bytes + s.ts * shape.experts * 4 * 2


def checkpoint_saved(shape: ModelShape, policy: PolicyConfig) -> float:
    """Bytes per layer under full recomputation: its input."""
    s = Sizes.of(shape, policy)
    return s.ts * s.hidden * s.bytes


def layer_work(shape: ModelShape, policy: PolicyConfig) -> float:
    """Gradients and gathered activations that exist while one layer is being differentiated."""
    s = Sizes.of(shape, policy)
    if shape.is_moe:
        routed = s.ts * shape.experts_per_token * EXPERT_IMBALANCE
        inner = routed * (3 * shape.expert_ffn_hidden + 2 * s.hidden)
    else:
        inner = s.t * 3 * s.ffn
    return (inner + 2 * s.t * s.hidden) * s.bytes


def in_flight(policy: PolicyConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations one stage holds at the peak, in units of the stage's whole share of layers."""
    pp, vpp = policy.pipeline_parallel, policy.virtual_pipeline
    if vpp == 1:
        return float(min(pp - stage, micro_batches))
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(chunks, micro_batches * vpp) / vpp


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer on the last stage, in bytes. See policy/head/fused.py."""

    saved: float  # the scored hidden states, from forward to backward
    work: float  # logits of a chunk and gradients, in the backward pass
    kept_gradient: float  # a tied embedding's gradient waits for the embedding's own backward pass


def head_memory(shape: ModelShape, policy: PolicyConfig) -> Head:
    s = Sizes.of(shape, policy)
    chunk = min(policy.head_chunk(shape.vocab), s.t)
    table = s.columns * s.hidden
    tied_here = shape.tied_embeddings and policy.pipeline_parallel == 1
    # The one-pass head: one buffer of logits, over which their gradient is written; the gradient of
    # the hidden states; and, unless the embedding brings one, a placeholder for the weight's gradient.
    placeholder = 0 if tied_here else table * s.bytes
    return Head(
        saved=s.t * s.hidden * s.bytes,
        work=chunk * s.columns * s.bytes + placeholder + s.t * s.hidden * s.bytes,
        kept_gradient=table * s.bytes if tied_here else 0.0,
    )
