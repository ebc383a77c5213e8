"""Reads weight files: HF directories (`HFReader`), and Megatron parameters that consist of pieces (`PieceReader`).

Headers, offsets and indexes are checked before the first tensor is returned; tensor data is read on access. Files are
mapped read-only, which needs no memory of its own: a file larger than the machine's memory can be mapped, and writing
to a tensor over it ends the process. Copying and comparing read into buffers instead: faulting in a mapping page by
page costs three times the system time of reading it. Files of `torch.save` (`TorchFile`: pytorch_model.bin, Megatron's
legacy checkpoints) are read without running code from them.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import (
    INDEX,
    ITEM_SIZES,
    DamagedFile,
    Dtype,
    StoredTensor,
    is_packed,
    merge_tensors,
    numbered_files,
    read_safetensors_directory,
    unpacked,
)
from megatron_dapo.weights.formats.safe_pickle import UnsafePickle, load_torch_pickle, tensor_of
from megatron_dapo.weights.formats.torch_zip import BadArchive, open_archive
from megatron_dapo.weights.mapping import HEAD, WeightsError
from megatron_dapo.weights.names import SCALE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

warnings.filterwarnings("ignore", message="The given buffer is not writable")

ALIGN = 4096  # of offsets, lengths and memory of direct reads and writes
_SMALLEST_DIRECT = 2**18  # bytes; the disk's latency costs more than the cache for smaller ones
_LIBC = ctypes.CDLL(None)
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def tensor_over(buffer: mmap.mmap, stored: StoredTensor, offset: int) -> Tensor:
    import torch

    count, dtype = elements_under(stored.shape, stored.strides), torch_dtype(stored.dtype)
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
    return flat.as_strided(stored.shape, stored.strides) if stored.strides else flat.view(stored.shape)


def elements_under(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """From the first element to the last. No strides: contiguous."""
    if not strides or 0 in shape:
        return math.prod(shape)
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def rows_of(stored: StoredTensor, start: int, count: int) -> StoredTensor:
    """Rows [start, start + count) of a stored tensor."""
    width = (stored.strides[0] if stored.strides else math.prod(stored.shape[1:])) * ITEM_SIZES[stored.dtype]
    return replace(stored, shape=(count, *stored.shape[1:]), offset=stored.offset + start * width)


def bytes_of(stored: StoredTensor, low: int, high: int) -> StoredTensor:
    """Bytes [low, high) of a stored tensor."""
    return replace(stored, dtype="uint8", shape=(high - low,), offset=stored.offset + low)


class CheckpointReader(ABC):
    """A checkpoint to copy from or compare, with the maps, descriptors and buffers of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[Path, mmap.mmap] = {}
        self._descriptors: dict[tuple[Path, int], int] = {}  # by file and flags
        self._not_direct: set[Path] = set()  # files that cannot be read past the page cache
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    @abstractmethod
    def dtype(self, name: str) -> Dtype: ...

    @abstractmethod
    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a tensor: a view of the file where one place holds them all, else a copy."""

    @abstractmethod
    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        """The rows as runs of bytes in files, in order: number of rows, and where they are; None if they have to be
        put together from several places."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file and tensor, for messages."""

    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None:
        """Bytes [skip, skip + len(view)) of a stored tensor."""
        descriptor, at = self._descriptor(stored.file), stored.offset + skip
        while view:
            count = os.preadv(descriptor, [view], at)
            if not count:
                raise DamagedFile(f"{stored.file}: ends inside tensor {stored.name}; it changed while it was read")
            view, at = view[count:], at + count

    def prefetch(self, file: Path, at: int, nbytes: int) -> None:
        """Ask the kernel to read bytes [at, at + nbytes) of the file from disk, without waiting."""
        os.posix_fadvise(self._descriptor(file), at, nbytes, os.POSIX_FADV_WILLNEED)

    def reads_direct(self, stored: StoredTensor) -> bool:
        """Whether `read_direct` is worth while: less than half of the tensor is in the page cache. The kernel tells
        this only to those who may write the file; for others all of it counts as cached."""
        if stored.file in self._not_direct or stored.nbytes < _SMALLEST_DIRECT:
            return False
        first = stored.offset // mmap.PAGESIZE
        count = -(-(stored.offset + stored.nbytes) // mmap.PAGESIZE) - first
        cached = ctypes.create_string_buffer(count)
        address = np.frombuffer(self._map(stored.file), np.uint8).ctypes.data + first * mmap.PAGESIZE
        return _LIBC.mincore(address, count * mmap.PAGESIZE, cached) == 0 and cached.raw.count(0) > count // 2

    def read_direct(self, stored: StoredTensor, view: memoryview, end: int) -> int | None:
        """Reads a stored tensor past the page cache into the view, whose memory is aligned, behind its first `end`
        bytes. Returns where it begins: the bytes around it are read, too, up to multiples of ALIGN. None: not read."""
        if not self.reads_direct(stored):
            return None
        at = -(-end // ALIGN) * ALIGN
        begin = at + stored.offset % ALIGN
        view = view[: -(-(begin + stored.nbytes) // ALIGN) * ALIGN]
        try:
            descriptor = self._descriptor(stored.file, os.O_DIRECT)
            while at < begin + stored.nbytes:
                count = os.preadv(descriptor, [view[at:]], stored.offset + at - begin)
                if not count:
                    raise DamagedFile(f"{stored.file}: ends inside tensor {stored.name}; it changed while it was read")
                at += count
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._not_direct.add(stored.file)
            return None
        return begin

    def _descriptor(self, file: Path, flags: int = 0) -> int:
        with self._lock:
            if (file, flags) not in self._descriptors:
                self._descriptors[file, flags] = os.open(file, os.O_RDONLY | flags)
            return self._descriptors[file, flags]

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = map_file(file)
            return self._maps[file]

    def _view(self, stored: StoredTensor) -> Tensor:
        return tensor_over(self._map(stored.file), stored, stored.offset)

    def converted(self, name: str, start: int, count: int, dtype: Dtype) -> memoryview:
        """Rows [start, start + count) of a tensor as the bytes of values of this dtype."""
        import torch

        torch.set_num_threads(1)  # of this thread; there is one per core
        found = self.rows(name, start, count).to(torch_dtype(dtype)).contiguous()
        raw: Any = found.view(-1).view(torch.uint8).numpy()
        return memoryview(raw)


class TorchFile:
    """A file of `torch.save`: `tree` holds its containers and values, `stored` gives the position of a tensor."""

    def __init__(self, path: Path, *, opaque: bool = False) -> None:
        """`opaque`: objects beside the tensors are allowed; they become inert stand-ins."""
        self.path = path
        if not path.stat().st_size:
            raise DamagedFile(f"{path} is empty; copy it again")
        view = memoryview(map_file(path))
        if bytes(view[:4]) != b"PK\3\4":
            raise DamagedFile(
                f"{path} is not a zip archive: truncated, a Git LFS pointer, or saved by torch before 1.6; load it "
                "with torch and save it again"
            )
        try:
            self._records = open_archive(view)
            at, size = self._records["data.pkl"]
            self.tree: Any = load_torch_pickle(bytes(view[at : at + size]), opaque=opaque)
        except (BadArchive, KeyError) as error:
            raise DamagedFile(f"{path}: not a file of torch.save, or truncated ({error})") from None
        except UnsafePickle as error:
            raise DamagedFile(f"{path}: refused or damaged: {error}") from None

    def stored(self, name: str, value: Any) -> StoredTensor | None:
        """The position of a tensor in `tree`; None if `value` is no tensor."""
        try:
            found = tensor_of(value)
        except UnsafePickle as error:
            raise DamagedFile(f"{self.path}: tensor {name}: {error}") from None
        if found is None:
            return None
        dtype, shape, key, offset, strides = found
        at, size = self._records.get(f"data/{key}", (0, -1))
        begin, need = offset * dtype.itemsize, elements_under(shape, strides) * dtype.itemsize
        if begin + need > size:
            raise DamagedFile(f"{self.path}: tensor {name}: holds {max(size, 0)} bytes of data, needs {begin + need}")
        return StoredTensor(name, self.path, dtype, shape, at + begin, strides)


def read_bin_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model*.bin`, which must hold nothing else."""
    file = TorchFile(path)
    if not isinstance(file.tree, dict):
        raise DamagedFile(f"{path}: holds a {type(file.tree).__name__}; expected a dictionary of tensors")
    found = {}
    for name, value in file.tree.items():
        stored = file.stored(str(name), value)
        if stored is None:
            raise DamagedFile(f"{path}: {name} is not a tensor; expected a dictionary of tensors")
        found[str(name)] = stored
    return found


def read_bin_directory(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory with `pytorch_model.bin`, or with several numbered files."""
    single = path / "pytorch_model.bin"
    files = [single] if single.exists() else numbered_files(path, "pytorch_model", "bin")
    return merge_tensors(read_bin_file(file) for file in files)


def read_hf_directory(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of an HF model directory: safetensors, or else `pytorch_model.bin`."""
    safetensors = any(path.glob("*.safetensors")) or (path / INDEX).exists()
    if not safetensors and any(path.glob("pytorch_model*.bin")):
        return read_bin_directory(path)
    return read_safetensors_directory(path)


class HFReader(CheckpointReader, Mapping[str, "Tensor"]):
    """A checked HF checkpoint: names to memory-mapped tensors. Experts have one name each, also where the file has all
    of a layer in one tensor (`packed`). Matrices in fp8 (`quantised`) are read as bf16: multiplied by their scales in
    fp32 and rounded, as transformers does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path))
        stored = read_hf_directory(self.path)
        self.stored = unpacked(stored)
        self.packed = is_packed(stored)
        self._fp8: dict[str, tuple[StoredTensor, StoredTensor]] = {}  # by name: the matrix and its scales
        for scales in [name for name in self.stored if name.endswith(SCALE)]:
            self._add_fp8(scales.removesuffix(SCALE), self.stored.pop(scales))
        self.quantised = bool(self._fp8)

    def _add_fp8(self, name: str, scales: StoredTensor) -> None:
        from megatron_dapo.weights.fp8 import BLOCK, DTYPE, scale_shape

        stored = self.stored.get(name)
        if stored is None or stored.dtype != Dtype.of(DTYPE) or scales.shape != scale_shape(stored.shape):
            found = "none" if stored is None else f"{stored.dtype} of shape {stored.shape}"
            raise WeightsError(
                f"{scales.file}: tensor {scales.name} of shape {scales.shape}: expected one scale for each block of "
                f"{BLOCK} × {BLOCK} of a matrix {name} in {Dtype.of(DTYPE)}, found {found}"
            )
        self._fp8[name] = stored, scales
        self.stored[name] = replace(stored, dtype="bfloat16")

    def _dequantised(self, name: str, start: int, count: int) -> Tensor:
        from megatron_dapo.weights.fp8 import dequantise

        stored, scales = self._fp8[name]
        return dequantise(self._view(rows_of(stored, start, count)), self._view(scales), start).bfloat16()

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return self._dequantised(name, 0, stored.shape[0]) if name in self._fp8 else self._view(stored)

    def dtype(self, name: str) -> Dtype:
        return Dtype(self.stored[name].dtype)

    def rows(self, name: str, start: int, count: int) -> Tensor:
        if name in self._fp8:
            return self._dequantised(name, start, count)
        return self._view(rows_of(self.stored[name], start, count))

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        if count:
            stored = rows_of(self.stored[name], start, count)
            yield count, None if name in self._fp8 or stored.strides else stored

    def files(self) -> list[Path]:
        return sorted({stored.file for stored in self.stored.values()})

    def where(self, name: str) -> str:
        return f"{self.stored[name].file}: tensor {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored


def check_tied_head(weights: Mapping[str, Tensor], shape: ModelShape) -> None:
    """A tied model may store a head, but only a copy of the embedding: transformers would use another one."""
    if not shape.tied_embeddings or HEAD not in weights:
        return
    import torch

    head, embedding = weights[HEAD], weights[f"{shape.prefix}embed_tokens.weight"]
    same = head.shape == embedding.shape and head.dtype == embedding.dtype
    if not same or not all(torch.equal(a, b) for a, b in zip(head.split(1024), embedding.split(1024), strict=True)):
        where = weights.where(HEAD) if isinstance(weights, HFReader) else f"tensor {HEAD}"
        raise WeightsError(
            f"{where} differs from the embedding, but config.json has tie_word_embeddings; set it to false if the "
            "model has its own head"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one parameter: a block of rows and columns (of a vector: consecutive entries), and its bytes."""

    row: int
    column: int
    rows: int
    columns: int
    stored: StoredTensor


class PieceReader(CheckpointReader):
    """The weights of a Megatron checkpoint, by canonical name. A subclass fills `pieces` and `dtypes`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, Dtype] = {}

    def dtype(self, name: str) -> Dtype:
        return self.dtypes[name]

    def rows(self, name: str, start: int, count: int) -> Tensor:
        if (piece := self._holding(name, start, count)) is not None:
            return self._view(piece.stored).narrow(0, start - piece.row, count)
        import torch

        found, width = self._overlapping(name, start, count), self._columns(name)
        out = torch.empty((count, width), dtype=torch_dtype(self.dtypes[name]))
        for p in found:
            low, high = max(start, p.row), min(start + count, p.row + p.rows)
            part = self._view(p.stored).reshape(p.rows, p.columns).narrow(0, low - p.row, high - low)
            out[low - start : high - start, p.column : p.column + p.columns] = part
        flat = len(self.pieces[name][0].stored.shape) == 1
        return out.view(-1) if flat else out

    def where(self, name: str) -> str:
        return f"{self.pieces[name][0].stored.file}: tensor {self.pieces[name][0].stored.name}"

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        found = sorted(self._overlapping(name, start, count), key=lambda p: p.row)
        if any(p.columns != self._columns(name) or p.stored.strides for p in found):
            yield count, None
            return
        for p in found:
            low, high = max(start, p.row) - p.row, min(start + count, p.row + p.rows) - p.row
            yield high - low, rows_of(p.stored, low, high - low)

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
