"""Qwen3-Next and Qwen3.5: most layers are a gated DeltaNet, attention has a gate, and norms multiply by 1 + weight.

Qwen3.5 has a vision tower and keeps the projections of a DeltaNet apart; its text model is also published alone.
"""

from dataclasses import replace
from typing import Any

from megatron_dapo.config.families import Family
from megatron_dapo.config.families.tensors import STANDARD, Split, Template, Transform, copied, qkv


def _projections(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"linear_attn.in_proj_{name}.weight", f"{name}l hidden") for name in names)


_PARTS = "keys keys values values vheads vheads"
TENSORS = replace(
    STANDARD,
    attention=(
        Template("self_attention.linear_qkv.weight", "gqkv hidden", qkv("weight", " hidden", "gq"), Split.ROWS,
                 Transform.GATED_QKV),
        *STANDARD.attention[1:],
    ),
    linear=(
        Template("self_attention.in_proj.weight", "delta hidden", _projections("qkvz", "ba"), Split.PARTS,
                 Transform.DELTA, "linear.fused", _PARTS),
        Template("self_attention.in_proj.weight", "delta hidden", _projections("qkv", "z", "b", "a"), Split.PARTS,
                 Transform.COPY, "not linear.fused", _PARTS),
        Template("self_attention.conv1d.weight", "qkvl one width", (("linear_attn.conv1d.weight", "qkvl one width"),),
                 Split.PARTS, parts="keys keys values"),
        copied("self_attention.A_log", "vheads", "linear_attn.A_log", Split.ROWS),
        copied("self_attention.dt_bias", "vheads", "linear_attn.dt_bias", Split.ROWS),
        copied("self_attention.gated_norm.weight", "vdim", "linear_attn.norm.weight"),
        copied("self_attention.out_proj.weight", "hidden values", "linear_attn.out_proj.weight", Split.COLUMNS),
    ),
)  # fmt: skip

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "fixed": {"attention_bias": False}, "tensors": TENSORS, "qk_norm": True, "attention_gate": True,
    "zero_centred_norms": True, "carried": ("mtp.",), "linear_projections": "separate",
}  # fmt: skip
_VISION: dict[str, Any] = {"text_config": True, "carried": ("mtp.", "model.visual.")}
_EXPERTS: dict[str, Any] = {"moe": True, "shared_expert": True}
_DENSE = _DEFAULTS | {"num_key_value_heads": 4}
_SPARSE = _DEFAULTS | {"num_key_value_heads": 2}
_MOE = _HYBRID | _EXPERTS | {"normalised_experts": True}

FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _SPARSE | {"norm_topk_prob": True, "decoder_sparse_step": 1},
        **(_HYBRID | _EXPERTS | {"linear_projections": "fused"}),
    ),
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", _DENSE, **_HYBRID),
    Family("qwen3_5", "Qwen3_5ForConditionalGeneration", _DENSE, **(_HYBRID | _VISION)),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _SPARSE, **_MOE),
    Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _SPARSE, **(_MOE | _VISION)),
)
