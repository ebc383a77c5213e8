"""Reads the weights of a Megatron `torch_dist` checkpoint, saved in any layout with any options, through memory maps.

Optimizer state, schedulers and random states are not read, `common.pt` is not opened, and `safe_pickle` reads the
metadata. Every chunk of every weight is located and checked before the first tensor is returned.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import StoredTensor
from megatron_dapo.weights.formats.hf_reader import map_file, release_pages, tensor_over
from megatron_dapo.weights.formats.safe_pickle import PickledObject, UnsafePickle, load_metadata
from megatron_dapo.weights.formats.torch_zip import BadArchive, read_archive
from megatron_dapo.weights.mapping import ParameterMapping, WeightsError, stored_mappings
from megatron_dapo.weights.names import disk_aliases, disk_locations

METADATA = ".metadata"
CONFIG = "metadata.json"
_NOT_WEIGHTS = re.compile(r"(^|\.)(optimizer|chained_\d+|rng_state|opt_param_scheduler)(\.|/|$)")


def torch_dist_in(path: Path) -> Path | None:
    """The torch_dist checkpoint at `path`: the directory itself, or the `policy` folder of a run's `step_N`."""
    return next((folder for folder in (path, path / "policy") if (folder / METADATA).exists()), None)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a stored tensor: [offset, offset + size) along every axis, in one archive of one file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    at: int
    length: int

    def leads(self, depth: int) -> Iterator[tuple[int, ...]]:
        """The indices of the first `depth` axes that the chunk covers."""
        axes = zip(self.offsets[:depth], self.sizes[:depth], strict=True)
        return product(*(range(offset, offset + size) for offset, size in axes))


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """A tensor as the metadata describes it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one parameter: a block of rows and columns (of a vector: consecutive entries), and its bytes."""

    row: int
    column: int
    rows: int
    columns: int
    stored: StoredTensor


class TorchDistReader:
    """The weights of a torch_dist checkpoint, by canonical name."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        self.path, self.shape = torch_dist_in(Path(path)) or Path(path), shape
        self._tensors = read_metadata(self.path)
        self._maps: dict[Path, mmap.mmap] = {}
        self._by_lead: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        used: set[str] = set()
        for mapping in stored_mappings(shape):
            used.update(self._locate(mapping))
        extra = [key for key in self._tensors if key not in used]
        if extra:
            raise WeightsError(
                f"{self.path}: unexpected tensor {extra[0]} ({len(extra)} in all); the reference's config.json "
                "describes a model without it"
            )

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

    def release(self, name: str, start: int, count: int) -> None:
        """Drop rows that were read from this process's memory; they stay in the page cache."""
        for p in self._overlapping(name, start, count):
            low, high = max(start, p.row) - p.row, min(start + count, p.row + p.rows) - p.row
            width = p.columns * self.dtypes[name].itemsize
            release_pages(self._map(p.stored.file), p.stored.offset + low * width, (high - low) * width)

    def _overlapping(self, name: str, start: int, count: int) -> list[Piece]:
        return [p for p in self.pieces[name] if p.row < start + count and start < p.row + p.rows]

    def _view(self, piece: Piece) -> Tensor:
        return tensor_over(self._map(piece.stored.file), piece.stored)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(file)
        return self._maps[file]

    def _locate(self, mapping: ParameterMapping) -> tuple[str, ...]:
        """Find the parameter's tensors, check their shapes and list their pieces. Returns the keys."""
        for location in disk_locations(mapping.name, moe=self.shape.is_moe):
            if all(key in self._tensors for key in location.keys):
                break
        else:
            raise WeightsError(
                f"{self.path}: tensor {mapping.name} is missing; the checkpoint lacks part of this model"
            )
        pieces: list[Piece] = []
        at = 0
        for key in location.keys:
            tensor = self._tensors[key]
            part = tensor.shape[len(location.index) :]
            chunks = self._chunks(tensor, len(location.index)).get(location.index, [])
            self._check_shape(
                mapping, tensor, location.index, (mapping.shape[0] // len(location.keys), *mapping.shape[1:])
            )
            pieces += (self._piece(tensor, chunk, location.index, at) for chunk in chunks)
            at += part[0]
        columns = math.prod(mapping.shape[1:])
        _check_cover(f"{self.path}: tensor {location.keys[0]} (layer and expert {location.index})", pieces, at, columns)
        self.pieces[mapping.name], self.dtypes[mapping.name] = pieces, self._tensors[location.keys[0]].dtype
        aliases = [key for key in disk_aliases(mapping.name, moe=self.shape.is_moe) if key in self._tensors]
        if any(self._tensors[key].chunks != self._tensors[location.keys[0]].chunks for key in aliases):
            raise WeightsError(
                f"{self.path}: tensors {aliases[0]} and {location.keys[0]} hold different values of {mapping.name}"
            )
        return (*location.keys, *aliases)

    def _chunks(self, tensor: DiskTensor, depth: int) -> dict[tuple[int, ...], list[Chunk]]:
        """The chunks of a tensor by layer and expert; stacked tensors have thousands."""
        if tensor.key not in self._by_lead:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in tensor.chunks:
                for lead in chunk.leads(depth):
                    found.setdefault(lead, []).append(chunk)
            self._by_lead[tensor.key] = found
        return self._by_lead[tensor.key]

    def _check_shape(
        self, mapping: ParameterMapping, tensor: DiskTensor, index: tuple[int, ...], want: tuple[int, ...]
    ) -> None:
        lead, shape = tensor.shape[: len(index)], tensor.shape[len(index) :]
        axes = {0: (), 1: (self.shape.layers,), 2: (self.shape.layers, self.shape.experts)}[len(index)]
        if len(index) == 1 and mapping.expert is not None:
            axes = (self.shape.experts,)
        padded = mapping.vocabulary and shape[1:] == want[1:] and shape[:1] >= want[:1]
        if lead != axes or not (shape == want or padded):
            raise WeightsError(
                f"{self.path}: tensor {tensor.key}: shape {tensor.shape}, but the reference's config.json says "
                f"{(*axes, *want)}"
            )

    def _piece(self, tensor: DiskTensor, chunk: Chunk, index: tuple[int, ...], at: int) -> Piece:
        """The part of a chunk that belongs to one layer (and expert)."""
        try:
            item = read_archive(memoryview(self._map(chunk.file))[chunk.at : chunk.at + chunk.length])
        except (BadArchive, ValueError) as error:
            raise WeightsError(f"{chunk.file}: tensor {tensor.key} at byte {chunk.at}: {error}") from None
        if item.dtype != tensor.dtype or item.shape != chunk.sizes:
            raise WeightsError(
                f"{chunk.file}: tensor {tensor.key} at byte {chunk.at}: holds {item.dtype} {item.shape}, "
                f"but {METADATA} says {tensor.dtype} {chunk.sizes}"
            )
        depth = len(index)
        inner = chunk.sizes[depth:]
        skip = 0
        for axis in range(depth):
            skip = skip * chunk.sizes[axis] + index[axis] - chunk.offsets[axis]
        offset = chunk.at + item.data_offset + skip * math.prod(inner) * item.dtype.itemsize
        row, column = chunk.offsets[depth], sum(chunk.offsets[depth + 1 :])
        stored = StoredTensor(tensor.key, chunk.file, str(item.dtype).removeprefix("torch."), inner, offset)
        return Piece(at + row, column, inner[0], math.prod(inner[1:]), stored)


class TorchDistAsHF(Mapping[str, Tensor]):
    """A torch_dist checkpoint as HF-named tensors, for code that loads HF weights; assembled on access."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        self.path = Path(path)
        self._reader = TorchDistReader(path, shape)
        self._mappings = {name: (m, source) for m in stored_mappings(shape) for source, name in enumerate(m.hf)}

    def __getitem__(self, name: str) -> Tensor:
        mapping, source = self._mappings[name]
        parts = [self._reader.rows(mapping.name, s.start, s.rows) for s in mapping.segments if s.source == source]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings)

    def __len__(self) -> int:
        return len(self._mappings)


def _check_cover(where: str, pieces: list[Piece], rows: int, columns: int) -> None:
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


def read_metadata(path: Path) -> dict[str, DiskTensor]:
    """The weight tensors in a checkpoint's metadata, each with its chunks."""
    file = path / METADATA
    if not file.exists():
        raise WeightsError(f"{path}: no {METADATA} file; expected a Megatron torch_dist checkpoint")
    try:
        found = load_metadata(file.read_bytes())
        storage = {_index(key): info for key, info in found["storage_data"].items()}
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
        described = found["state_dict_metadata"].items()
        tensors = {key: value for key, value in described if value.kind == "TensorStorageMetadata"}
        return {
            key: _disk_tensor(path, key, value, storage, sizes)
            for key, value in tensors.items()
            if not _NOT_WEIGHTS.search(key)
        }
    except (UnsafePickle, AttributeError, TypeError, KeyError) as error:
        raise WeightsError(f"{file}: refused or damaged: {error}") from None


def _index(key: PickledObject) -> tuple[str, tuple[int, ...]]:
    return key["fqn"], key.get("offset") or ()


def _disk_tensor(
    path: Path, key: str, value: PickledObject, storage: dict[Any, PickledObject], sizes: dict[str, int]
) -> DiskTensor:
    dtype = value["properties"].state[0]
    chunks = [_chunk(path, key, c, storage, sizes) for c in value["chunks"]]
    if not isinstance(dtype, torch.dtype):
        raise UnsafePickle(f"{key} without a dtype")
    return DiskTensor(key, dtype, tuple(value["size"]), tuple(chunks))


def _chunk(
    path: Path, key: str, chunk: PickledObject, storage: dict[Any, PickledObject], file_sizes: dict[str, int]
) -> Chunk:
    offsets, sizes = chunk["offsets"], chunk["sizes"]
    info = storage.get((key, tuple(offsets)))
    if info is None:
        raise WeightsError(f"{path / METADATA}: tensor {key}: no file holds its chunk at {tuple(offsets)}")
    name, at, length = str(info["relative_path"]), int(info["offset"]), int(info["length"])
    file = path / name
    if Path(name).name != name:
        raise WeightsError(f"{path / METADATA}: tensor {key}: {name!r} is not a file name in this directory")
    if info.get("transform_descriptors"):
        raise WeightsError(f"{file}: tensor {key}: compressed checkpoints are not supported; save without compression")
    size = file_sizes.get(name)
    if size is None:
        raise WeightsError(f"{file} is missing, but {METADATA} places tensor {key} in it")
    if at < 0 or at + length > size:
        raise WeightsError(f"{file}: truncated inside tensor {key}: it ends at byte {at + length}, the file has {size}")
    return Chunk(tuple(offsets), tuple(sizes), file, at, length)
