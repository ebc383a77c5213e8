"""Tensors of one table row: HF pieces to a full Megatron tensor, to a rank's shard, and back. Pure slicing, no copies
of what is not needed, no process groups: ranks and sizes are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_dapo.errors import UserError
from megatron_dapo.weights.mapping import Row, Split


class WeightsError(UserError):
    """Weights that do not fit: names the tensor, what was expected and what was found."""


def megatron_tensor(row: Row, hf: Mapping[str, Tensor]) -> Tensor:
    """The full Megatron tensor of a row (no vocabulary padding) from its HF tensors."""
    pieces = [hf[name] for name in row.hf]
    for name, piece, shape in zip(row.hf, pieces, row.hf_shapes, strict=True):
        if tuple(piece.shape) != shape:
            raise WeightsError(f"{name}: shape {tuple(piece.shape)}, but the model's config.json says {shape}")
    if len(row.segments) == 1:
        return pieces[0]
    return torch.cat([pieces[s.source].narrow(0, s.hf_start, s.rows) for s in row.segments])


def hf_tensors(row: Row, full: Tensor) -> dict[str, Tensor]:
    """The HF tensors of a row from the full Megatron tensor; padding rows of a vocabulary are dropped."""
    if row.vocabulary:
        full = full.narrow(0, 0, row.shape[0])
    if tuple(full.shape) != row.shape:
        raise WeightsError(f"{row.name}: shape {tuple(full.shape)}, but the model has {row.shape}")
    if len(row.segments) == 1:
        return {row.hf[0]: full}
    out = {}
    for source, name in enumerate(row.hf):  # a row's segments keep the order of each HF tensor's rows
        pieces = [full.narrow(0, s.start, s.rows) for s in row.segments if s.source == source]
        out[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out


def _part(tensor: Tensor, dim: int, rank: int, size: int, name: str) -> Tensor:
    if tensor.shape[dim] % size:
        raise WeightsError(f"{name}: {tensor.shape[dim]} entries of dimension {dim} cannot be shared by {size} ranks")
    step = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * step, step)


def shard(row: Row, full: Tensor, rank: int, size: int, *, rows: int | None = None) -> Tensor:
    """What tensor-parallel rank `rank` of `size` holds. `rows`: the full row count with vocabulary padding."""
    if row.vocabulary and rows is not None and rows != full.shape[0]:
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if row.split is Split.NONE or size == 1:
        return full
    if row.split is Split.GATE_UP_ROWS:
        return torch.cat([_part(half, 0, rank, size, row.name) for half in full.chunk(2)])
    return _part(full, 0 if row.split is Split.ROWS else 1, rank, size, row.name)


def unshard(row: Row, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor (vocabulary padding included) from every tensor-parallel rank's shard, in rank order."""
    if row.split is Split.NONE or len(shards) == 1:
        return shards[0]
    if row.split is Split.GATE_UP_ROWS:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=0 if row.split is Split.ROWS else 1)
