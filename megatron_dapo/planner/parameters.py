"""The exact number of parameters of a model, and of those on one rank.

The total counts distinct weights (a tied output layer once). A rank's count is what Megatron allocates: norms,
router and the shared expert's gate are replicated on every tensor-parallel rank, the vocabulary is padded to equal
shares, experts are divided among expert-parallel and expert-tensor-parallel ranks, and with tied embeddings the last
pipeline stage has its own copy of the embedding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_dapo.config import ModelShape
from megatron_dapo.config.families.tensors import Split
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.weights.mapping import adapted, padded_vocab, parameter_mappings


@dataclass(frozen=True, slots=True)
class Parameters:
    """Distinct parameters of the whole model by kind."""

    embedding: int
    output: int  # 0 when tied
    attention: int  # or gated DeltaNet
    mlp: int  # dense MLPs
    experts: int  # all routed experts
    shared: int  # shared experts, with their gates
    router: int
    norms: int
    active: int  # used by one token: includes embedding, output layer and `experts_per_token` experts

    @property
    def total(self) -> int:
        layers = self.attention + self.mlp + self.experts + self.shared + self.router + self.norms
        return self.embedding + self.output + layers

    @property
    def layer_matrices_active(self) -> int:
        """Matrix weights that one token uses in the layers: 2 FLOPs each in the forward pass."""
        return self.active - self.embedding - self.output - self.norms


@lru_cache(maxsize=32)
def count_parameters(shape: ModelShape) -> Parameters:
    full, linear = shape.attention_layers, len(shape.linear_layers)
    norms = shape.layers * 2 * shape.hidden + full * _attention_norms(shape) + linear * _delta_norm(shape)
    expert, moe = 3 * shape.hidden * shape.expert_ffn_hidden, shape.moe_layers
    embedding = shape.vocab * shape.hidden
    whole = Parameters(
        embedding=embedding,
        output=_value_head(shape) or (0 if shape.tied_embeddings else embedding),
        attention=full * _attention(shape) + linear * _delta(shape),
        mlp=(shape.layers - moe) * _mlp(shape),
        experts=moe * shape.experts * expert,
        shared=moe * (_shared_matrices(shape) + _shared_gate(shape)),
        router=moe * shape.experts * shape.hidden,
        norms=norms + shape.hidden,
        active=0,
    )
    return replace(whole, active=whole.total - moe * (shape.experts - shape.experts_per_token) * expert)


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


def _mlp(shape: ModelShape) -> int:
    return 3 * shape.hidden * shape.ffn_hidden


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
    return stages[stage] if stages else -(-shape.layers // policy.pipeline_parallel)


def _held_layers(shape: ModelShape, policy: PolicyConfig, stage: int) -> set[int]:
    """The layers of a pipeline stage. With virtual stages, a stage has a part of each round."""
    rounds = policy.virtual_pipeline
    sizes = [stage_layers(shape, policy, i) // rounds for i in range(policy.pipeline_parallel)]
    starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(rounds)]
    return {start + i for start in starts for i in range(sizes[stage])}


def rank_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """Parameters on a rank of pipeline stage `stage` (0 is the first), the same for all tensor-parallel ranks."""
    tp, pp = policy.tensor_parallel, policy.pipeline_parallel
    parts = policy.expert_parallel * policy.expert_tensor_parallel
    experts = shape.experts * 3 * shape.hidden * shape.expert_ffn_hidden // parts
    held = _held_layers(shape, policy, stage)
    layers, linear = len(held), len(held.intersection(shape.linear_layers))
    moe = sum(map(shape.has_experts, held))
    dense = layers * 2 * shape.hidden + (layers - moe) * (_mlp(shape) // tp)
    dense += moe * (_shared_matrices(shape) // tp + _shared_gate(shape) + shape.experts * shape.hidden)
    dense += (layers - linear) * (_attention(shape) // tp + _attention_norms(shape))
    dense += linear * (_delta(shape) // tp + _delta_norm(shape))
    table = padded_vocab(shape.vocab, tp) // tp * shape.hidden
    first, last = stage == 0, stage == pp - 1
    if first:
        dense += table
    if last:
        dense += shape.hidden + (_value_head(shape) or (0 if shape.tied_embeddings and first else table))
    return RankParameters(dense, moe * experts)


def trained_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """Those with gradients and optimizer state: all, or the adapters of `policy.lora`."""
    return adapter_parameters(shape, policy, stage) if policy.lora.rank else rank_parameters(shape, policy, stage)


def adapter_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """LoRA adapters on a rank. Tensor-parallel ranks divide the half that belongs to the dimension in which they divide
    the layer; every rank has the other half."""
    kinds = Counter(
        (layer in shape.linear_layers, shape.has_experts(layer)) for layer in _held_layers(shape, policy, stage)
    )
    rank, tp, etp = policy.lora.rank, policy.tensor_parallel, policy.expert_tensor_parallel
    dense = experts = 0
    for kind, count in kinds.items():
        sides = _adapter_sides(shape, tuple(policy.lora.targets), *kind)
        dense += count * rank * (sides[0] // tp + sides[1])
        experts += count * rank * (sides[2] // etp + sides[3]) // policy.expert_parallel
    return RankParameters(dense, experts)


@lru_cache(maxsize=32)
def _adapter_sides(shape: ModelShape, targets: tuple[str, ...], linear: bool, moe: bool) -> tuple[int, int, int, int]:
    """Inputs and outputs of the adapted matrices of one layer: those that ranks divide, and the others; then the same
    of its experts."""
    kinds = [(i in shape.linear_layers, shape.has_experts(i)) for i in range(shape.layers)]
    layer = kinds.index((linear, moe))
    sums = [0, 0, 0, 0]
    for mapping in parameter_mappings(shape).values():
        if mapping.layer == layer:
            for name in adapted(mapping, targets):
                outputs, inputs = mapping.hf_shapes[mapping.hf.index(name)]
                by_inputs = mapping.split is Split.COLUMNS
                first = 0 if mapping.expert is None else 2
                sums[first] += inputs if by_inputs else outputs
                sums[first + 1] += outputs if by_inputs else inputs
    return sums[0], sums[1], sums[2], sums[3]
