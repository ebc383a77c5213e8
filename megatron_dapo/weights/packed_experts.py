"""Files that hold all experts of a layer in one tensor, as some Qwen3.5-MoE files do.

`mlp.experts.gate_up_proj` is [experts, gate rows then up rows, hidden], `mlp.experts.down_proj` is [experts, hidden,
rows]. Both are the experts' own tensors one after the other. So a reader sees the usual names, each a part of the
packed tensor's bytes, and a writer writes the experts in that order under one header entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from megatron_dapo.files import ITEM_SIZES, StoredTensor

_PACKED = re.compile(r"^(model\..+\.mlp\.experts)\.(gate_up|down)_proj$")
_SINGLE = re.compile(r"^(model\..+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def is_packed(stored: Iterable[str]) -> bool:
    return any(_PACKED.match(name) for name in stored)


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors with one name per expert and projection."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _PACKED.match(name)
        if match is None or len(tensor.shape) != 3:
            found[name] = tensor
            continue
        parts = _PARTS[match[2]]
        shape = (tensor.shape[1] // len(parts), tensor.shape[2])
        size = shape[0] * shape[1] * ITEM_SIZES[tensor.dtype]
        for expert in range(tensor.shape[0]):
            for i, part in enumerate(parts):
                single = f"{match[1]}.{expert}.{part}_proj.weight"
                offset = tensor.offset + (expert * len(parts) + i) * size
                found[single] = replace(tensor, name=single, shape=shape, offset=offset)
    return found


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
