"""One tensor inside a `.distcp` file: the zip archive that `torch.save` would write for it.

The bytes around the data depend only on dtype and shape. So the place of every archive in a file is known in advance,
and archives can be filled in any order without holding a tensor (`weights.copy`); `torch.save` would need the whole
tensor in memory. No checksum of the data is stored, as with `torch.save`'s checksum option off: `torch.load` checks
none. Reading parses the archive's directory and a pickle of fixed form (`safe_pickle`); no code from the file runs.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from functools import lru_cache
from typing import Any

from megatron_dapo.files import Dtype
from megatron_dapo.weights.formats.named_pickle import Call, Name, Outside, dump
from megatron_dapo.weights.formats.safe_pickle import STORAGES, UnsafePickle, load_tensor_pickle

ALIGN = 64
_REBUILD, _ORDERED = Name("torch._utils", "_rebuild_tensor_v2"), Name("collections", "OrderedDict")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")


class BadArchive(ValueError):
    """The bytes are not a tensor as torch.save writes it."""


def _pickled(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    """A contiguous tensor over storage "0"."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    storage = Outside(("storage", Name("torch", STORAGES[dtype]), "0", "cpu", math.prod(shape)))
    return dump(Call(_REBUILD, (storage, 0, shape, stride, False, Call(_ORDERED, ()))))


class TensorArchive:
    """The bytes around one tensor's data: `head`, then the data, then `tail`."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        """`dtype`: a torch dtype or its name."""
        dtype = Dtype.of(dtype)
        self.nbytes = math.prod(shape) * dtype.itemsize
        if self.nbytes >= 2**32:
            raise BadArchive(f"{self.nbytes} bytes in one archive; the caller must split tensors into smaller chunks")
        before = [(b"archive/data.pkl", _pickled(dtype, shape)), (b"archive/byteorder", sys.byteorder.encode())]
        after = (b"archive/version", b"3\n")
        records, entries = _records(before)
        self.head = records + _local_header(b"archive/data/0", 0, self.nbytes, align_from=len(records))
        self.data_offset = len(self.head)
        end = self.data_offset + self.nbytes
        last, entry = _records([after], end)
        entries += [_central(b"archive/data/0", 0, self.nbytes, len(records)), *entry]
        self.tail = last + _directory_of(entries, end + len(last))
        self.length = end + len(self.tail)


@lru_cache(maxsize=256)
def tensor_archive(dtype: Any, shape: tuple[int, ...]) -> TensorArchive:
    """The archive of this dtype and shape; a large model has thousands of tensors and few shapes."""
    return TensorArchive(dtype, shape)


def object_archive(value: Any) -> bytes:
    """What `torch.save` writes for an object without tensors."""
    body, entries = _records(
        [
            (b"archive/data.pkl", pickle.dumps(value, protocol=2)),
            (b"archive/byteorder", sys.byteorder.encode()),
            (b"archive/version", b"3\n"),
        ]
    )
    return body + _directory_of(entries, len(body))


def _records(named: list[tuple[bytes, bytes]], start: int = 0) -> tuple[bytes, list[bytes]]:
    """These records, the first of them at byte `start`, and their entries in the central directory."""
    body, entries = b"", []
    for name, data in named:
        crc = zlib.crc32(data)
        entries.append(_central(name, crc, len(data), start + len(body)))
        body += _local_header(name, crc, len(data)) + data
    return body, entries


def _directory_of(entries: list[bytes], start: int) -> bytes:
    """The central directory, at byte `start`."""
    content, count = b"".join(entries), len(entries)
    return content + _END.pack(b"PK\5\6", 0, 0, count, count, len(content), start, 0)


def _local_header(name: bytes, crc: int, size: int, align_from: int | None = None) -> bytes:
    """`align_from`: offset of the header, if the data after it must start on a multiple of ALIGN."""
    extra = b""
    if align_from is not None:
        bare = align_from + _LOCAL.size + len(name) + 4
        pad = -bare % ALIGN
        extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
    return _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra


def _central(name: bytes, crc: int, size: int, at: int) -> bytes:
    return _CENTRAL.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, at) + name


def read_archive(view: memoryview) -> tuple[Dtype, tuple[int, ...], int]:
    """Dtype and shape of the tensor in one archive, and where its data starts. Raises BadArchive for anything but one
    plain contiguous tensor."""
    records = open_archive(view)
    try:
        offset, size = records["data.pkl"]
        dtype, shape, key, at = load_tensor_pickle(bytes(view[offset : offset + size]))
        offset, size = records[f"data/{key}"]
    except (KeyError, UnsafePickle) as error:
        raise BadArchive(f"not a tensor as torch.save writes it ({type(error).__name__}: {error})") from None
    begin, need = at * dtype.itemsize, math.prod(shape) * dtype.itemsize
    if begin + need > size:
        raise BadArchive(f"holds {size} bytes of data, needs {begin + need}")
    return dtype, shape, offset + begin


def open_archive(view: memoryview) -> dict[str, tuple[int, int]]:
    """Record name (without the archive's own name) → (offset, size) of its bytes."""
    if bytes(view[-_END.size :][:4]) != b"PK\5\6" or bytes(view[:4]) != b"PK\3\4":
        raise BadArchive("does not begin and end like a zip archive (truncated?)")
    try:
        records = zipfile.ZipFile(_Stream(view)).infolist()
        if any(record.compress_type for record in records):
            raise BadArchive("compressed archive")
        names = {r.filename.split("/", 1)[-1]: _data(view, r.header_offset, r.file_size) for r in records}
        if "byteorder" in names:
            start, length = names["byteorder"]
            if bytes(view[start : start + length]) != sys.byteorder.encode():
                raise BadArchive("written on a machine with another byte order")
    except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, struct.error, UnicodeDecodeError) as error:
        raise BadArchive(f"not an archive as torch.save writes it ({type(error).__name__}: {error})") from None
    return names


class _Stream(io.RawIOBase):
    """A view as a file, for `zipfile`; `BytesIO` would copy it."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        if self._at < 0:
            raise OSError("before the start")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _data(view: memoryview, header: int, size: int) -> tuple[int, int]:
    fields = _LOCAL.unpack_from(view, header)
    if fields[0] != b"PK\3\4":
        raise BadArchive("damaged archive")
    start = header + _LOCAL.size + fields[9] + fields[10]
    if start + size > len(view):
        raise BadArchive("truncated")
    return start, size
