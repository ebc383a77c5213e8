"""The distributed optimizer's state as whole parameters, which any layout can read.

Every rank of a data-parallel group holds a slice of each bucket of parameters. A parameter is written by one of the
ranks that hold a piece of it, the one that has least to write so far, after the others have sent it theirs; when
loading, every rank reads the parameters of which it holds a piece.

Keys and shapes in the checkpoint are those of Megatron's `fully_reshardable`, which makes them in another way: all
ranks gather all state in host memory, the first one writes, and each reads everything. Besides (0.16.1, 0.19.2) it
joins buckets without the padding at their ends but cuts parameters out at offsets that count it, so that the state of
later buckets is shifted and the last elements become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")  # the fp32 parameter and Adam's moments
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
Pieces = dict[int, slice]  # rank of the data-parallel group: its part of the flattened parameter


@contextmanager
def whole_parameters() -> Iterator[None]:
    """Within, distributed optimizers describe their state in the way above."""
    original = DistributedOptimizer.sharded_param_state_fully_reshardable
    DistributedOptimizer.sharded_param_state_fully_reshardable = _parameter_states
    try:
        yield
    finally:
        DistributedOptimizer.sharded_param_state_fully_reshardable = original


def _parameter_states(
    optimizer: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Collective when saving. Sharded tensors of parameter 0, 1, …: those that this rank writes, or is to read."""
    group = optimizer.data_parallel_group
    described = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    if not is_loading:
        _connect(optimizer)
    to_write = [0] * group.size()
    places = [(buffer, *place) for buffer in optimizer.buffers for place in buffer.param_index_map.items()]
    states: dict[int, dict[str, Any]] = {}
    for index, (buffer, parameter, (start, end, bucket)) in enumerate(places):
        pieces = _pieces(buffer.buckets[bucket], start, end, group.size())
        writer = min(pieces, key=lambda rank: to_write[rank])
        to_write[writer] += end - start
        whole: dict[str, Tensor] = {}
        if not is_loading:
            whole = _joined(optimizer, parameter, pieces, writer)
        elif group.rank() in pieces:
            whole = {key: torch.empty(end - start, dtype=torch.float32, device="cpu") for key in KEYS}
        if whole:
            entry = described[parameter]
            assert entry.replica_id[-1] == group.rank()
            replica = (*entry.replica_id[:-1], 0 if writer == group.rank() else 1 + group.rank())
            states[index] = {
                key: _like(entry, f"optimizer.state.{key}.{entry.key}", state.view(parameter.shape), replica)
                for key, state in whole.items()
            }
    return states


def _like(entry: Any, key: str, state: Tensor, replica: tuple[int, ...]) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=key, data=state, replica_id=replica)
    return replace(entry, key=key, data=state, dtype=state.dtype, replica_id=replica)


def _pieces(bucket: Any, start: int, end: int, ranks: int) -> Pieces:
    """Which ranks hold which part of the parameter at [start, end) of the buffer: each has one slice of the bucket."""
    share = bucket.grad_data.numel() // ranks
    first, last = start - bucket.offset, end - bucket.offset
    return {
        rank: slice(max(first, rank * share) - first, min(last, (rank + 1) * share) - first)
        for rank in range(first // share, (last - 1) // share + 1)
    }


def _joined(optimizer: Any, parameter: Tensor, pieces: Pieces, writer: int) -> dict[str, Tensor]:
    """On the writer the whole state of a parameter, flat; on the others nothing."""
    group = optimizer.data_parallel_group
    me = group.rank()
    if me not in pieces:
        return {}
    state = optimizer._get_main_param_and_optimizer_states(parameter)
    mine = {key: state[key].detach().float().view(-1) for key in KEYS}
    if len(pieces) == 1:
        return mine
    if me != writer:
        peer = dist.get_global_rank(group, writer)
        _wait([dist.P2POp(dist.isend, piece.contiguous(), peer, group) for piece in mine.values()])
        return {}
    whole = {key: piece.new_empty(parameter.numel()) for key, piece in mine.items()}
    receiving = []
    for rank, part in pieces.items():
        for key in KEYS:
            if rank == me:
                whole[key][part] = mine[key]
            else:
                peer = dist.get_global_rank(group, rank)
                receiving.append(dist.P2POp(dist.irecv, whole[key][part], peer, group))
    _wait(receiving)
    return {key: joined.cpu() for key, joined in whole.items()}


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _connect(optimizer: Any) -> None:
    """NCCL wants all ranks of a group in its first call; in those that send pieces, only some take part."""
    device = optimizer.buffers[0].grad_data.device
    dist.all_reduce(torch.zeros(1, device=device), group=optimizer.data_parallel_group)
