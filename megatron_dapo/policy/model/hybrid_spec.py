"""Puts gated DeltaNet layers into a block spec, where the model has them instead of attention."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dapo.config.model import LinearAttention
from megatron_dapo.policy.model.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

NORM_KEY = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}  # where Megatron's own layer stores this norm


def use_gated_delta_net(spec: Any, config: Any, vp_stage: int | None, linear: LinearAttention) -> None:
    """Changes the layers of this stage that `linear` names; the others stay as they are."""
    first = get_transformer_layer_offset(config, vp_stage)
    spec.layer_specs = [
        _delta_layer(layer, linear) if first + i in linear.layers else layer for i, layer in enumerate(spec.layer_specs)
    ]


def _delta_layer(layer: ModuleSpec, linear: LinearAttention) -> ModuleSpec:
    layer = copy.deepcopy(layer)
    submodules, attention = layer.submodules, layer.submodules.self_attention.submodules
    in_proj, out_proj, norm = attention.linear_qkv, attention.linear_proj, submodules.input_layernorm
    if _fuses_norm(in_proj):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        in_proj, norm = TEColumnParallelLinear, TENorm
    submodules.input_layernorm = norm
    submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet, params={"linear": linear}, submodules=GatedDeltaNetSubmodules(in_proj, out_proj)
    )
    known = {k: v for k, v in submodules.sharded_state_dict_keys_map.items() if not k.startswith("input_layernorm")}
    submodules.sharded_state_dict_keys_map = known | NORM_KEY
    return layer


def _fuses_norm(linear: Any) -> bool:
    return "LayerNorm" in getattr(linear, "__name__", "")
