"""The exact number of parameters of a model, and of those on one rank.

The total counts distinct weights (a tied output layer once). A rank's count is what Megatron allocates: norms,
router and the shared expert's gate are replicated on every tensor-parallel rank, the vocabulary is padded to equal
shares, experts are divided among expert-parallel and expert-tensor-parallel ranks, and with tied embeddings the last
pipeline stage has its own copy of the embedding.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from megatron_dapo.config import ModelShape
from megatron_dapo.config.families.tensors import Split
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.weights.mapping import adapted, layer_mappings, padded_vocab, parameter_mappings


@dataclass(frozen=True, slots=True)
class Parameters:
    """Distinct parameters of the whole model by kind."""

    embedding: int
    output: int  # 0 when tied
    divided: int  # of the layers, among tensor-parallel ranks: matrices, and what belongs to their rows
    mlp: int  # dense MLPs, a part of `divided`
    replicated: int  # on every tensor-parallel rank: norms, routers, gates of shared experts
    norms: int  # a part of `replicated`
    experts: int  # all routed experts
    routed: int  # those of the experts that one token uses
    tensors: int  # of the HF model
    quantised: int  # by `weights.quantization: fp8`: the matrices of attention and MLPs
    quantised_tensors: int

    @property
    def total(self) -> int:
        return self.embedding + self.output + self.divided + self.replicated + self.experts

    @property
    def active(self) -> int:
        """Used by one token: includes embedding and output layer."""
        return self.total - self.experts + self.routed

    @property
    def layer_matrices_active(self) -> int:
        """Matrix weights that one token uses in the layers: 2 FLOPs each in the forward pass."""
        return self.divided + self.replicated - self.norms + self.routed


@lru_cache(maxsize=32)
def count_parameters(shape: ModelShape) -> Parameters:
    layers = _layers(shape, frozenset(range(shape.layers)))
    embedding = shape.vocab * shape.hidden
    output = _value_head(shape) or (0 if shape.tied_embeddings else embedding)
    replicated, norms = layers["replicated"] + shape.hidden, layers["norms"] + shape.hidden  # the last norm
    routed = layers["experts"] * shape.experts_per_token // shape.experts if shape.is_moe else 0
    return Parameters(
        embedding, output, layers["divided"], layers["mlp"], replicated, norms, layers["experts"], routed,
        layers["tensors"] + 2 + (not shape.tied_embeddings), layers["quantised"], layers["quantised_tensors"],
    )  # fmt: skip


def _value_head(shape: ModelShape) -> int:
    return shape.hidden + 1 if shape.head == "value" else 0


Kind = tuple[bool, bool]  # of a layer: gated DeltaNet instead of attention, experts instead of an MLP


@lru_cache(maxsize=32)
def _kinds(shape: ModelShape) -> list[Kind]:
    """Of each layer."""
    return [(layer in shape.linear_layers, shape.has_experts(layer)) for layer in range(shape.layers)]


@lru_cache(maxsize=1024)  # a search for layouts asks for the same stages thousands of times
def _layers(shape: ModelShape, held: frozenset[int]) -> Counter[str]:
    """Parameters of these layers by kind: the names of `Parameters`."""
    total: Counter[str] = Counter()
    for kind, count in Counter(_kinds(shape)[layer] for layer in held).items():
        total.update({name: count * size for name, size in _layer(shape, kind).items()})
    return total


@lru_cache(maxsize=64)
def _layer(shape: ModelShape, kind: Kind) -> Counter[str]:
    """Of one layer, from the table of the converters."""
    found: Counter[str] = Counter()
    for mapping in layer_mappings(shape, _kinds(shape).index(kind)):
        size, divided = math.prod(mapping.shape), mapping.split is not Split.NONE
        found["experts" if mapping.expert is not None else "divided" if divided else "replicated"] += size
        if mapping.expert is None and ".mlp.linear_fc" in mapping.name:
            found["mlp"] += size
        if "norm" in mapping.name:
            found["norms"] += size
        found["tensors"] += len(mapping.hf)
        if divided and len(mapping.shape) == 2 and not (kind[0] and ".self_attention." in mapping.name):
            found["quantised"] += size
            found["quantised_tensors"] += len(mapping.hf)
    return found


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank of a pipeline stage allocates."""

    dense: int  # everything but experts: gradients and optimizer are sharded over data × context ranks
    experts: int  # sharded over the ranks of the stage that hold the same experts

    @property
    def total(self) -> int:
        return self.dense + self.experts


def stage_sizes(shape: ModelShape, policy: PolicyConfig) -> list[int]:
    """Layers of each pipeline stage."""
    pp = policy.pipeline_parallel
    return policy.stage_layers(shape.layers) or [-(-shape.layers // pp)] * pp


def _held_layers(shape: ModelShape, policy: PolicyConfig, stage: int) -> frozenset[int]:
    """The layers of a pipeline stage. With virtual stages, a stage has a part of each round."""
    rounds = policy.virtual_pipeline
    sizes = [count // rounds for count in stage_sizes(shape, policy)]
    starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(rounds)]
    return frozenset(start + i for start in starts for i in range(sizes[stage]))


def rank_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """Parameters on a rank of pipeline stage `stage` (0 is the first), the same for all tensor-parallel ranks."""
    tp, pp = policy.tensor_parallel, policy.pipeline_parallel
    layers = _layers(shape, _held_layers(shape, policy, stage))
    dense = layers["divided"] // tp + layers["replicated"]
    table = padded_vocab(shape.vocab, tp) // tp * shape.hidden
    first, last = stage == 0, stage == pp - 1
    if first:
        dense += table
    if last:
        dense += shape.hidden + (_value_head(shape) or (0 if shape.tied_embeddings and first else table))
    return RankParameters(dense, layers["experts"] // (policy.expert_parallel * policy.expert_tensor_parallel))


def rows_in_hf_order(shape: ModelShape) -> int:
    """Parameters whose rows Megatron has in the order of a checkpoint; the others are those of q, k and v."""
    stored = (mapping for mapping in parameter_mappings(shape).values() if not mapping.tied)
    return sum(math.prod(mapping.shape) for mapping in stored if mapping.in_hf_order)


def trained_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """Those with gradients and optimizer state: all, or the adapters of `policy.lora`."""
    return adapter_parameters(shape, policy, stage) if policy.lora.rank else rank_parameters(shape, policy, stage)


def adapter_parameters(shape: ModelShape, policy: PolicyConfig, stage: int) -> RankParameters:
    """LoRA adapters on a rank. Tensor-parallel ranks divide the half that belongs to the dimension in which they divide
    the layer; every rank has the other half."""
    kinds = Counter(_kinds(shape)[layer] for layer in _held_layers(shape, policy, stage))
    rank, tp, etp = policy.lora.rank, policy.tensor_parallel, policy.expert_tensor_parallel
    dense = experts = 0
    for kind, count in kinds.items():
        sides = _adapter_sides(shape, tuple(policy.lora.targets), kind)
        dense += count * rank * (sides[0] // tp + sides[1])
        experts += count * rank * (sides[2] // etp + sides[3]) // policy.expert_parallel
    return RankParameters(dense, experts)


@lru_cache(maxsize=32)
def _adapter_sides(shape: ModelShape, targets: tuple[str, ...], kind: Kind) -> tuple[int, int, int, int]:
    """Inputs and outputs of the adapted matrices of one layer: those that ranks divide, and the others; then the same
    of its experts."""
    sums = [0, 0, 0, 0]
    for mapping in layer_mappings(shape, _kinds(shape).index(kind)):
        for name in adapted(mapping, targets):
            outputs, inputs = mapping.hf_shapes[mapping.hf.index(name)]
            by_inputs = mapping.split is Split.COLUMNS
            first = 0 if mapping.expert is None else 2
            sums[first] += inputs if by_inputs else outputs
            sums[first + 1] += outputs if by_inputs else inputs
    return sums[0], sums[1], sums[2], sums[3]
