"""Which HF tensors make up which Megatron parameter, as templates without layer and expert numbers, which
`weights/mapping.py` fills in with the sizes. Most families share these tables; `Family.tensors` may have others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"  # of a value head
FINAL_NORM = "decoder.final_layernorm.weight"


class Transform(StrEnum):
    COPY = "copy"
    QKV = "qkv"  # per query group: its query heads, its key head, its value head
    GATED_QKV = "gated_qkv"  # the same, with the heads' gates after the query heads; HF: query, gate, head by head
    GATE_UP = "gate_up"  # all gate rows, then all up rows
    DELTA = "delta"  # q, k, v, z, b, a of a gated DeltaNet; HF: qkvz and ba, key head by key head


class Split(StrEnum):
    """How tensor-parallel ranks share the full tensor."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"
    PARTS = "parts"  # a rank holds its share of the rows of each part (gate and up; q, k, v, z, b, a)


@dataclass(frozen=True, slots=True)
class Template:
    """One parameter. Dimensions are named; `weights/mapping.py:_sizes` gives their values."""

    name: str
    shape: str
    hf: tuple[tuple[str, str], ...]  # (HF name, shape)
    split: Split = Split.NONE
    transform: Transform = Transform.COPY
    when: str = ""  # name of a ModelShape flag; "not x" negates
    parts: str = ""  # rows of the parts, for Split.PARTS

    def applies(self, shape: Any) -> bool:
        """`shape`: a ModelShape."""
        if not self.when:
            return True
        flag = attrgetter(self.when.removeprefix("not "))
        return bool(flag(shape)) != self.when.startswith("not ")


def copied(name: str, shape: str, hf: str, split: Split = Split.NONE, when: str = "") -> Template:
    """One HF tensor, unchanged."""
    return Template(name, shape, ((hf, shape),), split, when=when)


def qkv(part: str, tail: str, q: str = "q") -> tuple[tuple[str, str], ...]:
    return tuple((f"self_attn.{x}_proj.{part}", size + tail) for x, size in (("q", q), ("k", "kv"), ("v", "kv")))


def gate_up(name: str, prefix: str, ffn: str, when: str = "") -> Template:
    hf = tuple((f"{prefix}{x}_proj.weight", f"{ffn} hidden") for x in ("gate", "up"))
    return Template(name, f"{ffn}2 hidden", hf, Split.PARTS, Transform.GATE_UP, when, f"{ffn} {ffn}")


_HEAD = copied(OUTPUT, "vocab hidden", "lm_head.weight", Split.ROWS, "not tied_embeddings")
VALUE_HEAD = (copied(OUTPUT, "one hidden", "score.weight"), copied(OUTPUT_BIAS, "one", "score.bias"))


@dataclass(frozen=True, slots=True)
class Tensors:
    """All parameters of a family."""

    top: tuple[Template, ...]
    attention: tuple[Template, ...]
    layer: tuple[Template, ...]  # of every layer
    mlp: tuple[Template, ...]  # of a layer without experts
    moe: tuple[Template, ...] = ()  # of a layer with experts, beside them
    expert: tuple[Template, ...] = ()
    linear: tuple[Template, ...] = ()  # of a layer with linear attention, instead of `attention`
    head: Template = _HEAD


_SHARED, _HF_SHARED = "mlp.shared_experts.", "mlp.shared_expert."
STANDARD = Tensors(
    top=(
        copied(EMBEDDING, "vocab hidden", "embed_tokens.weight", Split.ROWS),
        copied(FINAL_NORM, "hidden", "norm.weight"),
        copied(OUTPUT, "vocab hidden", "embed_tokens.weight", Split.ROWS, "tied_embeddings"),
    ),
    attention=(
        Template("self_attention.linear_qkv.weight", "qkv hidden", qkv("weight", " hidden"), Split.ROWS, Transform.QKV),
        Template("self_attention.linear_qkv.bias", "qkv", qkv("bias", ""), Split.ROWS, Transform.QKV, "qkv_bias"),
        copied("self_attention.q_layernorm.weight", "head", "self_attn.q_norm.weight", when="qk_norm"),
        copied("self_attention.k_layernorm.weight", "head", "self_attn.k_norm.weight", when="qk_norm"),
        copied("self_attention.linear_proj.weight", "hidden q", "self_attn.o_proj.weight", Split.COLUMNS),
    ),
    layer=(
        copied("input_layernorm.weight", "hidden", "input_layernorm.weight"),
        copied("pre_mlp_layernorm.weight", "hidden", "post_attention_layernorm.weight"),
    ),
    mlp=(
        gate_up("mlp.linear_fc1.weight", "mlp.", "ffn"),
        copied("mlp.linear_fc2.weight", "hidden ffn", "mlp.down_proj.weight", Split.COLUMNS),
    ),
    moe=(
        copied("mlp.router.weight", "experts hidden", "mlp.gate.weight"),
        gate_up(f"{_SHARED}linear_fc1.weight", _HF_SHARED, "sffn", "has_shared_expert"),
        copied(f"{_SHARED}linear_fc2.weight", "hidden sffn", f"{_HF_SHARED}down_proj.weight", Split.COLUMNS,
               "has_shared_expert"),
        copied(f"{_SHARED}gate_weight", "one hidden", "mlp.shared_expert_gate.weight", when="has_shared_expert"),
    ),
    expert=(
        gate_up("linear_fc1.weight", "", "effn"),
        copied("linear_fc2.weight", "hidden effn", "down_proj.weight", Split.COLUMNS),
    ),
)  # fmt: skip
