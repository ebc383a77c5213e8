"""Name, type and shape of tensors, and their places in one block of bytes: one after the other, without gaps. Large
elements come first, so every tensor starts at a multiple of its element size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Name, type and shape of one tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_flat_order(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The order of the tensors in the block."""
    return tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))


def flat_size(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.bytes for spec in specs)


def flat_starts(specs: Sequence[TensorSpec]) -> list[int]:
    """The first byte of each tensor, and the end of the last."""
    return list(accumulate((spec.bytes for spec in specs), initial=0))
