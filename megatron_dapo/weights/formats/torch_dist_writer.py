"""Writes a torch_dist checkpoint: which file holds which chunk, and the metadata that says so.

Layers are stacked along a leading axis and names are Transformer Engine's, as when Megatron itself saves a GPT model.
On loading, modules look for an `_extra_state` object even if they have none; all these keys refer to one empty object.
The small files are those that Megatron-LM's own save writes (`small_files`): it and other tools read the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
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
        empty_at = self._reserve(len(self._empty))
        self.writes: list[TensorWrite] = []
        self._stored: list[Stored] = []
        for mapping in mappings:
            self._add(mapping, dtypes[mapping.name])
        self._stored += [Stored(key, _file_name(0), empty_at, len(self._empty)) for key in extra_states(shape)]

    @property
    def total(self) -> int:
        return sum(self._sizes)

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

    def _add(self, mapping: ParameterMapping, dtype: Dtype) -> None:
        """Cuts one parameter into chunks of consecutive rows, and places them."""
        (location, *_) = disk_locations(mapping.name, self.shape)
        if self._dtypes.setdefault(location.keys[0], dtype) != dtype:
            raise WeightsError(
                f"tensor {mapping.hf[0]} is {dtype}, in other layers {self._dtypes[location.keys[0]]}; "
                "pass --dtype to convert all"
            )
        width = math.prod(mapping.shape[1:]) * dtype.itemsize
        step = max(1, MAX_CHUNK // width)
        layers = () if self.shape.layers_differ else (self.shape.layers,)
        axes = (*layers, self.shape.experts)[: len(location.index)]
        lead, columns = tuple(1 for _ in location.index), mapping.shape[1:]
        aliases, first = disk_aliases(mapping.name, self.shape), 0
        for part, size in enumerate(mapping.parts or mapping.shape[:1]):  # a tensor-parallel rank reads a share of each
            one_key = len(location.keys) == 1
            key = location.keys[0 if one_key else part]
            total, base = (mapping.shape[0], 0) if one_key else (size, first)
            for start in range(first, first + size, step):
                count = min(step, first + size - start)
                sizes = (*lead, count, *columns)
                archive = tensor_archive(dtype, sizes)
                at = self._reserve(archive.length)
                file = len(self._sizes) - 1
                self.writes.append(TensorWrite(file, at, dtype, hf_ranges(mapping, start, count), archive))
                offsets = (*location.index, start - base, *(0 for _ in columns))
                place = (_file_name(file), at, archive.length)
                for name in (key, *aliases):
                    self._stored.append(Stored(name, *place, dtype, (*axes, total, *columns), offsets, sizes))
            first += size

    def metadata(self) -> bytes:
        """The content of `.metadata`."""
        return torch_dist_metadata(self._stored)

    def write_metadata(self, directory: Path, metadata: bytes) -> None:
        """Write the small files of a checkpoint."""
        for name, content in description_files(
            metadata, object_archive(common_state(megatron_args(self.shape)))
        ).items():
            (directory / name).write_bytes(content)


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
