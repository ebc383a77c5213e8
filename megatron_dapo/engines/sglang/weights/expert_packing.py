"""Describes the experts in a bucket as few large tensors, so that SGLang does not search a name for each matrix.

In a bucket the matrices of an expert (gate, up, down) follow each other, and so do the experts of a layer. A run of n
experts is therefore one block of memory: [n, 3 * rows of gate, columns of gate]. Only the description that goes to the
servers changes: the memory, the manifest and the snapshot stay as they are. The servers load such a block with a
module of ours (in_server/megatron_dapo_experts.py). Matrices of an expert that a bucket does not have completely, and
everything else, keep their names. Scales of fp8 weights are packed like the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_dapo.sync.bucket import TensorSpec

PREFIX = "experts::"
_MATRIX = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)$")
_ORDER = ("gate", "up", "down")


def packed(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same memory, with `experts::LAYER::FIRST EXPERT::weight` for every run of whole experts."""
    found: list[TensorSpec] = []
    waiting: list[TensorSpec] = []  # matrices of an expert that is not complete
    for spec in specs:
        if len(waiting) < len(_ORDER) and _continues(waiting, spec):
            waiting.append(spec)
        else:
            found += waiting
            waiting = [spec] if _continues([], spec) else []
            found += [] if waiting else [spec]
        if len(waiting) == len(_ORDER):
            _add_expert(found, waiting)
            waiting = []
    return tuple(found + waiting)


def _continues(waiting: list[TensorSpec], spec: TensorSpec) -> bool:
    """Whether `spec` is the next matrix of the expert whose first ones are `waiting`."""
    match = _MATRIX.match(spec.name)
    if match is None or len(spec.shape) != 2 or match[3] != _ORDER[len(waiting)]:
        return False
    if not waiting:
        return True
    first = waiting[0]
    before = _MATRIX.match(first.name)
    assert before is not None
    shape = first.shape if match[3] == "up" else first.shape[::-1]
    return match.group(1, 2, 4) == before.group(1, 2, 4) and (spec.dtype, spec.shape) == (first.dtype, shape)


def _add_expert(found: list[TensorSpec], matrices: list[TensorSpec]) -> None:
    """Appends one expert, to the last run if it is the next one of it."""
    gate = matrices[0]
    match = _MATRIX.match(gate.name)
    assert match is not None
    layer, expert, _, kind = match.groups()
    one = (3 * gate.shape[0], gate.shape[1])
    if found and found[-1].name.startswith(PREFIX):
        last, (count, *size) = found[-1], found[-1].shape
        _, its_layer, first, its_kind = last.name.split("::")
        same = (its_layer, its_kind, last.dtype, tuple(size)) == (layer, kind, gate.dtype, one)
        if same and int(first) + count == int(expert):
            found[-1] = TensorSpec(last.name, last.dtype, (count + 1, *one))
            return
    found.append(TensorSpec(f"{PREFIX}{layer}::{expert}::{kind}", gate.dtype, (1, *one)))
