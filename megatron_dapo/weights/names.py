"""Spellings of Megatron parameter names: live modules (local or Transformer Engine) to canonical, and back.

Transformer Engine fuses a norm into the linear layer after it (`linear_qkv.layer_norm_weight`) and keeps the experts
of a rank in one grouped layer (`mlp.experts.linear_fc1.weight5`); Megatron's local modules name each on its own.
"""

from __future__ import annotations

import re

# TE spelling of the part after `decoder.layers.N.`, and the local one.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def to_local(name: str) -> str:
    """The local spelling of a parameter name in either spelling; wrappers' `module.` prefixes are dropped."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, rest = found.groups()
    if grouped := _GROUPED_EXPERT.match(rest):
        rest = f"mlp.experts.local_experts.{grouped[2]}.{grouped[1]}.weight"
    return f"decoder.layers.{layer}.{_FUSED_NORMS.get(rest, rest)}"


def to_te(name: str, *, moe: bool = False) -> str:
    """The Transformer Engine spelling of a local name. In MoE layers TE keeps the norm before the MLP separate."""
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, rest = found.groups()
    if local := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.{local[2]}.weight{local[1]}"
    for te, plain in _FUSED_NORMS.items():
        if rest == plain and not (moe and te.startswith("mlp.")):
            rest = te
    return f"decoder.layers.{layer}.{rest}"


def to_canonical(name: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """A live parameter's name (either spelling, this rank's indices) as the table has it: local, global indices."""
    name = to_local(name)
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, rest = int(found[1]) + layer_offset, found[2]
    if expert := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.local_experts.{int(expert[1]) + expert_offset}.{expert[2]}.weight"
    return f"decoder.layers.{layer}.{rest}"
