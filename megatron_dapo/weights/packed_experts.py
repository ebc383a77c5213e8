"""Files that hold all experts of a layer in one tensor, as some Qwen3.5-MoE files do.

`mlp.experts.gate_up_proj` is [experts, gate rows then up rows, hidden], `mlp.experts.down_proj` is [experts, hidden,
rows]. Both are the experts' own tensors one after the other. So a reader sees the usual names, each a part of the
packed tensor's bytes (`files.unpacked`), and a writer writes the experts in that order under one header entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

_SINGLE = re.compile(r"^(model\..+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


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
