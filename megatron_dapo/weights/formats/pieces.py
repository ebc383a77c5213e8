"""Parameters that consist of pieces in memory-mapped files, as the readers of Megatron checkpoints find them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import StoredTensor
from megatron_dapo.weights.formats.mapped_file import map_file, prefetch_pages, release_pages, tensor_over
from megatron_dapo.weights.mapping import WeightsError


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one parameter: a block of rows and columns (of a vector: consecutive entries), and its bytes."""

    row: int
    column: int
    rows: int
    columns: int
    stored: StoredTensor


class PieceReader:
    """The weights of a Megatron checkpoint, by canonical name. A subclass fills `pieces` and `dtypes`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[name]

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a parameter: a view of the file if one piece holds them all, else a copy."""
        found = self._overlapping(name, start, count)
        if len(found) == 1 and found[0].row <= start and start + count <= found[0].row + found[0].rows:
            return self._view(found[0]).narrow(0, start - found[0].row, count)
        width = max(p.column + p.columns for p in found)
        out = torch.empty((count, width), dtype=self.dtypes[name])
        for p in found:
            low, high = max(start, p.row), min(start + count, p.row + p.rows)
            part = self._view(p).reshape(p.rows, p.columns).narrow(0, low - p.row, high - low)
            out[low - start : high - start, p.column : p.column + p.columns] = part
        flat = len(self.pieces[name][0].stored.shape) == 1
        return out.view(-1) if flat else out

    def where(self, name: str) -> str:
        """The file and tensor that hold a parameter, for messages."""
        return f"{self.pieces[name][0].stored.file}: tensor {self.pieces[name][0].stored.name}"

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Ask the kernel to read rows from disk, without waiting."""
        for place in self._bytes(name, start, count):
            prefetch_pages(*place)

    def release(self, name: str, start: int, count: int) -> None:
        """Drop rows that were read from this process's memory; they stay in the page cache."""
        for place in self._bytes(name, start, count):
            release_pages(*place)

    def _bytes(self, name: str, start: int, count: int) -> Iterator[tuple[mmap.mmap, int, int]]:
        for p in self._overlapping(name, start, count):
            low, high = max(start, p.row) - p.row, min(start + count, p.row + p.rows) - p.row
            width = p.columns * self.dtypes[name].itemsize
            yield self._map(p.stored.file), p.stored.offset + low * width, (high - low) * width

    def files(self) -> list[Path]:
        return sorted({piece.stored.file for pieces in self.pieces.values() for piece in pieces})

    def _overlapping(self, name: str, start: int, count: int) -> list[Piece]:
        return [p for p in self.pieces[name] if p.row < start + count and start < p.row + p.rows]

    def _view(self, piece: Piece) -> Tensor:
        return tensor_over(self._map(piece.stored.file), piece.stored)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(file)
        return self._maps[file]


def check_cover(where: str, pieces: list[Piece], rows: int, columns: int) -> None:
    """The pieces cover the parameter exactly once."""
    area = sum(p.rows * p.columns for p in pieces)
    outside = any(p.row + p.rows > rows or p.column + p.columns > columns for p in pieces)
    overlap = any(
        a.row < b.row + b.rows and b.row < a.row + a.rows
        and a.column < b.column + b.columns and b.column < a.column + a.columns
        for a, b in combinations(pieces, 2)
    )  # fmt: skip
    if area != rows * columns or outside or overlap:
        raise WeightsError(f"{where}: its {len(pieces)} chunks do not cover it exactly once; the checkpoint is damaged")
