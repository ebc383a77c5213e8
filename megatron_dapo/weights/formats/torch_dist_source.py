"""A torch_dist checkpoint as HF-named tensors, so that whatever loads HF weights can load it, too.

Tensors are put together from the memory-mapped files when they are asked for, through the same table and the same
checks as the converters; no pickle is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.torch_dist_reader import TorchDistDirectory
from megatron_dapo.weights.mapping import stored_rows


class TorchDistSource(Mapping[str, Tensor]):
    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        self.path = Path(path)
        self._files = TorchDistDirectory(path, shape)
        self._where = {name: (row, source) for row in stored_rows(shape) for source, name in enumerate(row.hf)}

    def __getitem__(self, name: str) -> Tensor:
        row, source = self._where[name]
        parts = [self._files.rows(row.name, s.start, s.rows) for s in row.segments if s.source == source]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
