"""Saves and loads the policy: weights and optimizer as a Megatron `torch_dist` checkpoint.

The format is Megatron's own and does not depend on the layout: a checkpoint of one TP, PP, DP or EP loads at another.
It also holds what Megatron-LM reads (`weights.formats.megatron_args`) and the HF model's config and tokenizer.
Loading is exact or an error: a tensor that the checkpoint lacks, or has and we do not know, is named. `policy_files`
is the part of a save that the training loop waits for; `trainer.checkpoint` decides where, when and in which thread
the files are written.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_dapo.checkpoints.files import CheckpointFile, HostBuffers, write_files
from megatron_dapo.errors import CheckpointError
from megatron_dapo.policy.megatron import cpu
from megatron_dapo.policy.megatron.optimizer_state import (
    KEYS,
    SHARDING,
    adapt_step,
    drop_classes,
    initialize_state,
    inner_optimizers,
    saved_step,
    set_step,
    whole_parameters,
)
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.policy import Policy
from megatron_dapo.weights.formats.megatron_args import common_state, megatron_args
from megatron_dapo.weights.formats.torch_zip import ALIGN, TensorArchive
from megatron_dapo.weights.locate import CONFIG, HF_FILES, METADATA, locate
from megatron_dapo.weights.side_files import side_files

# This rank's files of a `torch_dist` checkpoint, fixed before anything is written.


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


def save_policy(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. Writes the checkpoint and returns when all ranks have written it. The directory may exist."""
    error: Exception | None = None
    files = policy_files(policy)
    try:
        write_files(Path(directory), files)
    except CheckpointError as found:
        error = found
    policy.runtime.raise_together(error, "writing the checkpoint")


def policy_files(policy: Policy, buffers: HostBuffers | None = None, step: int = 0) -> list[CheckpointFile]:
    """Collective. The files of the checkpoint that this rank writes. `step` is the iteration that Megatron-LM reads.

    With `buffers` they refer to copies in host memory, and training may go on at once. Without, they refer to the
    weights and optimizer state themselves, and must be written before either changes."""
    cpu.install()
    policy.step.complete_weights()
    initialize_state(policy.optimizer)
    if buffers is not None:
        buffers.reset()
        buffers.reserve(host_sizes(policy))
    with whole_parameters(Tensor.cpu if buffers is None else buffers.copy):
        state = _sharded_state(policy, is_loading=False)
    state |= common_state(_megatron_args(policy, step), step)
    state["opt_param_scheduler"] = _scheduler_state(policy)
    state["content_metadata"] |= SHARDING

    def to_host(tensor: Tensor) -> Tensor:
        return tensor if buffers is None or buffers.holds(tensor) else buffers.copy(tensor)

    files = sharded_files(state, policy.runtime, to_host)
    if policy.runtime.rank == 0:
        files += _side_files(policy.config.policy.model)
    if buffers is not None:
        buffers.synchronize()
    return files


def _side_files(model: str) -> list[CheckpointFile]:
    """Config and tokenizer of the HF model: an export of the checkpoint needs nothing else."""
    folder = Path(model)
    if not model or not (folder / "config.json").is_file():
        return []
    return [CheckpointFile(f"{HF_FILES}/{name}", [(folder / name).read_bytes()]) for name in side_files(folder)[0]]


def _megatron_args(policy: Policy, step: int) -> Namespace:
    """What Megatron-LM reads about the run. Its random states are not in the checkpoint."""
    options, groups = policy.config.policy, policy.runtime.groups
    virtual = options.virtual_pipeline if options.virtual_pipeline > 1 else None
    return megatron_args(
        policy.shape, iteration=step, tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel, virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=options.context_parallel, expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_parallel, world_size=policy.runtime.world_size,
        data_parallel_size=groups.dp.size(), bf16=options.precision == "bf16", fp16=False,
        use_distributed_optimizer=options.distributed_optimizer, no_save_optim=False,
    )  # fmt: skip


def _scheduler_state(policy: Policy) -> dict[str, Any]:
    """Megatron-LM's learning-rate scheduler loads this; --override-opt-param-scheduler replaces its values."""
    options = policy.config.policy.optimizer
    decay = {"start_wd": options.weight_decay, "end_wd": options.weight_decay, "wd_incr_style": "constant"}
    steps = options.decay_steps or policy.config.trainer.steps
    return {
        "max_lr": options.lr, "min_lr": options.min_lr, "lr_warmup_steps": options.warmup_steps,
        "lr_decay_style": options.schedule, "lr_decay_steps": steps, "wd_incr_steps": steps,
        "num_steps": policy.updates, **decay,
    }  # fmt: skip


def host_sizes(policy: Policy) -> list[int]:
    """Sizes of the copies that `policy_files` makes on this rank, about: the weights, and three fp32 tensors per
    parameter that the optimizer holds here."""
    weights = [parameter.nbytes for chunk in policy.model for parameter in chunk.parameters()]
    groups = [group for inner in inner_optimizers(policy.optimizer) for group in inner.param_groups]
    return weights + [4 * parameter.numel() for group in groups for parameter in group["params"] for _ in KEYS]


def load_policy(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. Weights, optimizer and update count of a checkpoint that `save_policy` wrote, at any layout."""
    cpu.install()
    _require(directory)
    initialize_state(policy.optimizer)
    with whole_parameters():
        state = _load(_sharded_state(policy, is_loading=True), directory)
        _set_weights(policy, state)
        policy.updates = int(state["updates"])
        step = _step(state, directory)
        adapt_step(policy.optimizer, state["optimizer"], step)
        policy.optimizer.load_state_dict(state["optimizer"])
    policy.set_fused_adam()
    set_step(policy.optimizer, step)


def _step(state: dict[str, Any], directory: str | os.PathLike[str]) -> int:
    """A checkpoint without a step count has made as many optimizer steps as updates."""
    try:
        step = saved_step(state["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{directory} cannot be loaded: {error}") from error
    return int(state["updates"]) if step is None else step


def load_weights(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. The weights alone: a converted checkpoint, another run's or Megatron-LM's."""
    cpu.install()
    directory = locate(Path(directory))
    _require(directory)
    _set_weights(policy, _load(_model_state(policy), directory, weights_only=True))
    policy.optimizer.reload_model_params()


def _require(directory: str | os.PathLike[str]) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointError(f"{directory} is not a torch_dist checkpoint (it has no metadata.json)")


def _load(state: dict[str, Any], directory: str | os.PathLike[str], weights_only: bool = False) -> dict[str, Any]:
    # A checkpoint with optimizer state has more than weights; what we ask for must all be there in any case.
    strict = StrictHandling.ASSUME_OK_UNEXPECTED if weights_only else StrictHandling.RAISE_ALL
    try:
        return dist_checkpointing.load(state, str(directory), strict=strict)
    except dist_checkpointing.core.CheckpointingException as error:
        raise CheckpointError(f"{directory} does not fit this model: {error}") from error


def _metadata(policy: Policy) -> dict[str, Any]:
    return {**SHARDING, "dp_cp_group": policy.runtime.groups.dp_cp}


def _model_state(policy: Policy) -> dict[str, Any]:
    """One entry per model chunk; sharded keys carry global layer numbers, so the chunks do not matter on disk."""
    metadata = _metadata(policy)
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(policy.model)}


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    state = _model_state(policy)
    models = state["model0"] if len(policy.model) == 1 else _distinct(state)
    metadata = _metadata(policy)
    state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    drop_classes(state["optimizer"])
    state["updates"] = policy.updates
    return state


def _distinct(state: dict[str, Any]) -> dict[str, Any]:
    """Chunks number their layers from 0 each: keep their entries apart for the optimizer's look-up by parameter."""
    return {f"{chunk}.{name}": entry for chunk, part in state.items() for name, entry in part.items()}


def _set_weights(policy: Policy, state: dict[str, Any]) -> None:
    for i, chunk in enumerate(policy.model):
        chunk.load_state_dict(state[f"model{i}"], strict=False)
