"""The one table from Hugging Face names to Megatron names. The converters, `verify`, model loading and weight sync all
read it.

A `ParameterMapping` says which HF tensors make up one Megatron parameter, and how. Every transform
(copy, QKV interleaved by query group, gate above up, DeltaNet rows by key head) only reorders whole rows. A mapping
therefore lists *segments*: rows [a, a+n) of this HF tensor are rows [b, b+n) of the Megatron tensor. The same segments
move bytes between files and slices between live shards, in both directions and without arithmetic, so every copy is
exact.

Canonical names are those of Megatron's local (not Transformer Engine) modules with global layer and expert indices,
e.g. `decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight`. `weights.names` translates other spellings.
The templates are in `config/families` (docs/add_a_family.md). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_dapo.config.families import FAMILIES
from megatron_dapo.config.families.tensors import VALUE_HEAD, Split, Template, Transform
from megatron_dapo.config.model import LinearAttention, ModelShape
from megatron_dapo.errors import UserError
from megatron_dapo.files import StoredTensor

HEAD = "lm_head.weight"
_SHOWN = 5


class WeightsError(UserError):
    """The weights do not fit the model; the message names the tensor, what was expected and what was found."""


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
    segments: tuple[Segment, ...]  # in the order of the Megatron rows
    parts: tuple[int, ...] = ()  # rows of each part, where the split is by parts
    layer: int | None = None
    expert: int | None = None
    vocabulary: bool = False  # may have padding rows, so that tensor-parallel ranks get equal shares
    tied: bool = False  # output layer of a model with tied embeddings: not stored, filled from the embedding

    @property
    def in_hf_order(self) -> bool:
        """Whether its rows are those of its HF tensors, one after the other."""
        return len(self.segments) == len(self.hf)

    def segments_of(self, source: int) -> list[Segment]:
        """The segments of HF tensor number `source`, in the order of its rows."""
        return sorted((s for s in self.segments if s.source == source), key=lambda s: s.hf_start)


def _sizes(shape: ModelShape) -> dict[str, int]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return _linear_sizes(shape.linear) | {
        "gq": 2 * q, "gqkv": 2 * q + 2 * kv,
        "hidden": shape.hidden, "vocab": shape.vocab, "head": shape.head_dim,
        "q": q, "kv": kv, "qkv": q + 2 * kv, "ffn": shape.ffn_hidden, "ffn2": 2 * shape.ffn_hidden,
        "experts": shape.experts, "effn": shape.expert_ffn_hidden, "effn2": 2 * shape.expert_ffn_hidden,
        "sffn": shape.shared_ffn_hidden, "sffn2": 2 * shape.shared_ffn_hidden, "one": 1,
    }  # fmt: skip


def _linear_sizes(linear: LinearAttention | None) -> dict[str, int]:
    """Names that end in l are those of HF's tensors."""
    if linear is None:
        return {}
    keys, _, values, _, heads, _ = linear.parts
    return {
        "keys": keys, "values": values, "vheads": heads, "vdim": linear.value_dim, "delta": sum(linear.parts),
        "qkvl": 2 * keys + values, "qkvzl": 2 * keys + 2 * values, "bal": 2 * heads, "zl": values, "bl": heads,
        "al": heads, "width": linear.conv_width,
    }  # fmt: skip


def _segments(transform: Transform, shape: ModelShape, hf_shapes: tuple[tuple[int, ...], ...]) -> tuple[Segment, ...]:
    if transform in (Transform.QKV, Transform.GATED_QKV):
        rows = _gated_qkv_rows(shape) if transform is Transform.GATED_QKV else _qkv_rows(shape)
    elif transform is Transform.DELTA:
        assert shape.linear is not None
        rows = _delta_rows(shape.linear)
    else:  # the HF tensors, concatenated along dimension 0
        rows = ((source, 0, size[0]) for source, size in enumerate(hf_shapes))
    segments, at = [], 0
    for source, hf_start, count in rows:
        segments.append(Segment(source, hf_start, at, count))
        at += count
    return tuple(segments)


Rows = Iterator[tuple[int, int, int]]  # HF tensor number, first row, number of rows; in Megatron's order


def _qkv_rows(shape: ModelShape) -> Rows:
    for group in range(shape.kv_heads):
        for source, heads in enumerate((shape.heads // shape.kv_heads, 1, 1)):
            rows = heads * shape.head_dim
            yield source, group * rows, rows


def _gated_qkv_rows(shape: ModelShape) -> Rows:
    heads, d = shape.heads // shape.kv_heads, shape.head_dim
    for group in range(shape.kv_heads):
        for gate in (0, 1):
            for head in range(group * heads, (group + 1) * heads):
                yield 0, (2 * head + gate) * d, d
        yield 1, group * d, d
        yield 2, group * d, d


def _delta_rows(linear: LinearAttention) -> Rows:
    """Each key head has, in HF's qkvz, its rows of q, k, v and z, and in ba those of b and a."""
    for source, parts in enumerate((linear.parts[:4], linear.parts[4:])):
        per_head = [part // linear.key_heads for part in parts]
        for part, rows in enumerate(per_head):
            for head in range(linear.key_heads):
                yield source, head * sum(per_head) + sum(per_head[:part]), rows


def _mapping(t: Template, shape: ModelShape, prefix: str = "", hf: str = "", layer: int | None = None,
         expert: int | None = None) -> ParameterMapping:  # fmt: skip
    sizes = _sizes(shape)

    def dims(words: str) -> tuple[int, ...]:
        return tuple(sizes[word] for word in words.split())

    hf_shapes = tuple(dims(words) for _, words in t.hf)
    return ParameterMapping(
        name=prefix + t.name, shape=dims(t.shape), hf=tuple(hf + name for name, _ in t.hf), hf_shapes=hf_shapes,
        transform=t.transform, split=t.split, segments=_segments(t.transform, shape, hf_shapes), parts=dims(t.parts),
        layer=layer, expert=expert, vocabulary=t.shape.startswith("vocab"), tied=t.when == "tied_embeddings",
    )  # fmt: skip


def _mappings(shape: ModelShape) -> Iterator[ParameterMapping]:
    tensors = FAMILIES[shape.architecture].tensors
    yield from (_mapping(t, shape, hf=shape.prefix) for t in tensors.top if t.applies(shape))
    heads = VALUE_HEAD if shape.head == "value" else (tensors.head,)
    yield from (_mapping(t, shape) for t in heads if t.applies(shape))
    for layer in range(shape.layers):
        yield from layer_mappings(shape, layer)


def layer_mappings(shape: ModelShape, layer: int) -> Iterator[ParameterMapping]:
    """Those of one layer."""
    tensors = FAMILIES[shape.architecture].tensors
    prefix, hf = f"decoder.layers.{layer}.", f"{shape.prefix}layers.{layer}."
    attention = tensors.linear if layer in shape.linear_layers else tensors.attention
    templates = (*attention, *tensors.layer, *(tensors.moe if shape.has_experts(layer) else tensors.mlp))
    yield from (_mapping(t, shape, prefix, hf, layer) for t in templates if t.applies(shape))
    for expert in range(shape.experts if shape.has_experts(layer) else 0):
        expert_prefix, hf_expert = f"{prefix}mlp.experts.local_experts.{expert}.", f"{hf}mlp.experts.{expert}."
        yield from (_mapping(t, shape, expert_prefix, hf_expert, layer, expert) for t in tensors.expert)


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


def check_hf_tensors(stored: Mapping[str, StoredTensor | None], shape: ModelShape, path: Path) -> None:
    """Names and shapes are those that config.json describes. None: a tensor of any shape."""
    check_hf_names(stored, shape, path)
    wrong = [
        f"{found.file.name}: tensor {name}: shape {found.shape}, but config.json says {expected}"
        for name, expected in hf_shapes(shape).items()
        if (found := stored[name]) is not None and found.shape != expected
    ]
    if wrong:
        more = f"; {len(wrong)} tensors in all have the wrong shape" if len(wrong) > 1 else ""
        raise WeightsError(f"{path}/{wrong[0]}{more}")


def check_hf_names(names: Iterable[str], shape: ModelShape, path: str | Path = "") -> None:
    """Exactly this model's tensors. A tied model may also store a copy of its embedding as head, and some have tensors
    that are only carried through a conversion."""
    expected = set(hf_shapes(shape))
    found = {name for name in names if not name.startswith(shape.carried)}
    if shape.tied_embeddings:
        found.discard(HEAD)
    where = f"{path}: " if path else ""
    if missing := expected - found:
        raise WeightsError(f"{where}missing {listed(missing)}")
    if extra := found - expected:
        raise WeightsError(f"{where}unexpected {listed(extra)}; {_why_unexpected(extra)}")


def _why_unexpected(extra: set[str]) -> str:
    if any(name.endswith("o_proj.bias") for name in extra):
        return "a bias in the attention output (attention_bias) is not supported"
    return "the model that config.json describes does not have it"


def listed(names: set[Any]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def padded_vocab(vocab: int, tp_size: int) -> int:
    """The smallest size >= vocab that `tp_size` ranks can split into equal parts."""
    return -(-vocab // tp_size) * tp_size


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A block of a shard and its place in HF tensor number `source`: `rows` rows, and all columns or `columns`."""

    source: int
    hf_row: int
    shard_row: int
    rows: int
    columns: tuple[int, int] | None = None  # of the HF tensor: first column and their number


def shard_blocks(
    mapping: ParameterMapping, rank: int, size: int, shape: Sequence[int]
) -> tuple[list[tuple[int, int, int]], tuple[int, int] | None]:
    """Where the shard (of this shape) of tensor-parallel rank `rank` of `size` is in the full tensor: (row of the full
    tensor, row of the shard, rows) of its blocks, and their first column and their number; None: all columns."""
    if mapping.split is Split.NONE or size == 1:
        return [(0, 0, shape[0])], None
    if mapping.split is Split.ROWS:
        return [(rank * shape[0], 0, shape[0])], None
    if mapping.split is Split.COLUMNS:
        return [(0, 0, shape[0])], (rank * shape[1], shape[1])
    starts = accumulate(mapping.parts, initial=0)
    parts = zip(starts, mapping.parts, strict=False)  # the last start is the end
    return [(start + rank * (rows // size), start // size, rows // size) for start, rows in parts], None


def shard_copies(mapping: ParameterMapping, rank: int, size: int, shape: Sequence[int]) -> list[ShardCopy]:
    """How the shard (of this shape) of tensor-parallel rank `rank` of `size` fills the HF tensors. Together the shards
    fill every element once; vocabulary padding is left out."""
    parts, columns = shard_blocks(mapping, rank, size, shape)
    return [
        ShardCopy(s.source, s.hf_start + first - s.start, shard_row + first - full_row, last - first, columns)
        for full_row, shard_row, rows in parts
        for s in mapping.segments
        if (first := max(full_row, s.start)) < (last := min(full_row + rows, s.start + s.rows))
    ]


def target_of(hf_name: str) -> str:
    """The word by which PEFT's target_modules name a layer: q_proj of model.layers.0.self_attn.q_proj.weight."""
    return hf_name.removesuffix(".weight").rsplit(".", 1)[-1]


def adapted(mapping: ParameterMapping, targets: Sequence[str]) -> tuple[str, ...]:
    """The HF layers in a Megatron layer that have adapters; where no targets are named, all linear layers do. Routers
    and gates, which no rank splits, embedding and output layer do not."""
    if mapping.layer is None or len(mapping.shape) != 2 or mapping.split is Split.NONE:
        return ()
    return tuple(name for name in mapping.hf if not targets or target_of(name) in targets)
