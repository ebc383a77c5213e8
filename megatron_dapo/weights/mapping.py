"""The one table from Hugging Face Qwen names to Megatron names. The converters, `verify`, model loading and weight
sync all read it.

A `ParameterMapping` says which HF tensors make up one Megatron parameter, and how. Every transform that Qwen needs
(copy, QKV interleaved by query group, gate above up) only reorders whole rows. A mapping therefore lists *segments*:
rows [a, a+n) of this HF tensor are rows [b, b+n) of the Megatron tensor. The same segments move bytes between files
and slices between live shards, in both directions and without arithmetic, so every copy is exact.

Canonical names are those of Megatron's local (not Transformer Engine) modules with global layer and expert indices,
e.g. `decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`. `weights.names` translates other spellings.
To add an architecture, add templates below and its name to `config/model.py` (docs/conversion.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from megatron_dapo.config.model import ModelShape
from megatron_dapo.errors import UserError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


class WeightsError(UserError):
    """The weights do not fit the model; the message names the tensor, what was expected and what was found."""


class Transform(StrEnum):
    COPY = "copy"
    QKV = "qkv"  # per query group: its query heads, its key head, its value head
    GATE_UP = "gate_up"  # all gate rows, then all up rows


class Split(StrEnum):
    """How tensor-parallel ranks share the full tensor."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"
    GATE_UP_ROWS = "gate_up_rows"  # a rank holds its part of the gate rows above its part of the up rows


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` consecutive rows: from `hf_start` in HF tensor number `source`, from `start` in the Megatron tensor."""

    source: int
    hf_start: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """One Megatron parameter: the HF tensors it is made of, and how tensor-parallel ranks split it."""

    name: str
    shape: tuple[int, ...]  # full, without vocabulary padding
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    transform: Transform
    split: Split
    segments: tuple[Segment, ...]
    layer: int | None = None
    expert: int | None = None
    vocabulary: bool = False  # may have padding rows, so that tensor-parallel ranks get equal shares
    tied: bool = False  # output layer of a model with tied embeddings: not stored, filled from the embedding


@dataclass(frozen=True, slots=True)
class _Template:
    """A mapping without layer and expert numbers. Dimensions are named; `_sizes` gives their values."""

    name: str
    shape: str
    hf: tuple[tuple[str, str], ...]  # (HF name, shape)
    split: Split = Split.NONE
    transform: Transform = Transform.COPY
    when: str = ""  # name of a ModelShape flag; "not x" negates

    def applies(self, shape: ModelShape) -> bool:
        if not self.when:
            return True
        flag = self.when.removeprefix("not ")
        return bool(getattr(shape, flag)) != self.when.startswith("not ")


def _qkv(part: str, tail: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"self_attn.{x}_proj.{part}", size + tail) for x, size in (("q", "q"), ("k", "kv"), ("v", "kv")))


def _gate_up(prefix: str, ffn: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{prefix}{x}_proj.weight", f"{ffn} hidden") for x in ("gate", "up"))


_T, _S, _X = _Template, Split, Transform
_SHARED = "mlp.shared_experts."

_TOP = (
    _T(EMBEDDING, "vocab hidden", (("model.embed_tokens.weight", "vocab hidden"),), _S.ROWS),
    _T(FINAL_NORM, "hidden", (("model.norm.weight", "hidden"),)),
    _T(OUTPUT, "vocab hidden", (("lm_head.weight", "vocab hidden"),), _S.ROWS, when="not tied_embeddings"),
    _T(OUTPUT, "vocab hidden", (("model.embed_tokens.weight", "vocab hidden"),), _S.ROWS, when="tied_embeddings"),
)
_LAYER = (
    _T("input_layernorm.weight", "hidden", (("input_layernorm.weight", "hidden"),)),
    _T("self_attention.linear_qkv.weight", "qkv hidden", _qkv("weight", " hidden"), _S.ROWS, _X.QKV),
    _T("self_attention.linear_qkv.bias", "qkv", _qkv("bias", ""), _S.ROWS, _X.QKV, when="qkv_bias"),
    _T("self_attention.q_layernorm.weight", "head", (("self_attn.q_norm.weight", "head"),), when="qk_norm"),
    _T("self_attention.k_layernorm.weight", "head", (("self_attn.k_norm.weight", "head"),), when="qk_norm"),
    _T("self_attention.linear_proj.weight", "hidden q", (("self_attn.o_proj.weight", "hidden q"),), _S.COLUMNS),
    _T("pre_mlp_layernorm.weight", "hidden", (("post_attention_layernorm.weight", "hidden"),)),
    _T("mlp.linear_fc1.weight", "ffn2 hidden", _gate_up("mlp.", "ffn"), _S.GATE_UP_ROWS, _X.GATE_UP, "not is_moe"),
    _T("mlp.linear_fc2.weight", "hidden ffn", (("mlp.down_proj.weight", "hidden ffn"),), _S.COLUMNS, when="not is_moe"),
    _T("mlp.router.weight", "experts hidden", (("mlp.gate.weight", "experts hidden"),), when="is_moe"),
    _T(f"{_SHARED}linear_fc1.weight", "sffn2 hidden", _gate_up("mlp.shared_expert.", "sffn"), _S.GATE_UP_ROWS,
       _X.GATE_UP, "has_shared_expert"),
    _T(f"{_SHARED}linear_fc2.weight", "hidden sffn", (("mlp.shared_expert.down_proj.weight", "hidden sffn"),),
       _S.COLUMNS, when="has_shared_expert"),
    _T(f"{_SHARED}gate_weight", "one hidden", (("mlp.shared_expert_gate.weight", "one hidden"),),
       when="has_shared_expert"),
)  # fmt: skip
_EXPERT = (
    _T("linear_fc1.weight", "effn2 hidden", _gate_up("", "effn"), _S.GATE_UP_ROWS, _X.GATE_UP, "is_moe"),
    _T("linear_fc2.weight", "hidden effn", (("down_proj.weight", "hidden effn"),), _S.COLUMNS, when="is_moe"),
)


def _sizes(shape: ModelShape) -> dict[str, int]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "hidden": shape.hidden, "vocab": shape.vocab, "head": shape.head_dim,
        "q": q, "kv": kv, "qkv": q + 2 * kv, "ffn": shape.ffn_hidden, "ffn2": 2 * shape.ffn_hidden,
        "experts": shape.experts, "effn": shape.expert_ffn_hidden, "effn2": 2 * shape.expert_ffn_hidden,
        "sffn": shape.shared_ffn_hidden, "sffn2": 2 * shape.shared_ffn_hidden, "one": 1,
    }  # fmt: skip


def _segments(transform: Transform, shape: ModelShape, hf_shapes: tuple[tuple[int, ...], ...]) -> tuple[Segment, ...]:
    if transform is not Transform.QKV:  # the HF tensors, concatenated along dimension 0
        starts = [sum(s[0] for s in hf_shapes[:i]) for i in range(len(hf_shapes))]
        return tuple(Segment(i, 0, starts[i], s[0]) for i, s in enumerate(hf_shapes))
    segments, at = [], 0
    heads = shape.heads // shape.kv_heads
    for group in range(shape.kv_heads):
        for source, count in enumerate((heads, 1, 1)):
            rows = count * shape.head_dim
            segments.append(Segment(source, group * rows, at, rows))
            at += rows
    return tuple(segments)


def _mapping(t: _Template, shape: ModelShape, to: str = "", hf: str = "", layer: int | None = None,
         expert: int | None = None) -> ParameterMapping:  # fmt: skip
    sizes = _sizes(shape)

    def dims(words: str) -> tuple[int, ...]:
        return tuple(sizes[word] for word in words.split())

    hf_shapes = tuple(dims(words) for _, words in t.hf)
    return ParameterMapping(
        name=to + t.name, shape=dims(t.shape), hf=tuple(hf + name for name, _ in t.hf), hf_shapes=hf_shapes,
        transform=t.transform, split=t.split, segments=_segments(t.transform, shape, hf_shapes),
        layer=layer, expert=expert, vocabulary=t.shape.startswith("vocab"), tied=t.when == "tied_embeddings",
    )  # fmt: skip


def _mappings(shape: ModelShape) -> Iterator[ParameterMapping]:
    yield from (_mapping(t, shape) for t in _TOP if t.applies(shape))
    for layer in range(shape.layers):
        to, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from (_mapping(t, shape, to, hf, layer) for t in _LAYER if t.applies(shape))
        for expert in range(shape.experts):
            to_expert, hf_expert = f"{to}mlp.experts.local_experts.{expert}.", f"{hf}mlp.experts.{expert}."
            yield from (_mapping(t, shape, to_expert, hf_expert, layer, expert) for t in _EXPERT if t.applies(shape))


@lru_cache(maxsize=8)
def parameter_mappings(shape: ModelShape) -> dict[str, ParameterMapping]:
    """Every parameter of the model by canonical name. With tied embeddings, the output layer has `tied` set."""
    return {mapping.name: mapping for mapping in _mappings(shape)}


def stored_mappings(shape: ModelShape) -> list[ParameterMapping]:
    """The parameters that checkpoints store: all but a tied output layer."""
    return [mapping for mapping in parameter_mappings(shape).values() if not mapping.tied]


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in an HF checkpoint of this model."""
    return {
        name: size
        for mapping in stored_mappings(shape)
        for name, size in zip(mapping.hf, mapping.hf_shapes, strict=True)
    }


def padded_vocab(vocab: int, tp_size: int, multiple: int = 1) -> int:
    """The smallest size >= vocab that `tp_size` ranks can split into parts that are multiples of `multiple`."""
    unit = tp_size * multiple
    return -(-vocab // unit) * unit
