"""This rank's files of a `torch_dist` checkpoint, fixed before anything is written.

Megatron's own save holds collectives before and after the writing, and writes in forked processes. Here everything
that needs the other ranks comes first: Megatron describes the state as sharded tensors, each rank lays its shards out
in files, and rank 0 learns all positions and makes the metadata. What is left is to write bytes, on each rank and in
any thread. The format is Megatron's: its loader and the converters read it.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_dapo.checkpoints.files import CheckpointFile
from megatron_dapo.errors import CheckpointError
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.weights.formats.torch_zip import ALIGN, TensorArchive
from megatron_dapo.weights.locate import CONFIG, METADATA

COMMON = "common.pt"
MAX_ITEM = 1 << 30  # larger tensors are split: an archive holds less than 4 GiB
FILES_PER_RANK = 4
SMALL_FILE = 64 << 20  # there are fewer files where they would be smaller than this
Parts = list[bytes | Tensor]


@dataclass(frozen=True, slots=True)
class Shard:
    """What the metadata says about one item: `offsets` and `sizes` of a tensor's shard, or None for an object."""

    key: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A shard's position."""

    shard: Shard
    file: str
    offset: int
    length: int


def sharded_files(state: dict[str, Any], runtime: Runtime, to_host: Callable[[Tensor], Tensor]) -> list[CheckpointFile]:
    """Collective. The files that this rank writes for a sharded state dict; rank 0 also writes the metadata.
    `to_host` is applied to every tensor that goes into a file."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    files, stored = _lay_out(list(_items(sharded, to_host)), f"__{runtime.rank}_")
    gathered: list[list[Stored]] | None = [[]] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(stored, gathered, dst=0)
    error: Exception | None = None
    if gathered is not None:
        try:
            metadata = _metadata([entry for entries in gathered for entry in entries])
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
            files += [CheckpointFile(METADATA, [metadata]), CheckpointFile(COMMON, [_saved(common)])]
            files.append(CheckpointFile(CONFIG, [config]))
        except CheckpointError as found:
            error = found
    runtime.raise_together(error, "describing the checkpoint")
    return files


def _items(sharded: Any, to_host: Callable[[Tensor], Tensor]) -> Iterator[tuple[Shard, Parts, int]]:
    """(shard, bytes, their number) of everything that this rank writes."""
    for entry in nested_values(sharded):
        if not is_main_replica(entry.replica_id):
            continue
        if isinstance(entry, ShardedObject):
            content = _saved([entry.data])
            yield Shard(entry.unique_key), [content], len(content)
        else:
            assert isinstance(entry, ShardedTensor) and entry.flattened_range is None, entry
            yield from _tensor_items(entry, to_host(entry.data.detach()).contiguous())


def _tensor_items(entry: ShardedTensor, data: Tensor) -> Iterator[tuple[Shard, Parts, int]]:
    lead = entry.prepend_axis_num
    rows = data.shape[0] if data.dim() else 1
    step = max(1, MAX_ITEM * rows // max(1, data.nbytes)) if data.nbytes > MAX_ITEM else rows
    for start in range(0, rows, step):
        part = data[start : start + step] if step < rows else data
        offsets = list(entry.global_offset)
        if step < rows:
            offsets[lead] += start
        sizes = (*(1 for _ in range(lead)), *part.shape)
        archive = TensorArchive(part.dtype, sizes)
        shard = Shard(entry.key, part.dtype, tuple(entry.global_shape), tuple(offsets), sizes)
        yield shard, [archive.head, part, archive.tail], archive.length


def _lay_out(items: list[tuple[Shard, Parts, int]], prefix: str) -> tuple[list[CheckpointFile], list[Stored]]:
    """Files of about equal size."""
    total = sum(length for _, _, length in items)
    count = min(FILES_PER_RANK, max(1, total // SMALL_FILE)) if items else 0
    files = [CheckpointFile(f"{prefix}{number}.distcp", []) for number in range(count)]
    ends, stored = [0] * count, []
    for shard, parts, length in sorted(items, key=lambda item: -item[2]):
        index = ends.index(min(ends))
        padding = -ends[index] % ALIGN
        files[index].parts += [bytes(padding), *parts] if padding else parts
        stored.append(Stored(shard, files[index].name, ends[index] + padding, length))
        ends[index] += padding + length
    return files, stored


def _metadata(stored: Iterable[Stored]) -> bytes:
    """torch's description of all ranks' shards. Every element of every tensor must be stored, and none twice."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    elements: dict[str, int] = {}
    for entry in stored:
        shard = entry.shard
        offsets = None if shard.dtype is None else torch.Size(shard.offsets)
        position = dcp.MetadataIndex(shard.key, offsets)
        if position in storage:
            raise CheckpointError(f"{shard.key} at {shard.offsets} would be written twice: by two ranks, or one twice")
        storage[position] = _StorageInfo(entry.file, entry.offset, entry.length)
        if shard.dtype is None:
            described[shard.key] = dcp.BytesStorageMetadata()
            continue
        if shard.key not in described:
            properties = dcp.TensorProperties(dtype=shard.dtype)
            described[shard.key] = dcp.TensorStorageMetadata(properties, torch.Size(shard.shape), [])
        chunk = dcp.ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=torch.Size(shard.sizes))
        described[shard.key].chunks.append(chunk)
        elements[shard.key] = elements.get(shard.key, 0) + math.prod(shard.sizes)
    for key, count in elements.items():
        if count != math.prod(described[key].size):
            raise CheckpointError(f"{key} has {math.prod(described[key].size)} elements, {count} would be written")
    return pickle.dumps(dcp.Metadata(state_dict_metadata=described, storage_data=storage))


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
