"""Parameters that consist of pieces in memory-mapped files, as the readers of Megatron checkpoints find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import StoredTensor
from megatron_dapo.weights.formats.mapped_file import WeightFiles, rows_of, tensor_over
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
        self._files = WeightFiles()

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[name]

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a parameter: a view of the file if one piece holds them all, else a copy."""
        if (piece := self._holding(name, start, count)) is not None:
            return self._view(piece).narrow(0, start - piece.row, count)
        found, width = self._overlapping(name, start, count), self._columns(name)
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

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Like `rows`; rows of one piece are in a buffer that this thread's next call overwrites."""
        if (piece := self._holding(name, start, count)) is not None:
            return self._files.read(rows_of(piece.stored, start - piece.row, count))
        return self.rows(name, start, count)

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        """The rows as runs of bytes in files, in order: number of rows, and where they are; None if they have to be
        put together from several places."""
        found = sorted(self._overlapping(name, start, count), key=lambda p: p.row)
        if any(p.columns != self._columns(name) for p in found):
            yield count, None
            return
        for p in found:
            low, high = max(start, p.row) - p.row, min(start + count, p.row + p.rows) - p.row
            yield high - low, rows_of(p.stored, low, high - low)

    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None:
        """Bytes [skip, skip + len(view)) of a stored tensor."""
        self._files.read_into(stored, skip, view)

    def prefetch(self, stored: StoredTensor, skip: int, nbytes: int) -> None:
        """Ask the kernel to read bytes of a stored tensor from disk, without waiting."""
        self._files.prefetch(stored.file, stored.offset + skip, nbytes)

    def _holding(self, name: str, start: int, count: int) -> Piece | None:
        """The piece that holds all these rows, if one does."""
        for p in self.pieces[name]:
            if p.row <= start and start + count <= p.row + p.rows:
                return p if p.columns == self._columns(name) else None
        return None

    def _columns(self, name: str) -> int:
        return max(p.column + p.columns for p in self.pieces[name])

    def files(self) -> list[Path]:
        return sorted({piece.stored.file for pieces in self.pieces.values() for piece in pieces})

    def _overlapping(self, name: str, start: int, count: int) -> list[Piece]:
        return [p for p in self.pieces[name] if p.row < start + count and start < p.row + p.rows]

    def _view(self, piece: Piece) -> Tensor:
        return tensor_over(self._files.map(piece.stored.file), piece.stored)


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
