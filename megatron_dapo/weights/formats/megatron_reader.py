"""Opens a Megatron checkpoint of either format (`open_megatron`), and presents one as HF tensors (`MegatronAsHF`).

`TorchDistReader` reads the weights of a `torch_dist` checkpoint, saved in any layout with any options.
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
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype, StoredTensor
from megatron_dapo.weights.formats.legacy_reader import LegacyReader
from megatron_dapo.weights.formats.readers import Piece, PieceReader, check_cover, map_file, tensor_over
from megatron_dapo.weights.formats.safe_pickle import PickledObject, UnsafePickle, load_metadata
from megatron_dapo.weights.formats.torch_zip import BadArchive, read_archive
from megatron_dapo.weights.locate import METADATA, Format, format_of, locate
from megatron_dapo.weights.mapping import ParameterMapping, WeightsError, stored_mappings
from megatron_dapo.weights.names import disk_aliases, disk_locations

if TYPE_CHECKING:
    from torch import Tensor

_NOT_WEIGHTS = re.compile(r"(^|\.)(optimizer|chained_\d+|rng_state|opt_param_scheduler)(\.|/|$)")

_ARCHIVE_END = 1024  # bytes; one page or two. The records before and after the data of one tensor fit


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
    dtype: Dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class TorchDistReader(PieceReader):
    """The weights of the torch_dist checkpoint in the folder `path`."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        super().__init__(Path(path))
        self.shape = shape
        self._tensors = read_metadata(self.path)
        self._by_lead: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._prefetch_archives()
        used: set[str] = set()
        for mapping in stored_mappings(shape):
            used.update(self._locate(mapping))
        extra = [key for key in self._tensors if key not in used]
        if extra:
            raise WeightsError(
                f"{self.path}: unexpected tensor {extra[0]} ({len(extra)} in all); the reference's config.json "
                "describes a model without it"
            )

    def _prefetch_archives(self) -> None:
        """Read the ends of all archives, which describe their tensors, from disk at once. Otherwise the first access to
        each end waits for the disk, and for the megabytes that the kernel reads ahead there."""
        for chunk in (chunk for tensor in self._tensors.values() for chunk in tensor.chunks):
            size = min(_ARCHIVE_END, chunk.length)
            self.prefetch(chunk.file, chunk.at, size)
            self.prefetch(chunk.file, chunk.at + chunk.length - size, size)

    def _locate(self, mapping: ParameterMapping) -> tuple[str, ...]:
        """Find the parameter's tensors, check their shapes and list their pieces. Returns the keys."""
        for location in disk_locations(mapping.name, self.shape):
            if all(key in self._tensors for key in location.keys):
                break
        else:
            adapters = (self.path / "adapter").is_dir()  # of a run with policy.lora
            what = "it has only adapters, for `convert merge-adapter`" if adapters else "it lacks part of this model"
            raise WeightsError(f"{self.path}: tensor {mapping.name} is missing; {what}")
        pieces: list[Piece] = []
        at = 0
        parts = mapping.parts if len(location.keys) > 1 else mapping.shape[:1]
        for key, rows in zip(location.keys, parts, strict=True):
            tensor = self._tensors[key]
            part = tensor.shape[len(location.index) :]
            chunks = self._chunks(tensor, len(location.index)).get(location.index, [])
            self._check_shape(mapping, tensor, location.index, (rows, *mapping.shape[1:]))
            pieces += (self._piece(tensor, chunk, location.index, at) for chunk in chunks)
            at += part[0]
        columns = math.prod(mapping.shape[1:])
        check_cover(f"{self.path}: tensor {location.keys[0]} (layer and expert {location.index})", pieces, at, columns)
        self.pieces[mapping.name], self.dtypes[mapping.name] = pieces, self._tensors[location.keys[0]].dtype
        aliases = [key for key in disk_aliases(mapping.name, self.shape) if key in self._tensors]
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
            archive = memoryview(self._map(chunk.file))[chunk.at : chunk.at + chunk.length]
            dtype, shape, begin = read_archive(archive)
        except (BadArchive, ValueError) as error:
            raise WeightsError(f"{chunk.file}: tensor {tensor.key} at byte {chunk.at}: {error}") from None
        if dtype != tensor.dtype or shape != chunk.sizes:
            raise WeightsError(
                f"{chunk.file}: tensor {tensor.key} at byte {chunk.at}: holds {dtype} {shape}, but {METADATA} says "
                f"{tensor.dtype} {chunk.sizes}"
            )
        depth = len(index)
        inner = chunk.sizes[depth:]
        skip = 0
        for axis in range(depth):
            skip = skip * chunk.sizes[axis] + index[axis] - chunk.offsets[axis]
        offset = chunk.at + begin + skip * math.prod(inner) * dtype.itemsize
        row, column = chunk.offsets[depth], sum(chunk.offsets[depth + 1 :])
        stored = StoredTensor(tensor.key, chunk.file, dtype, inner, offset)
        return Piece(at + row, column, inner[0], math.prod(inner[1:]), stored)


def first_not_finite(path: Path) -> str | None:
    """The name of a tensor of a checkpoint, optimizer state included, that holds a NaN or an infinity."""
    maps: dict[Path, mmap.mmap] = {}
    for tensor in read_metadata(path, weights_only=False).values():
        for chunk in tensor.chunks:
            file = maps.get(chunk.file) or maps.setdefault(chunk.file, map_file(chunk.file))
            dtype, shape, begin = read_archive(memoryview(file)[chunk.at : chunk.at + chunk.length])
            stored = StoredTensor(tensor.key, chunk.file, dtype, shape, chunk.at + begin)
            values = tensor_over(file, stored, stored.offset)
            if values.is_floating_point() and not bool(values.isfinite().all()):
                return tensor.key
    return None


def read_metadata(path: Path, *, weights_only: bool = True) -> dict[str, DiskTensor]:
    """The tensors in a checkpoint's metadata, each with its chunks."""
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
            if not (weights_only and _NOT_WEIGHTS.search(key))
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
    if not isinstance(dtype, Dtype):
        raise UnsafePickle(f"{key} without a dtype")
    if any(len(at) != len(value["size"]) for chunk in chunks for at in (chunk.offsets, chunk.sizes)):
        raise UnsafePickle(f"a chunk of {key} has another number of axes")
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


def open_megatron(path: str | os.PathLike[str], shape: ModelShape) -> PieceReader:
    """The weights of the Megatron checkpoint that `path` means (`weights.locate`)."""
    folder = locate(Path(path))
    if format_of(folder) is Format.HF:
        raise WeightsError(f"{folder} is a HF model; expected a Megatron checkpoint")
    return LegacyReader(folder, shape) if format_of(folder) is Format.LEGACY else TorchDistReader(folder, shape)


class MegatronAsHF(Mapping[str, "Tensor"]):
    """A Megatron checkpoint as HF-named tensors, for code that loads HF weights; assembled on access."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        self.path = Path(path)
        self._reader = open_megatron(path, shape)
        self._mappings = {name: (m, source) for m in stored_mappings(shape) for source, name in enumerate(m.hf)}

    def __getitem__(self, name: str) -> Tensor:
        import torch

        mapping, source = self._mappings[name]
        parts = [self._reader.rows(mapping.name, s.start, s.rows) for s in mapping.segments_of(source)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(mapping.hf_shapes[source])

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings)

    def __len__(self) -> int:
        return len(self._mappings)
