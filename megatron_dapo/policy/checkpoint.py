"""Saving and loading the policy: weights and optimizer as a Megatron `torch_dist` checkpoint.

The format is Megatron's own and does not depend on the layout: what was saved at one TP, PP, DP or EP loads at
another. Loading is exact or an error: a tensor that the checkpoint lacks, or has and we do not know, is named.
`trainer.checkpoint` decides where and when; this module only moves the state.
"""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_dapo.errors import UserError
from megatron_dapo.policy import cpu
from megatron_dapo.policy.optimizer_state import (
    SHARDING,
    adapt_step,
    initialize_state,
    saved_step,
    set_step,
    whole_parameters,
)
from megatron_dapo.policy.policy import Policy


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded; the message names the directory and what is wrong with it."""


def save_policy(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. Writes into an existing or new directory; the caller makes it visible when all is written."""
    cpu.install()
    Path(directory).mkdir(parents=True, exist_ok=True)
    _collect_results_in_this_process()
    initialize_state(policy.optimizer)
    with whole_parameters():
        state = _sharded_state(policy, is_loading=False)
    dist_checkpointing.save(state, str(directory), content_metadata=_metadata(policy))


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
    set_step(policy.optimizer, step)


def _step(state: dict[str, Any], directory: str | os.PathLike[str]) -> int:
    """A checkpoint without a step count has made as many optimizer steps as updates."""
    try:
        step = saved_step(state["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{directory} cannot be loaded: {error}") from error
    return int(state["updates"]) if step is None else step


def load_weights(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Collective. The weights alone: a converted checkpoint, or another run's."""
    cpu.install()
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


def _collect_results_in_this_process() -> None:
    """We save synchronously, so the writers' results need no server process of their own.

    Megatron would start one, which outlives a rank that is killed (and where it is spawned, runs __main__ again).
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


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
    state["updates"] = policy.updates
    return state


def _distinct(state: dict[str, Any]) -> dict[str, Any]:
    """Chunks number their layers from 0 each: keep their entries apart for the optimizer's look-up by parameter."""
    return {f"{chunk}.{name}": entry for chunk, part in state.items() for name, entry in part.items()}


def _set_weights(policy: Policy, state: dict[str, Any]) -> None:
    for i, chunk in enumerate(policy.model):
        chunk.load_state_dict(state[f"model{i}"], strict=False)
