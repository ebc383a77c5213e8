"""Writes an HF checkpoint: shards with their headers, and the index."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import INDEX, SINGLE, safetensors_header
from megatron_dapo.weights.check import HEAD
from megatron_dapo.weights.copy import OutputFile, RowRange, TensorWrite
from megatron_dapo.weights.mapping import EMBEDDING, ParameterMapping, stored_mappings

MAX_SHARD = 5 * 10**9


@dataclass(slots=True)
class _Shard:
    tensors: list[tuple[str, ParameterMapping, int, torch.dtype]] = field(default_factory=list)
    nbytes: int = 0

    def header(self) -> bytes:
        return safetensors_header(
            (name, dtype, mapping.hf_shapes[source]) for name, mapping, source, dtype in self.tensors
        )


class HFWriter:
    """Fixes which tensor goes where in which file; `weights.copy` then fills the files in any order."""

    def __init__(
        self, shape: ModelShape, dtypes: dict[str, torch.dtype], *, max_shard: int = MAX_SHARD, tied_head: bool = False
    ) -> None:
        """`dtypes`: by canonical Megatron name. `tied_head`: store the head of a tied model, too."""
        self.shape = shape
        self._shards = [_Shard()]
        mappings = stored_mappings(shape)
        if tied_head:
            mappings += [replace(mapping, hf=(HEAD,)) for mapping in mappings if mapping.name == EMBEDDING]
        for mapping in mappings:
            for source, name in enumerate(mapping.hf):
                size = math.prod(mapping.hf_shapes[source]) * dtypes[mapping.name].itemsize
                if self._shards[-1].nbytes and self._shards[-1].nbytes + size > max_shard:
                    self._shards.append(_Shard())
                self._shards[-1].tensors.append((name, mapping, source, dtypes[mapping.name]))
                self._shards[-1].nbytes += size
        self._headers = [shard.header() for shard in self._shards]
        self.writes = [write for i in range(len(self._shards)) for write in self._writes(i)]

    @property
    def weight_bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    @property
    def total(self) -> int:
        return self.weight_bytes + sum(len(header) for header in self._headers)

    def files(self, directory: Path) -> list[OutputFile]:
        return [
            OutputFile(directory / self._name(i), len(self._headers[i]) + shard.nbytes, self._headers[i])
            for i, shard in enumerate(self._shards)
        ]

    def write_index(self, directory: Path) -> None:
        if len(self._shards) == 1:
            return
        where = {name: self._name(i) for i, shard in enumerate(self._shards) for name, *_ in shard.tensors}
        index = {"metadata": {"total_size": self.weight_bytes}, "weight_map": dict(sorted(where.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _writes(self, number: int) -> list[TensorWrite]:
        writes, at = [], len(self._headers[number])
        for _, mapping, source, dtype in self._shards[number].tensors:
            ranges = tuple(RowRange(mapping.name, s.start, s.rows) for s in mapping.segments if s.source == source)
            writes.append(TensorWrite(number, at, dtype, ranges))
            at += math.prod(mapping.hf_shapes[source]) * dtype.itemsize
        return writes
