"""Lays out a torch_dist checkpoint for a table of rows: which file holds which chunk, and the metadata that says so.

Layers are stacked along a leading axis and names are Transformer Engine's, as Megatron itself saves a GPT model.
Modules ask for an `_extra_state` object on loading even when they have none; all of ours point at one empty object.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.metadata_pickle import bytes_metadata, index, metadata, stored, tensor_metadata
from megatron_dapo.weights.formats.torch_dist_reader import CONFIG, METADATA
from megatron_dapo.weights.formats.torch_zip import ALIGN, ItemLayout
from megatron_dapo.weights.mapping import Row, Transform, stored_rows
from megatron_dapo.weights.names import disk_aliases, disk_places
from megatron_dapo.weights.sharding import WeightsError
from megatron_dapo.weights.stream import Item, OutputFile, Take

MAX_CHUNK = 128 * 2**20  # a rank that needs part of a chunk reads all of it
MAX_FILE = 4 * 2**30

_LAYER_STATES = ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm")
_STATES_DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")
_STATES_MOE = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


@dataclass(frozen=True, slots=True)
class Planned:
    """One chunk: a run of rows of one parameter, and its item."""

    key: str
    index: tuple[int, ...]
    row: Row
    start: int
    rows: int
    item: Item

    @property
    def offsets(self) -> tuple[int, ...]:
        return (*self.index, self.start, *(0 for _ in self.row.shape[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*(1 for _ in self.index), self.rows, *self.row.shape[1:])


class TorchDistLayout:
    """The files of a checkpoint before any of them exists."""

    def __init__(self, shape: ModelShape, dtypes: dict[str, torch.dtype], *, files: int = 1) -> None:
        """`dtypes`: by canonical name; `files`: at least so many, if there is enough to fill them."""
        self.shape = shape
        rows = stored_rows(shape)
        self.weight_bytes = sum(math.prod(row.shape) * dtypes[row.name].itemsize for row in rows)
        self._limit = max(ALIGN, min(MAX_FILE, -(-self.weight_bytes // files)))
        self._dtypes: dict[str, torch.dtype] = {}
        self._sizes = [0]
        self._empty = _empty_object()
        self._empty_at = self._reserve(len(self._empty))
        self.chunks = [chunk for row in rows for chunk in self._cut(row, dtypes[row.name])]

    @property
    def total(self) -> int:
        return sum(self._sizes)

    @property
    def items(self) -> list[Item]:
        return [chunk.item for chunk in self.chunks]

    def files(self, directory: Path) -> list[OutputFile]:
        files = [OutputFile(directory / _file_name(i), size) for i, size in enumerate(self._sizes)]
        files[0].head = self._empty
        return files

    def _reserve(self, length: int) -> int:
        """Room in the current file, or in a new one when it is full. Returns the offset."""
        at = -(-self._sizes[-1] // ALIGN) * ALIGN
        if self._sizes[-1] and at + length > self._limit + len(self._empty):
            self._sizes.append(0)
            at = 0
        self._sizes[-1] = at + length
        return at

    def _cut(self, row: Row, dtype: torch.dtype) -> Iterator[Planned]:
        (place, *_) = disk_places(row.name, moe=self.shape.is_moe)
        (key,) = place.keys
        if self._dtypes.setdefault(key, dtype) != dtype:
            raise WeightsError(
                f"tensor {row.hf[0]} is {dtype}, in other layers {self._dtypes[key]}; pass --dtype to make them one"
            )
        halves = 2 if row.transform is Transform.GATE_UP else 1  # a rank takes part of each
        size = row.shape[0] // halves
        width = math.prod(row.shape[1:]) * dtype.itemsize
        step = max(1, MAX_CHUNK // width)
        for half in range(halves):
            for start in range(half * size, (half + 1) * size, step):
                count = min(step, (half + 1) * size - start)
                lead = tuple(1 for _ in place.index)
                layout = ItemLayout(dtype, (*lead, count, *row.shape[1:]))
                at = self._reserve(layout.length)
                item = Item(len(self._sizes) - 1, at, dtype, takes(row, start, count), layout)
                yield Planned(key, place.index, row, start, count, item)

    def write_metadata(self, directory: Path) -> None:
        """The small files that make the directory a checkpoint; `metadata.json`, which Megatron looks for, last."""
        (directory / METADATA).write_bytes(self._metadata())
        torch.save({}, directory / "common.pt")
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (directory / CONFIG).write_text(json.dumps(config))

    def _metadata(self) -> bytes:
        boxes: dict[str, list[Planned]] = {}
        storage = {}
        for chunk in self.chunks:
            assert chunk.item.layout
            info = stored(_file_name(chunk.item.file), chunk.item.offset, chunk.item.layout.length)
            for key in (chunk.key, *disk_aliases(chunk.row.name, moe=self.shape.is_moe)):
                boxes.setdefault(key, []).append(chunk)
                storage[index(key, chunk.offsets)] = info
        tensors = {
            key: tensor_metadata(chunks[0].item.dtype, self._global(chunks[0]), [(c.offsets, c.sizes) for c in chunks])
            for key, chunks in boxes.items()
        }
        empty = stored(_file_name(0), self._empty_at, len(self._empty))
        for key in extra_states(self.shape):
            tensors[key] = bytes_metadata()
            storage[index(key)] = empty
        return metadata(tensors, storage)

    def _global(self, chunk: Planned) -> tuple[int, ...]:
        axes = (self.shape.layers, self.shape.experts)[: len(chunk.index)]
        return (*axes, *chunk.row.shape)


def takes(row: Row, start: int, count: int) -> tuple[Take, ...]:
    """The runs of HF rows that make rows [start, start + count) of a Megatron tensor."""
    found = []
    for s in row.segments:
        low, high = max(start, s.start), min(start + count, s.start + s.rows)
        if low < high:
            found.append(Take(row.hf[s.source], s.hf_start + low - s.start, high - low))
    return tuple(found)


def extra_states(shape: ModelShape) -> Iterator[str]:
    """The object keys that local or Transformer Engine modules of this model ask for."""
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    modules = [f"self_attention.{name}" for name in _LAYER_STATES]
    modules += ["pre_mlp_layernorm"] if shape.is_moe else _STATES_DENSE
    for layer in range(shape.layers):
        for module in modules:
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.layers}"
        for expert in range(shape.experts):
            for module in _STATES_MOE:
                yield f"decoder.layers.{module}._extra_state/shard_{layer}.{expert}_{shape.layers}.{shape.experts}"


def _empty_object() -> bytes:
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"
