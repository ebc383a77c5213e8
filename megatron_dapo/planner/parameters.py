"""The exact number of parameters of a Qwen model, and of those on one rank.

The total counts distinct weights (a tied output layer once). A rank's count is what Megatron allocates: norms,
router and the shared expert's gate are replicated on every tensor-parallel rank, the vocabulary is padded to equal
shares, experts are divided among expert-parallel and expert-tensor-parallel ranks, and with tied embeddings the last
pipeline stage has its own copy of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.weights.mapping import padded_vocab


@dataclass(frozen=True, slots=True)
class Parameters:
    """Distinct parameters of the whole model by kind."""

    embedding: int
    output: int  # 0 when tied
    attention: int  # or gated DeltaNet
    mlp: int  # dense MLPs, or all routed experts
    shared: int  # shared experts, with their gates
    router: int
    norms: int
    active: int  # used by one token: includes embedding, output layer and `experts_per_token` experts

    @property
    def total(self) -> int:
        return self.embedding + self.output + self.attention + self.mlp + self.shared + self.router + self.norms

    @property
    def layer_matrices_active(self) -> int:
        """Matrix weights that one token uses in the layers: 2 FLOPs each in the forward pass."""
        return self.active - self.embedding - self.output - self.norms


@lru_cache(maxsize=32)
def count_parameters(shape: ModelShape) -> Parameters:
    full, linear = shape.attention_layers, len(shape.linear_layers)
    norms = shape.layers * 2 * shape.hidden + full * _attention_norms(shape) + linear * _delta_norm(shape)
    experts = max(1, shape.experts)
    expert = 3 * shape.hidden * (shape.expert_ffn_hidden if shape.is_moe else shape.ffn_hidden)
    router = shape.experts * shape.hidden
    embedding = shape.vocab * shape.hidden
    idle = (experts - max(1, shape.experts_per_token)) * expert if shape.is_moe else 0
    whole = Parameters(
        embedding=embedding,
        output=_value_head(shape) or (0 if shape.tied_embeddings else embedding),
        attention=full * _attention(shape) + linear * _delta(shape),
        mlp=shape.layers * experts * expert,
        shared=shape.layers * (_shared_matrices(shape) + _shared_gate(shape)),
        router=shape.layers * router,
        norms=norms + shape.hidden,
        active=0,
    )
    return replace(whole, active=whole.total - shape.layers * idle)


def _value_head(shape: ModelShape) -> int:
    return shape.hidden + 1 if shape.head == "value" else 0


def _attention(shape: ModelShape) -> int:
    """One layer, without norms; tensor-parallel ranks divide it."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = (2 * q if shape.attention_gate else q) + 2 * kv
    return shape.hidden * rows + q * shape.hidden + (rows if shape.qkv_bias else 0)


def _attention_norms(shape: ModelShape) -> int:
    return 2 * shape.head_dim if shape.qk_norm else 0


def _delta(shape: ModelShape) -> int:
    """One gated DeltaNet: projections, convolution, A_log and dt_bias; tensor-parallel ranks divide it."""
    linear = shape.linear
    if linear is None:
        return 0
    convolution = sum(linear.parts[:3]) * linear.conv_width
    return shape.hidden * (sum(linear.parts) + linear.parts[3]) + convolution + 2 * linear.value_heads


def _delta_norm(shape: ModelShape) -> int:
    return shape.linear.value_dim if shape.linear else 0


def _shared_matrices(shape: ModelShape) -> int:
    return 3 * shape.hidden * shape.shared_ffn_hidden


def _shared_gate(shape: ModelShape) -> int:
    return shape.hidden if shape.has_shared_expert else 0


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank of a pipeline stage allocates."""

    dense: int  # everything but experts: gradients and optimizer are sharded over data × context ranks
    experts: int  # sharded over the ranks of the stage that hold the same experts

    @property
    def total(self) -> int:
        return self.dense + self.experts


def stage_layers(shape: ModelShape, policy: PolicyConfig, stage: int) -> int:
    """Layers of a pipeline stage."""
    stages = policy.stage_layers(shape.layers)
    return stages[stage] if stages else shape.layers // policy.pipeline_parallel


def linear_layers(shape: ModelShape, policy: PolicyConfig, stage: int) -> int:
    """Gated DeltaNet layers of a pipeline stage. With virtual stages, a stage has a part of each round."""
    rounds = policy.virtual_pipeline
    sizes = [stage_layers(shape, policy, i) // rounds for i in range(policy.pipeline_parallel)]
    starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(rounds)]
    held = {start + i for start in starts for i in range(sizes[stage])}
    return len(held.intersection(shape.linear_layers))


def rank_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """Parameters on a rank of pipeline stage `stage` (0 is the first), the same for all tensor-parallel ranks."""
    tp, pp = policy.tensor_parallel, policy.pipeline_parallel
    split, whole = 0, 2 * shape.hidden + shape.experts * shape.hidden  # of one layer, without its attention
    experts = 0
    if shape.is_moe:
        parts = policy.expert_parallel * policy.expert_tensor_parallel
        experts = shape.experts * 3 * shape.hidden * shape.expert_ffn_hidden // parts
        split += _shared_matrices(shape)
        whole += _shared_gate(shape)
    else:
        split += 3 * shape.hidden * shape.ffn_hidden
    layers, linear = stage_layers(shape, policy, stage), linear_layers(shape, policy, stage)
    dense = layers * (split // tp + whole)
    dense += (layers - linear) * (_attention(shape) // tp + _attention_norms(shape))
    dense += linear * (_delta(shape) // tp + _delta_norm(shape))
    table = padded_vocab(shape.vocab, tp) // tp * shape.hidden
    first, last = stage == 0, stage == pp - 1
    if first:
        dense += table
    if last:
        dense += shape.hidden + (_value_head(shape) or (0 if shape.tied_embeddings and first else table))
    return RankParameters(dense, layers * experts)
