"""Opens a Megatron checkpoint of either format, and presents one as HF tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.legacy_reader import LegacyReader
from megatron_dapo.weights.formats.pieces import PieceReader
from megatron_dapo.weights.formats.torch_dist_reader import TorchDistReader
from megatron_dapo.weights.locate import Format, format_of, locate
from megatron_dapo.weights.mapping import WeightsError, stored_mappings


def open_megatron(path: str | os.PathLike[str], shape: ModelShape, step: int | None = None) -> PieceReader:
    """The weights of the Megatron checkpoint that `path` means (`weights.locate`)."""
    folder = locate(Path(path), step)
    if format_of(folder) is Format.HF:
        raise WeightsError(f"{folder} is a HF model; expected a Megatron checkpoint")
    return LegacyReader(folder, shape) if format_of(folder) is Format.LEGACY else TorchDistReader(folder, shape)


class MegatronAsHF(Mapping[str, Tensor]):
    """A Megatron checkpoint as HF-named tensors, for code that loads HF weights; assembled on access."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        self.path = Path(path)
        self._reader = open_megatron(path, shape)
        self._mappings = {name: (m, source) for m in stored_mappings(shape) for source, name in enumerate(m.hf)}

    def __getitem__(self, name: str) -> Tensor:
        mapping, source = self._mappings[name]
        parts = [self._reader.rows(mapping.name, s.start, s.rows) for s in mapping.segments_of(source)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings)

    def __len__(self) -> int:
        return len(self._mappings)
