"""Files that several folders read or write: the one atomic write, directories that appear complete or not at all, what
ranks hand in to rank 0 as files, and the one reader and writer of safetensors headers.

Imports no torch, so that configuration checks, reports and the launcher can use it. Dtypes are torch's names without
the prefix ("bfloat16"). The headers are read here and not with the safetensors library because its errors name neither
the file nor the tensor, and because the converters need the position of every tensor's bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_DTYPE_OF_CODE = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_PACKED = re.compile(r"^(model\..+\.mlp\.experts)\.(gate_up|down)_proj$")
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # buffers of old transformers versions
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_MAX_HEADER = 100 * 2**20


SOME_INODES = 50
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.ENOSPC: "delete something there",
    errno.EDQUOT: "delete something there, or ask for a larger quota",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
    errno.EISDIR: "move this directory away",
    errno.ENOTDIR: "a file is in the way; move it away",
    errno.EEXIST: "a file is in the way; move it away",
    errno.EIO: "the disk or its network fails",
    errno.ESTALE: "the network file system lost it; mount it again",
}


class DamagedFile(UserError):
    """A weight file that is missing, truncated or inconsistent; the message names the file and the tensor."""


# -- writing ----------------------------------------------------------------------------------------------------------


def write_atomically(path: str | Path, content: bytes | str, *, fsync: bool = True) -> None:
    """Replace `path` by `content`: after any crash the file has its old or its new content, never a part.

    `fsync`: wait until the content is on disk, so that this also holds after a power failure. A failed write
    (a full disk) leaves the old file and no temporary one.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:
        fsync_path(path.parent)


def create_atomically(path: Path, content: str) -> None:
    """Like `write_atomically` for a new file: if `path` exists, FileExistsError. Of several processes one succeeds."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    write_atomically(temporary, content)
    try:
        os.link(temporary, path)
    except OSError:
        if os.stat(temporary).st_nlink == 2:
            return  # NFS: it succeeded, but the reply was lost
        # It exists, or there are no hard links here; then the file is empty for a moment.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_end(path: Path, size: int) -> bytes:
    """The last bytes of a file that may be large."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read()


def fsync_path(path: str | Path) -> None:
    """Flush a file or a directory to disk. File systems that cannot flush directories are tolerated."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(directory: str | Path) -> None:
    """Flush every file and folder below `directory`, and `directory` itself."""
    for root, _, names in os.walk(directory):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(root)


def publish_directory(prepared: Path, path: Path, replaced: Path) -> None:
    """Give a complete directory, flushed to disk, its name in one rename.

    What has the name is moved to `replaced` first, and deleted at the end; if the rename fails it gets its name back.
    After a kill `path` is complete, old or new, or else the old directory is `replaced`.
    """
    shutil.rmtree(replaced, ignore_errors=True)
    existed = os.path.lexists(path)
    if existed:
        os.rename(path, replaced)
    try:
        os.rename(prepared, path)
    except OSError:
        if existed:
            os.rename(replaced, path)
        raise
    fsync_path(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """A file, a link or a directory with everything in it, as far as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Renames what is damaged or in the way to NAME.damaged, or NAME.damaged2, …; returns where it is now."""
    target, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.damaged{number}")
    path.rename(target)
    return target


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that `path` is on, or would be on: ext4, nfs4, lustre, tmpfs, …"""
    best, kind = Path("/"), "an unknown file system"
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, mount, found, *_ = line.split(" ")
            point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount))
            if path.absolute().is_relative_to(point) and len(point.parts) >= len(best.parts):
                best, kind = point, found
    return kind


def is_full(error: BaseException) -> bool:
    """Whether a write failed because there is no room, also if the OSError is the cause of `error`."""
    return any(isinstance(found, OSError) and found.errno in NO_ROOM for found in (error, error.__cause__))


def explain(error: OSError, path: str | Path | None = None) -> str:
    """Why a file cannot be written or read, and what to do, in one line. `path`: where, if there the disk is full."""
    text = error.strerror or str(error)
    if error.errno in NO_ROOM and path is not None:
        text += _room(Path(path))
    return f"{text}: {remedy}" if (remedy := REMEDIES.get(error.errno or 0)) else text


def has_room(path: Path, size: int) -> bool:
    """Whether `size` bytes, in a few files, fit there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize > size and (not found.f_files or found.f_favail > SOME_INODES)


def check_writable(folder: Path) -> None:
    """Creates the folder; raises the OSError that writing files there would raise."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f".writable-{os.getpid()}"
    write_atomically(trial, bytes(1 << 16), fsync=False)  # a full disk has room for an empty file
    trial.unlink()


def existing_parent(path: Path) -> Path:
    """The path itself or its nearest existing parent: the run creates missing folders."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _room(path: Path) -> str:
    """Free space at `path` or its nearest parent that exists, and whether it is file entries that are missing."""
    try:
        found = os.statvfs(existing_parent(path))
    except OSError:
        return ""
    if found.f_files and not found.f_favail:
        return f" (none of {found.f_files} inodes is free)"
    return f" ({found.f_bavail * found.f_frsize / 1e9:.2f} of {found.f_blocks * found.f_frsize / 1e9:.2f} GB free)"


def hand_in(folder: Path, rank: int, content: Any) -> None:
    """Leave `content` (JSON values) for rank 0, complete or not at all."""
    write_atomically(folder / f"rank_{rank}.json", json.dumps(content))


def collect(folder: Path, size: int, wait: Callable[[float], object], pause: float = 0.1) -> Iterator[tuple[int, Any]]:
    """What ranks 1 to `size` − 1 have handed in, each as soon as it is there. `wait(pause)` is called in between; if
    it returns a true value, the rest is given up."""
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            note = folder / f"rank_{rank}.json"
            if note.exists():
                missing.remove(rank)
                yield rank, json.loads(note.read_bytes())
        if missing and wait(pause):
            return


# -- safetensors ------------------------------------------------------------------------------------------------------


class Dtype(str):
    """The name of a torch dtype; files are copied without torch, whose import takes longer than a small conversion."""

    __slots__ = ()

    @classmethod
    def of(cls, dtype: Any) -> Dtype:
        """`dtype`: a torch dtype or its name."""
        return cls(str(dtype).removeprefix("torch."))

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major in bytes [offset, offset + nbytes) of `file`, or with `strides` in elements."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def safetensors_header(tensors: Iterable[tuple[str, Any, Sequence[int]]]) -> bytes:
    """The header for (name, dtype, shape) of tensors whose bytes follow it in this order; a multiple of 8 bytes.

    `dtype`: a torch dtype or its name.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        dtype_name = Dtype.of(dtype)
        end = at + math.prod(shape) * ITEM_SIZES[dtype_name]
        entries[name] = {"dtype": _CODE_OF_DTYPE[dtype_name], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; no tensor data is read. A truncated or damaged file is an error that says so."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if length < 2 or length > _MAX_HEADER or 8 + length > size:
                raise DamagedFile(f"{path}: truncated or not a safetensors file ({size} bytes); download it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing; download it again") from None
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the safetensors header is damaged ({error}); download the file again") from None
    if not isinstance(header, dict):
        raise DamagedFile(f"{path}: the safetensors header is damaged (not an object); download the file again")
    entries = [(name, item) for name, item in header.items() if name != "__metadata__"]
    found = [_entry(path, 8 + length, name, item) for name, item in entries]
    _check_contiguous(path, found, 8 + length, size)
    return {stored.name: stored for stored in found}


def read_safetensors_directory(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of an HF model directory, from its index and the headers; the two must agree exactly."""
    path = Path(path)
    if not path.is_dir():
        raise DamagedFile(f"{path} is not a directory; expected a HF model directory with {SINGLE} or {INDEX}")
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return read_safetensors_header(path / SINGLE)
        shards = [read_safetensors_header(file) for file in numbered_files(path, "model", "safetensors")]
        if not shards:
            raise DamagedFile(f"{path}: neither {INDEX} nor {SINGLE} found, and no model-00001-of-N.safetensors")
        return merge_tensors(shards)
    file_of = _read_index(path / INDEX)
    missing = [file for file in sorted(set(file_of.values())) if not (path / file).exists()]
    if missing:
        more = f" ({len(missing)} files are missing: {', '.join(missing[:5])}…)" if len(missing) > 1 else ""
        raise DamagedFile(f"{path / missing[0]} is missing, but {INDEX} lists it; download it again{more}")
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        for name, stored in read_safetensors_header(path / file).items():
            if file_of.get(name) != file:
                raise DamagedFile(f"{path / file}: tensor {name}: {INDEX} places it in {file_of.get(name, 'no file')}")
            found[name] = stored
    for name, file in file_of.items():
        if name not in found:
            raise DamagedFile(f"{path / file}: tensor {name} is missing, but {INDEX} says the file holds it")
    return found


def numbered_files(path: Path, stem: str, suffix: str) -> list[Path]:
    """The files `stem-00001-of-000NN.suffix` of a directory without an index; all of them, or an error."""
    pattern = re.compile(rf"{stem}-(\d+)-of-(\d+)\.{suffix}")
    found = {file.name: match for file in path.iterdir() if (match := pattern.fullmatch(file.name))}
    if not found:
        return []
    totals = {match[2] for match in found.values()}
    if len(totals) > 1:
        raise DamagedFile(f"{path}: files of {len(totals)} models ({', '.join(sorted(found)[:4])} …) and no index")
    (total,) = totals
    expected = [f"{stem}-{number:0{len(total)}d}-of-{total}.{suffix}" for number in range(1, int(total) + 1)]
    missing = [name for name in expected if name not in found]
    if missing:
        raise DamagedFile(f"{path / missing[0]} is missing ({len(missing)} of {int(total)} files); download it again")
    return [path / name for name in expected]


def merge_tensors(shards: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """All tensors of several files; a name in two of them is an error."""
    merged: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, stored in shard.items():
            if name in merged:
                raise DamagedFile(f"{stored.file}: tensor {name} is also in {merged[name].file.name}")
            merged[name] = stored
    return merged


def write_index(directory: Path, file_of: Mapping[str, str], size: int) -> None:
    """The index of a model in several files: the file of every tensor, and their size in bytes without headers."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_index(file: Path) -> dict[str, str]:
    try:
        file_of = json.loads(file.read_bytes())["weight_map"]
        entries = list(file_of.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{file}: damaged index ({type(error).__name__}: {error}); download it again") from None
    for name, target in entries:
        if not isinstance(target, str) or Path(target).name != target:
            raise DamagedFile(f"{file}: tensor {name}: {target!r} is not a file name in this directory")
    return dict(entries)


def _entry(path: Path, base: int, name: str, item: Any) -> StoredTensor:
    try:
        begin, end = (int(x) for x in item["data_offsets"])
        shape, code = tuple(int(x) for x in item["shape"]), item["dtype"]
    except (TypeError, KeyError, ValueError, OverflowError):  # JSON has infinite numbers
        raise DamagedFile(f"{path}: tensor {name}: damaged header entry; download the file again") from None
    if code not in _DTYPE_OF_CODE:
        raise DamagedFile(f"{path}: tensor {name}: dtype {code!r} is not supported; use the bf16 checkpoint")
    stored = StoredTensor(name, path, _DTYPE_OF_CODE[code], shape, base + begin)
    if min(shape, default=0) < 0 or begin < 0 or end - begin != stored.nbytes:
        raise DamagedFile(
            f"{path}: tensor {name}: {end - begin} bytes cannot hold {code} of shape {shape}; download the file again"
        )
    return stored


def _check_contiguous(path: Path, found: list[StoredTensor], start: int, size: int) -> None:
    """The tensors follow each other without gap or overlap and end where the file ends."""
    at = start
    for stored in sorted(found, key=lambda s: (s.offset, s.nbytes)):
        if stored.offset != at:
            raise DamagedFile(f"{path}: tensor {stored.name}: starts at byte {stored.offset}, expected {at}")
        at += stored.nbytes
        if at > size:
            raise DamagedFile(
                f"{path}: truncated inside tensor {stored.name}: it ends at byte {at}, the file has {size}; "
                "download the file again"
            )
    if at != size:
        raise DamagedFile(f"{path}: {size - at} bytes after the last tensor; download the file again")


def is_packed(stored: Iterable[str]) -> bool:
    return any(_PACKED.match(name) for name in stored)


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The weights among these tensors, with one name per expert and projection, also where a file has all experts of a
    layer in one (`weights/names.py`). Buffers that are computed are left out."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _COMPUTED.search(name):
            continue
        match = _PACKED.match(name)
        if match is None or len(tensor.shape) != 3 or tensor.strides:
            found[name] = tensor
            continue
        parts = _PARTS[match[2]]
        shape = (tensor.shape[1] // len(parts), tensor.shape[2])
        size = shape[0] * shape[1] * ITEM_SIZES[tensor.dtype]
        for expert in range(tensor.shape[0]):
            for i, part in enumerate(parts):
                single = f"{match[1]}.{expert}.{part}_proj.weight"
                offset = tensor.offset + (expert * len(parts) + i) * size
                found[single] = replace(tensor, name=single, shape=shape, offset=offset)
    return found
