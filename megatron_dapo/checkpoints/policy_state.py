"""Saves and loads the policy: weights and optimizer as a Megatron `torch_dist` checkpoint.

The format is Megatron's own and does not depend on the layout: a checkpoint of one TP, PP, DP or EP loads at another.
It also holds what Megatron-LM reads (`weights.formats.small_files`) and the HF model's config and tokenizer.
Loading is exact or an error: a tensor that the checkpoint lacks, or has and we do not know, is named.

Megatron's own save holds collectives before and after the writing, and writes in forked processes. In `policy_files`
everything that needs the other ranks comes first: Megatron describes the state as sharded tensors, each rank lays its
shards out in files, and rank 0 learns all positions and makes the metadata. What is left is to write bytes, on each
rank and in any thread, as `checkpoints` decides.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dapo.checkpoints.files import CheckpointFile, HostBuffers
from megatron_dapo.errors import CheckpointError
from megatron_dapo.files import safetensors_header
from megatron_dapo.policy.megatron.optimizer_state import (
    KEYS,
    SHARDING,
    adapt_step,
    drop_classes,
    fit_chain,
    initialize_state,
    inner_optimizers,
    saved_step,
    set_step,
)
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.policy import Policy
from megatron_dapo.weights.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_config, base_fingerprint
from megatron_dapo.weights.formats.small_files import (
    Stored,
    common_state,
    description_files,
    megatron_args,
    saved_object,
    torch_dist_metadata,
)
from megatron_dapo.weights.formats.torch_zip import ALIGN, tensor_archive
from megatron_dapo.weights.locate import HF_FILES, locate
from megatron_dapo.weights.model_weights import ADAPTERS
from megatron_dapo.weights.side_files import hf_files, side_files
from megatron_dapo.weights.value_weights import value_config

ADAPTER = "adapter"  # folder of a checkpoint: LoRA's adapters in PEFT's format
MAX_ITEM = 1 << 30  # larger tensors are split: an archive holds less than 4 GiB
FILES_PER_RANK = 4
SMALL_FILE = 64 << 20  # there are fewer files where they would be smaller than this


class DoesNotFit(CheckpointError):
    """The checkpoint is of another model or of other settings."""


def policy_files(policy: Policy, buffers: HostBuffers | None = None, step: int = 0) -> list[CheckpointFile]:
    """Collective. The files of the checkpoint that this rank writes. `step` is the iteration that Megatron-LM reads.

    With `buffers` they refer to copies in host memory, and training may go on at once. Without, they refer to the
    weights and optimizer state themselves, and must be written before either changes."""
    policy.step.complete_weights()
    initialize_state(policy.optimizer)
    if buffers is not None:
        buffers.reset()
        buffers.reserve(host_sizes(policy))
    state = _sharded_state(policy, is_loading=False, to_host=Tensor.cpu if buffers is None else buffers.copy)
    state |= common_state(_megatron_args(policy, step), step)
    state["opt_param_scheduler"] = _scheduler_state(policy)
    state["content_metadata"] |= SHARDING
    files = _sharded_files(state, policy.runtime, buffers)
    if policy.trains_adapters:
        files += _adapter_files(policy)
    if policy.runtime.rank == 0:
        files += _side_files(policy)
    if buffers is not None:
        buffers.synchronize()
    return files


def _sharded_files(state: dict[str, Any], runtime: Runtime, buffers: HostBuffers | None) -> list[CheckpointFile]:
    """Collective. This rank's files of equal size, with its shards; on rank 0 also the description of all shards."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    items = [item for entry in nested_values(sharded) for item in _items(entry, buffers)]
    count = min(FILES_PER_RANK, max(1, sum(item.length for item, _ in items) // SMALL_FILE)) if items else 0
    files = [CheckpointFile(f"__{runtime.rank}_{number}.distcp", []) for number in range(count)]
    stored, ends = [], [0] * count
    for item, parts in sorted(items, key=lambda pair: -pair[0].length):
        index = ends.index(min(ends))
        padding = -ends[index] % ALIGN
        files[index].parts += [bytes(padding), *parts] if padding else parts
        stored.append(replace(item, file=files[index].name, offset=ends[index] + padding))
        ends[index] += padding + item.length
    gathered: list[list[Stored]] | None = [[]] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(stored, gathered, dst=0)
    error: Exception | None = None
    if gathered is not None:
        try:
            metadata = torch_dist_metadata([item for items in gathered for item in items])
            files += [
                CheckpointFile(name, [text]) for name, text in description_files(metadata, saved_object(common)).items()
            ]
        except CheckpointError as found:
            error = found
    runtime.raise_together(error, "describing the checkpoint")
    return files


def _items(entry: Any, buffers: HostBuffers | None) -> Iterator[tuple[Stored, list[bytes | Tensor]]]:
    """What this rank writes of an entry of the state, with its bytes; file and offset are not known yet."""
    if not is_main_replica(entry.replica_id):
        return
    if isinstance(entry, ShardedObject):
        content = saved_object([entry.data])
        yield Stored(entry.unique_key, "", 0, len(content)), [content]
        return
    assert isinstance(entry, ShardedTensor) and entry.flattened_range is None, entry
    data = entry.data.detach()
    if buffers is not None and not buffers.holds(data):
        data = buffers.copy(data)
    data = data.contiguous()
    lead, rows = entry.prepend_axis_num, data.shape[0] if data.dim() else 1
    step = max(1, MAX_ITEM * rows // max(1, data.nbytes)) if data.nbytes > MAX_ITEM else rows
    for start in range(0, rows, step):
        part, offsets = data, list(entry.global_offset)
        if step < rows:
            part = data[start : start + step]
            offsets[lead] += start
        sizes = (*(1 for _ in range(lead)), *part.shape)
        archive = tensor_archive(part.dtype, sizes)
        place = ("", 0, archive.length)
        shape = tuple(entry.global_shape)
        yield Stored(entry.key, *place, part.dtype, shape, tuple(offsets), sizes), [archive.head, part, archive.tail]


def _adapter_files(policy: Policy) -> list[CheckpointFile]:
    """Collective. On rank 0 the adapters as a PEFT directory: `peft` and SGLang load it as it is."""
    buckets = policy.adapter_buckets().buckets()  # the memory of a bucket is used again by the next one
    found = [(name, tensor.to("cpu", copy=True)) for bucket in buckets for name, tensor in bucket]
    if not found:
        return []
    header = safetensors_header((name, tensor.dtype, tensor.shape) for name, tensor in found)
    config = adapter_config((name for name, _ in found), policy.config.policy.lora, policy.config.policy.model)
    return [
        CheckpointFile(f"{ADAPTER}/{WEIGHTS_FILE}", [header, *(tensor.contiguous() for _, tensor in found)]),
        CheckpointFile(f"{ADAPTER}/{CONFIG_FILE}", [config.encode()]),
    ]


def _check_base(policy: Policy, directory: Path) -> None:
    """The adapters of a checkpoint belong to one base model."""
    described = directory / ADAPTER / CONFIG_FILE
    if not described.is_file():
        raise DoesNotFit(f"{directory} has no adapters: it was saved without policy.lora")
    base = json.loads(described.read_text()).get("base_fingerprint")
    if base != base_fingerprint(policy.config.policy.model):
        raise DoesNotFit(f"{directory} has adapters of another base model: policy.model's weights are not those")


def _side_files(policy: Policy) -> list[CheckpointFile]:
    """Config and tokenizer of the HF model: an export of the checkpoint needs nothing else."""
    model = policy.config.policy.model
    folder = hf_files(model)
    if not model or not (folder / "config.json").is_file():
        return []
    found = {str(name): (folder / name).read_bytes() for name in side_files(folder)[0]}
    if policy.shape.head == "value":
        found["config.json"] = value_config(found["config.json"], policy.shape)
    return [CheckpointFile(f"{HF_FILES}/{name}", [content]) for name, content in found.items()]


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
    each = policy.step.updates_per_step
    steps = each * (options.decay_steps or policy.step.total_steps)
    return {
        "max_lr": options.lr, "min_lr": options.min_lr, "lr_warmup_steps": each * options.warmup_steps,
        "lr_decay_style": options.schedule, "lr_decay_steps": steps, "num_steps": policy.updates,
        "start_wd": options.weight_decay, "end_wd": options.weight_decay, "wd_incr_steps": steps,
        "wd_incr_style": "constant",
    }  # fmt: skip


def host_sizes(policy: Policy) -> list[int]:
    """Sizes of the copies that `policy_files` makes on this rank, about: the trained weights, and three fp32 tensors
    per parameter that the optimizer holds here."""
    weights = [parameter.nbytes for _, parameter in policy.trained_parameters()]
    groups = [group for inner in inner_optimizers(policy.optimizer) for group in inner.param_groups]
    return weights + [4 * parameter.numel() for group in groups for parameter in group["params"] for _ in KEYS]


def load_policy(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. Weights, optimizer and update count of a checkpoint of `policy_files`, at any layout."""
    _require(directory)
    if policy.trains_adapters:
        _check_base(policy, Path(directory))
    initialize_state(policy.optimizer)
    state = _load(_sharded_state(policy, is_loading=True), directory)
    _set_weights(policy, state)
    each = policy.step.updates_per_step  # another number keeps the place in the learning-rate schedule
    policy.updates = round(state["updates"] * each / state.get("updates_per_step", each))
    step = _step(state, directory)
    optimizer_state = fit_chain(policy.optimizer, state["optimizer"])
    adapt_step(policy.optimizer, optimizer_state, step)
    policy.optimizer.load_state_dict(optimizer_state)
    policy.set_fused_adam()
    set_step(policy.optimizer, step)


def is_finite(policy: Policy) -> bool:
    """Whether the weights and the optimizer state that this rank holds have no NaN and no infinity."""
    weights = [parameter for chunk in policy.model for parameter in chunk.parameters()]
    states = [state for inner in inner_optimizers(policy.optimizer) for state in inner.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    floating = [tensor for tensor in weights + moments if tensor.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in floating)


def _step(state: dict[str, Any], directory: str | os.PathLike[str]) -> int:
    """A checkpoint without a step count has made as many optimizer steps as updates."""
    try:
        step = saved_step(state["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{directory} cannot be loaded: {error}") from error
    return int(state["updates"]) if step is None else step


def load_weights(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. The weights alone: a converted checkpoint, another run's or Megatron-LM's."""
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
    misfit = dist_checkpointing.core.CheckpointingException
    try:
        return dist_checkpointing.load(state, str(directory), strict=strict)
    except (misfit, CheckpointException) as error:  # Megatron's, torch's
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if not isinstance(reason, (misfit, ValueError)):
            raise CheckpointError(f"{directory} cannot be read: {type(reason).__name__}: {reason}") from error
        raise DoesNotFit(f"{directory} does not fit this model: {reason}") from error


def _metadata(policy: Policy) -> dict[str, Any]:
    return {**SHARDING, "dp_cp_group": policy.runtime.groups.dp_cp}


def _model_state(policy: Policy) -> dict[str, Any]:
    """One entry per model chunk; sharded keys carry global layer numbers, so the chunks do not matter on disk. With
    LoRA only the adapters: the base does not change."""
    metadata = _metadata(policy)
    if policy.trains_adapters:
        return {f"model{i}": chunk.adapters.sharded_state_dict(ADAPTERS) for i, chunk in enumerate(policy.model)}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(policy.model)}


def _sharded_state(
    policy: Policy, *, is_loading: bool, to_host: Callable[[Tensor], Tensor] = Tensor.cpu
) -> dict[str, Any]:
    state = _model_state(policy)
    models = state["model0"] if len(policy.model) == 1 else _distinct(state)
    metadata = {**_metadata(policy), "to_host": to_host}
    state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    drop_classes(state["optimizer"])
    state["updates"], state["updates_per_step"] = policy.updates, policy.step.updates_per_step
    return state


def _distinct(state: dict[str, Any]) -> dict[str, Any]:
    """Chunks number their layers from 0 each: keep their entries apart for the optimizer's look-up by parameter."""
    return {f"{chunk}.{name}": entry for chunk, part in state.items() for name, entry in part.items()}


def _set_weights(policy: Policy, state: dict[str, Any]) -> None:
    for i, chunk in enumerate(policy.model):
        chunk.load_state_dict(state[f"model{i}"], strict=False)
