"""Writes a torch_dist checkpoint: which file holds which chunk, and the metadata that says so.

Layers are stacked along a leading axis and names are Transformer Engine's, as when Megatron itself saves a GPT model.
On loading, modules look for an `_extra_state` object even if they have none; all these keys refer to one empty object.
The small files are those that Megatron-LM's own save writes (`small_files`): it and other tools read the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype
from megatron_dapo.weights.copy import OutputFile, RowRange, TensorWrite
from megatron_dapo.weights.formats.small_files import (
    Stored,
    common_state,
    description_files,
    megatron_args,
    torch_dist_metadata,
)
from megatron_dapo.weights.formats.torch_zip import ALIGN, object_archive, tensor_archive
from megatron_dapo.weights.mapping import ParameterMapping, WeightsError, stored_mappings
from megatron_dapo.weights.names import disk_aliases, disk_locations

MAX_CHUNK = 128 * 2**20  # a rank that needs part of a chunk reads all of it
MAX_FILE = 4 * 2**30

_HAS_STATE = re.compile(r"(linear_\w+|\w*layernorm|in_proj|out_proj)\.weight$")  # modules with an `_extra_state`


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """One chunk: consecutive rows of one parameter, and where they are written."""

    key: str
    index: tuple[int, ...]
    mapping: ParameterMapping
    start: int  # in the tensor `key`
    rows: int
    total: int  # rows of the tensor `key`
    write: TensorWrite

    @property
    def offsets(self) -> tuple[int, ...]:
        return (*self.index, self.start, *(0 for _ in self.mapping.shape[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*(1 for _ in self.index), self.rows, *self.mapping.shape[1:])


class TorchDistWriter:
    """Fixes which chunk goes where in which file; `weights.copy` then fills the files in any order."""

    def __init__(self, shape: ModelShape, dtypes: dict[str, Dtype], *, files: int = 1) -> None:
        """`dtypes`: by canonical name. `files`: minimum number of files, if there are enough bytes."""
        self.shape = shape
        mappings = stored_mappings(shape)
        self.weight_bytes = sum(math.prod(mapping.shape) * dtypes[mapping.name].itemsize for mapping in mappings)
        self._limit = max(ALIGN, min(MAX_FILE, -(-self.weight_bytes // files)))
        self._dtypes: dict[str, Dtype] = {}
        self._sizes = [0]
        self._empty = object_archive([None])
        self._empty_at = self._reserve(len(self._empty))
        self.chunks = [chunk for mapping in mappings for chunk in self._chunks(mapping, dtypes[mapping.name])]

    @property
    def total(self) -> int:
        return sum(self._sizes)

    @property
    def writes(self) -> list[TensorWrite]:
        return [chunk.write for chunk in self.chunks]

    def files(self, directory: Path) -> list[OutputFile]:
        files = [OutputFile(directory / _file_name(i), size) for i, size in enumerate(self._sizes)]
        files[0].head = self._empty
        return files

    def _reserve(self, length: int) -> int:
        """Reserve space in the current file, or in a new one when it is full. Returns the offset."""
        at = -(-self._sizes[-1] // ALIGN) * ALIGN
        if self._sizes[-1] and at + length > self._limit + len(self._empty):
            self._sizes.append(0)
            at = 0
        self._sizes[-1] = at + length
        return at

    def _chunks(self, mapping: ParameterMapping, dtype: Dtype) -> Iterator[ChunkWrite]:
        (location, *_) = disk_locations(mapping.name, self.shape)
        if self._dtypes.setdefault(location.keys[0], dtype) != dtype:
            raise WeightsError(
                f"tensor {mapping.hf[0]} is {dtype}, in other layers {self._dtypes[location.keys[0]]}; "
                "pass --dtype to convert all"
            )
        width = math.prod(mapping.shape[1:]) * dtype.itemsize
        step = max(1, MAX_CHUNK // width)
        lead, first = tuple(1 for _ in location.index), 0
        for part, size in enumerate(mapping.parts or mapping.shape[:1]):  # a tensor-parallel rank reads a share of each
            one_key = len(location.keys) == 1
            key = location.keys[0 if one_key else part]
            total, base = (mapping.shape[0], 0) if one_key else (size, first)
            for start in range(first, first + size, step):
                count = min(step, first + size - start)
                archive = tensor_archive(dtype, (*lead, count, *mapping.shape[1:]))
                at = self._reserve(archive.length)
                write = TensorWrite(len(self._sizes) - 1, at, dtype, hf_ranges(mapping, start, count), archive)
                yield ChunkWrite(key, location.index, mapping, start - base, count, total, write)
            first += size

    def metadata(self) -> bytes:
        """The content of `.metadata`."""
        return torch_dist_metadata(self._stored())

    def write_metadata(self, directory: Path, metadata: bytes) -> None:
        """Write the small files of a checkpoint."""
        for name, content in description_files(
            metadata, object_archive(common_state(megatron_args(self.shape)))
        ).items():
            (directory / name).write_bytes(content)

    def _stored(self) -> Iterator[Stored]:
        for chunk in self.chunks:
            write = chunk.write
            assert write.archive
            place = (_file_name(write.file), write.offset, write.archive.length)
            for key in (chunk.key, *disk_aliases(chunk.mapping.name, self.shape)):
                yield Stored(key, *place, write.dtype, self._global_shape(chunk), chunk.offsets, chunk.sizes)
        for key in extra_states(self.shape):
            yield Stored(key, _file_name(0), self._empty_at, len(self._empty))

    def _global_shape(self, chunk: ChunkWrite) -> tuple[int, ...]:
        axes = (self.shape.experts,) if self.shape.layers_differ else (self.shape.layers, self.shape.experts)
        return (*axes[: len(chunk.index)], chunk.total, *chunk.mapping.shape[1:])


def hf_ranges(mapping: ParameterMapping, start: int, count: int) -> tuple[RowRange, ...]:
    """The HF rows that make up rows [start, start + count) of a Megatron tensor."""
    found = []
    for s in mapping.segments:
        low, high = max(start, s.start), min(start + count, s.start + s.rows)
        if low < high:
            found.append(RowRange(mapping.hf[s.source], s.hf_start + low - s.start, high - low))
    return tuple(found)


def extra_states(shape: ModelShape) -> Iterator[str]:
    """The object keys that modules of this model look for: Transformer Engine's; those of local modules are a part."""
    for mapping in stored_mappings(shape):
        if not _HAS_STATE.search(mapping.name):
            continue
        (location, *_) = disk_locations(mapping.name, shape)
        module, found, _ = location.keys[0].partition(".weight")
        if not found:  # a norm inside a linear layer
            continue
        # Axes of the tensor that the object belongs to: layers, unless each layer has its own tensors, and experts.
        axes = [] if mapping.layer is None or shape.layers_differ else [(mapping.layer, shape.layers)]
        axes += [] if mapping.expert is None else [(mapping.expert, shape.experts)]
        index, sizes = (".".join(map(str, part)) for part in zip(*(axes or [(0, 1)]), strict=True))
        yield f"{module}._extra_state/shard_{index}_{sizes}"
        if module.endswith("self_attention.linear_qkv"):
            yield f"{module.removesuffix('linear_qkv')}core_attention._extra_state/shard_{index}_{sizes}"


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"
