"""Writes an HF checkpoint: shards with their headers, and the index."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from megatron_dapo.config.families.tensors import EMBEDDING
from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import SINGLE, Dtype, safetensors_header, write_index
from megatron_dapo.weights.copy import OutputFile, RowRange, TensorWrite
from megatron_dapo.weights.mapping import HEAD, ParameterMapping, stored_mappings
from megatron_dapo.weights.names import packed, packing_order

MAX_SHARD = 5 * 10**9


@dataclass(slots=True)
class _Shard:
    tensors: list[tuple[str, ParameterMapping, int, Dtype]] = field(default_factory=list)
    nbytes: int = 0

    def stored(self, pack: bool) -> list[tuple[str, Dtype, tuple[int, ...]]]:
        """(name, dtype, shape), in the order of the file."""
        found = [(name, dtype, mapping.hf_shapes[source]) for name, mapping, source, dtype in self.tensors]
        return packed(found) if pack else found


class HFWriter:
    """Fixes which tensor goes where in which file; `weights.copy` then fills the files in any order."""

    def __init__(
        self,
        shape: ModelShape,
        dtypes: dict[str, Dtype],
        *,
        max_shard: int = MAX_SHARD,
        tied_head: bool = False,
        pack: bool = False,
    ) -> None:
        """`dtypes`: by canonical Megatron name. `tied_head`: store the head of a tied model, too. `pack`: store all
        experts of a layer in one tensor (`weights.names`)."""
        self.shape = shape
        self._pack = pack
        self._shards = [_Shard()]
        mappings = stored_mappings(shape)
        if tied_head:
            mappings += [replace(mapping, hf=(HEAD,)) for mapping in mappings if mapping.name == EMBEDDING]
        tensors = [(name, m, source, dtypes[m.name]) for m in mappings for source, name in enumerate(m.hf)]
        if pack:
            tensors.sort(key=lambda t: (-1 if t[1].layer is None else t[1].layer, packing_order(t[0])))
        for _, group in groupby(tensors, key=lambda t: (packing_order(t[0])[0] if pack else "") or t[0]):
            together = list(group)
            size = sum(math.prod(m.hf_shapes[source]) * dtype.itemsize for _, m, source, dtype in together)
            if self._shards[-1].nbytes and self._shards[-1].nbytes + size > max_shard:
                self._shards.append(_Shard())
            self._shards[-1].tensors += together
            self._shards[-1].nbytes += size
        self._headers = [safetensors_header(shard.stored(pack)) for shard in self._shards]
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
        where = {name: self._name(i) for i, shard in enumerate(self._shards) for name, *_ in shard.stored(self._pack)}
        write_index(directory, where, self.weight_bytes)

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _writes(self, number: int) -> list[TensorWrite]:
        writes, at = [], len(self._headers[number])
        for _, mapping, source, dtype in self._shards[number].tensors:
            ranges = tuple(RowRange(mapping.name, s.start, s.rows) for s in mapping.segments_of(source))
            writes.append(TensorWrite(number, at, dtype, ranges))
            at += math.prod(mapping.hf_shapes[source]) * dtype.itemsize
        return writes
