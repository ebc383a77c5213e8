"""Writes the `.metadata` pickle of a torch_dist checkpoint: the records that torch.distributed.checkpoint reads.

The pickle is put together here, operation by operation, because importing torch's own classes takes longer than
writing a gigabyte. `safe_pickle` reads the same records.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_META = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"


class _Built:
    """A value that is already pickle operations."""

    def __init__(self, operations: bytes) -> None:
        self.operations = operations


def _name(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _pack(value: Any) -> bytes:
    match value:
        case _Built():
            return value.operations
        case None:
            return pickle.NONE
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            size = (value.bit_length() + 8) // 8
            return pickle.LONG1 + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case str():
            data = value.encode()
            return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        case tuple():
            return pickle.MARK + b"".join(map(_pack, value)) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_pack, value)) + pickle.APPENDS
        case dict():
            items = b"".join(_pack(key) + _pack(item) for key, item in value.items())
            return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
    raise TypeError(f"{type(value)} has no place in checkpoint metadata")


def _call(module: str, name: str, *args: Any) -> _Built:
    return _Built(_name(module, name) + _pack(args) + pickle.REDUCE)


def _object(module: str, name: str, state: Any) -> _Built:
    return _Built(_name(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _pack(state) + pickle.BUILD)


def _size(values: Iterable[int]) -> _Built:
    return _call("torch", "Size", tuple(values))


def tensor_metadata(
    dtype: torch.dtype, shape: tuple[int, ...], chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> _Built:
    """`chunks`: (offsets, sizes) of each."""
    layout = _call("torch.serialization", "_get_layout", "torch.strided")
    contiguous = _call(_META, "_MEM_FORMAT_ENCODING", 0)
    kind = _Built(_name("torch", str(dtype).removeprefix("torch.")))
    properties = _object(_META, "TensorProperties", (kind, layout, False, contiguous, False))
    boxes = [
        _object(_META, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        for offsets, sizes in chunks
    ]
    return _object(_META, "TensorStorageMetadata", {"properties": properties, "size": _size(shape), "chunks": boxes})


def bytes_metadata() -> _Built:
    return _object(_META, "BytesStorageMetadata", {})


def index(key: str, offsets: tuple[int, ...] | None = None) -> _Built:
    place = {} if offsets is None else {"offset": _size(offsets)}
    return _object(_META, "MetadataIndex", {"fqn": key, "index": None, **place})


def stored(file: str, offset: int, length: int) -> _Built:
    return _object(_FILES, "_StorageInfo", {"relative_path": file, "offset": offset, "length": length})


def metadata(tensors: Mapping[str, _Built], storage: Mapping[_Built, _Built]) -> bytes:
    """The whole file. `storage` maps an `index` to where it is `stored`."""
    state = {"state_dict_metadata": dict(tensors), "planner_data": None, "storage_data": dict(storage),
             "storage_meta": None, "version": None}  # fmt: skip
    return pickle.PROTO + b"\x02" + _object(_META, "Metadata", state).operations + pickle.STOP
