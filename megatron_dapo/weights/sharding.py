"""The tensors of one mapping: from HF tensors to the full Megatron tensor, to a rank's shard, and back.

Pure slicing. Nothing is copied without need, and no process group is used: ranks and sizes are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_dapo.weights.mapping import ParameterMapping, Split, WeightsError


def megatron_tensor(mapping: ParameterMapping, hf: Mapping[str, Tensor]) -> Tensor:
    """The full Megatron tensor (without vocabulary padding) from its HF tensors."""
    pieces = [hf[name] for name in mapping.hf]
    for name, piece, shape in zip(mapping.hf, pieces, mapping.hf_shapes, strict=True):
        if tuple(piece.shape) != shape:
            raise WeightsError(f"{name}: shape {tuple(piece.shape)}, but the model's config.json says {shape}")
    if len(mapping.segments) == 1:
        return pieces[0]
    return torch.cat([pieces[s.source].narrow(0, s.hf_start, s.rows) for s in mapping.segments])


def hf_tensors(mapping: ParameterMapping, full: Tensor) -> dict[str, Tensor]:
    """The HF tensors from the full Megatron tensor; vocabulary padding is dropped."""
    if mapping.vocabulary:
        full = full.narrow(0, 0, mapping.shape[0])
    if tuple(full.shape) != mapping.shape:
        raise WeightsError(f"{mapping.name}: shape {tuple(full.shape)}, but the model has {mapping.shape}")
    if len(mapping.segments) == 1:
        return {mapping.hf[0]: full}
    out = {}
    for source, name in enumerate(mapping.hf):
        pieces = [full.narrow(0, s.start, s.rows) for s in mapping.segments_of(source)]
        out[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out


def _part(tensor: Tensor, dim: int, rank: int, size: int, name: str) -> Tensor:
    if tensor.shape[dim] % size:
        raise WeightsError(f"{name}: {tensor.shape[dim]} entries of dimension {dim} cannot be split over {size} ranks")
    step = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * step, step)


def shard(mapping: ParameterMapping, full: Tensor, rank: int, size: int, *, rows: int | None = None) -> Tensor:
    """What tensor-parallel rank `rank` of `size` holds. `rows`: of the full tensor with vocabulary padding."""
    if mapping.vocabulary and rows is not None and rows != full.shape[0]:
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if mapping.split is Split.NONE or size == 1:
        return full
    if mapping.split is Split.PARTS:
        return torch.cat([_part(part, 0, rank, size, mapping.name) for part in full.split(mapping.parts)])
    return _part(full, 0 if mapping.split is Split.ROWS else 1, rank, size, mapping.name)


def unshard(mapping: ParameterMapping, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor (vocabulary padding included) from every tensor-parallel rank's shard, in rank order."""
    if mapping.split is Split.NONE or len(shards) == 1:
        return shards[0]
    if mapping.split is Split.PARTS:
        split = [shard.split([rows // len(shards) for rows in mapping.parts]) for shard in shards]
        return torch.cat([part for parts in zip(*split, strict=True) for part in parts])
    return torch.cat(list(shards), dim=0 if mapping.split is Split.ROWS else 1)


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A block of a shard and its place in HF tensor number `source`: `rows` rows, and all columns or `columns`."""

    source: int
    hf_row: int
    shard_row: int
    rows: int
    columns: tuple[int, int] | None = None  # of the HF tensor: first column and their number


def shard_copies(mapping: ParameterMapping, rank: int, size: int, shape: Sequence[int]) -> list[ShardCopy]:
    """How the shard (of this shape) of tensor-parallel rank `rank` of `size` fills the HF tensors. Together the shards
    fill every element once; vocabulary padding is left out."""
    columns = None
    if mapping.split is Split.NONE or size == 1:
        parts = [(0, 0, shape[0])]  # (row of the full tensor, row of the shard, rows)
    elif mapping.split is Split.PARTS:
        starts = accumulate(mapping.parts, initial=0)
        parts = [
            (start + rank * (rows // size), start // size, rows // size)
            for start, rows in zip(starts, mapping.parts, strict=False)  # the last start is the end
        ]
    elif mapping.split is Split.ROWS:
        parts = [(rank * shape[0], 0, shape[0])]
    else:
        parts, columns = [(0, 0, shape[0])], (rank * shape[1], shape[1])
    return [
        ShardCopy(s.source, s.hf_start + first - s.start, shard_row + first - full_row, last - first, columns)
        for full_row, shard_row, rows in parts
        for s in mapping.segments
        if (first := max(full_row, s.start)) < (last := min(full_row + rows, s.start + s.rows))
    ]
