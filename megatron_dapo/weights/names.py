"""Spellings of Megatron parameter names: live modules (local or Transformer Engine), checkpoints, and canonical.

Transformer Engine fuses a norm into the linear layer after it (`linear_qkv.layer_norm_weight`) and keeps a rank's
experts in one grouped layer (`mlp.experts.linear_fc1.weight5`). Megatron's local modules name each parameter
separately; canonical names are the local ones with global layer and expert indices. Some HF files hold all experts of a
layer in one tensor (`packed`), as some of Qwen3.5-MoE do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_dapo.config.model import ModelShape

SCALE = "_scale_inv"  # what the fp8 format appends to the name of a weight
# What follows `decoder.layers.N.`: Transformer Engine's spelling to the local one.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_DELTA_NORM = "self_attention.in_proj.layer_norm_weight"  # before a gated DeltaNet
# Of a gated DeltaNet, checkpoints store each part as a tensor of its own.
_DELTA_PARTS = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_SINGLE = re.compile(r"^(model\..+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


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
    """The canonical name of a live parameter (either spelling, with this rank's layer and expert indices), without the
    `module.` prefixes of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, rest = int(found[1]) + layer_offset, found[2]
    rest = "input_layernorm.weight" if rest == _DELTA_NORM else _FUSED_NORMS.get(rest, rest)
    rest = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", rest)
    if expert := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.local_experts.{int(expert[1]) + expert_offset}.{expert[2]}.weight"
    return f"decoder.layers.{layer}.{rest}"


@dataclass(frozen=True, slots=True)
class DiskLocation:
    """Where a checkpoint stores one parameter: at `index` of the leading axes of the tensors `keys`.

    There are several keys where the parts of a parameter are separate tensors: gate and up, or those of a DeltaNet.
    """

    keys: tuple[str, ...]
    index: tuple[int, ...]


def disk_locations(name: str, shape: ModelShape) -> list[DiskLocation]:
    """Every location where Megatron may store the parameter with this canonical name. We write the first one.

    By default, layers are stacked in one tensor with a layer axis, then an expert axis. With `non_homogeneous_layers`
    there is one tensor per layer. With `singleton_local_shards` there is also one per expert, and gate and up are
    separate. A model whose layers differ always has one tensor per layer. Norms have their Transformer Engine names;
    a MoE model of local modules names its second norm like a dense one.
    """
    found = _LAYER.match(name)
    if found is None:
        return [DiskLocation((name,), ())]
    layer, rest = int(found[1]), found[2]
    expert = _LOCAL_EXPERT.match(rest)
    stacked: list[tuple[str, tuple[int, ...]]]
    if expert:
        number, stem = int(expert[1]), f"{expert[2]}.weight"
        stacked = [(f"mlp.experts.experts.{stem}", (number,))]
        single = f"mlp.experts.experts.{number}.{stem}"
    else:
        spellings = dict.fromkeys([to_te(name, moe=shape.has_experts(layer)), to_te(name), name])
        stacked = [(spelling.split(".", 3)[3], ()) for spelling in spellings]
        single = stacked[0][0]
    locations = [DiskLocation((f"decoder.layers.{stem}",), (layer, *index)) for stem, index in stacked]
    if shape.layers_differ:
        locations = []
        if rest in _DELTA_PARTS:
            return [DiskLocation(tuple(f"decoder.layers.{layer}.{rest}.{part}" for part in _DELTA_PARTS[rest]), ())]
        if layer in shape.linear_layers and rest == "input_layernorm.weight":
            stacked = [(_DELTA_NORM, ()), (rest, ())]
            single = _DELTA_NORM
    locations += [DiskLocation((f"decoder.layers.{layer}.{stem}",), index) for stem, index in stacked]
    halves = ("_w", "_v") if "linear_fc1.weight" in single else ("",)
    locations.append(DiskLocation(tuple(f"decoder.layers.{layer}.{single}{half}" for half in halves), ()))
    return locations


def disk_aliases(name: str, shape: ModelShape) -> list[str]:
    """More keys under which a model may look for this parameter. They cost no space: metadata may list bytes twice."""
    found = _LAYER.match(name)
    if found is None or found[2] != "pre_mlp_layernorm.weight" or not shape.has_experts(int(found[1])):
        return []
    stack = f"decoder.layers.{found[1]}" if shape.layers_differ else "decoder.layers"
    return [f"{stack}.mlp.linear_fc1.layer_norm_weight"]  # local modules use this name in every layer


def packing_order(name: str) -> tuple[str, int, int]:
    """Sorts the tensors of a layer so that those of one packed tensor are consecutive."""
    match = _SINGLE.match(name)
    if match is None:
        return "", 0, 0
    return _packed_name(match), int(match[2]), int(match[3] == "up")


def packed(tensors: Iterable[tuple[str, Any, tuple[int, ...]]]) -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, dtype, shape) of the tensors as they are in the file, from those of the experts in packing order."""
    found: list[tuple[str, Any, tuple[int, ...]]] = []
    for name, group in groupby(tensors, key=lambda tensor: packing_order(tensor[0])[0]):
        several = list(group)
        if not name:
            found += several
            continue
        parts = 2 if name.endswith("gate_up_proj") else 1
        rows, columns = several[0][2]
        found.append((name, several[0][1], (len(several) // parts, parts * rows, columns)))
    return found


def _packed_name(match: re.Match[str]) -> str:
    return f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj"
