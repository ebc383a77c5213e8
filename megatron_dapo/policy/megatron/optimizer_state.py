"""The optimizer state as whole parameters, which any layout and any Adam that Megatron may pick can read.

Distribution. Every rank of a data-parallel group holds a slice of each bucket of parameters. One of the ranks that
hold a piece of a parameter writes all of it, after the others have sent their pieces; the rank with the least to write
so far is chosen. When loading, every rank reads the parameters of which it holds a piece. Keys and shapes in the
checkpoint are those of Megatron's `fully_reshardable`. Megatron's own implementation gathers all state in the host
memory of all ranks, writes it on the first one, reads everything everywhere, and has a bug
(docs/upstream/bucket-padding.md). `patches` puts `describe_state` and `set_state` in its place.

Step count. Adam's bias correction needs the number of updates. torch's AdamW keeps it as a tensor per parameter;
Transformer Engine's and apex's FusedAdam keep it as an integer per parameter group. All parameters are updated
together, so the checkpoint holds one number (in the parameter groups, as Megatron writes it), and `set_step` gives it
to whichever optimizer is in use. Megatron alone fails to load torch's AdamW: it looks for `step` among the saved
tensors, and it shares one counter between all parameters, which then counts every parameter's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
OWN = ("params", "is_expert_parallel", "betas", "eps")  # of a parameter group: not those of the checkpoint
Pieces = dict[int, slice]  # rank of the data-parallel group: its part of the flattened parameter
ToHost = Callable[[Tensor], Tensor]


def describe_state(self: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: Any = None) -> Any:
    """Takes the place of the optimizer's own method. `metadata["to_host"]` copies a joined parameter out of device
    memory at once, because the device has no room for all of them."""
    return _to_read(self, model_state) if is_loading else _to_write(self, model_state, metadata["to_host"])


def set_state(self: Any, parameter: Tensor, tensors: dict[str, Any]) -> None:
    """Takes the place of the optimizer's own method, which wants every tensor of the state in `tensors`; those not
    saved keep their value."""
    own = DistributedOptimizer._set_main_param_and_optimizer_states
    if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # copies what it gets, into the state's types
        device = "cpu" if _parts(self.optimizer) else parameter.device
        own(self, parameter, {key: state.to(device) for key, state in tensors.items()})
        return
    group, order = self.model_param_group_index_map[parameter]
    main, scaled = self.optimizer.param_groups[group]["params"][order], _narrow(self.optimizer) & tensors.keys()
    for key in scaled:
        self.optimizer.set_scaled_state(main, key, tensors[key])
    plain = {key: state for key, state in tensors.items() if key not in scaled}
    own(self, parameter, {**self.optimizer.state[main], **plain})


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The torch, Transformer Engine or apex optimizers inside Megatron's."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield part.optimizer


def _parts(adam: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of host and device inside Megatron's optimizer with CPU offload; none in any other."""
    return list(getattr(adam, "sub_optimizers", []))


def _narrow(adam: Any) -> set[str]:
    """What Transformer Engine's Adam keeps in narrow types, scaled. Megatron reads and writes it without the scale with
    the fp8 recipes for which it keeps the main weights itself."""
    types: dict[str, torch.dtype] = getattr(adam, "name_to_dtype_map", {})
    return {"param" if key == "master_param" else key for key, dtype in types.items() if dtype != torch.float32}


def _groups(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every optimizer that holds states, with each of its parameter groups."""
    for inner in inner_optimizers(optimizer):
        for adam in _parts(inner) or [inner]:
            yield from ((adam, group) for group in adam.param_groups)


def initialize_state(optimizer: Any) -> None:
    """Creates zero state where there is none: before the first update Adam has no state to save or to load into."""
    for adam, group in _groups(optimizer):
        for parameter in group["params"]:
            if adam.state[parameter]:
                continue
            if getattr(adam, "use_decoupled_grad", False) or _narrow(adam):  # precision-aware
                adam.initialize_state(parameter, False)
                continue
            state = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            if _counts_per_parameter(adam):
                state["step"] = _step_tensor(group, parameter, 0)
            adam.state[parameter] = state
    for inner in inner_optimizers(optimizer):
        if _parts(inner):
            inner._sync_sub_optimizers_state_to_hdo()  # type: ignore[attr-defined]


def _dicts(state: Any) -> Iterator[dict[Any, Any]]:
    """All dictionaries inside the optimizer's part of a checkpoint."""
    if isinstance(state, dict):
        yield state
        state = list(state.values())
    for value in state if isinstance(state, list) else ():
        yield from _dicts(value)


def saved_step(optimizer_state: Any) -> int | None:
    """The step count in the optimizer's part of a loaded checkpoint; None where none was saved."""
    counters = ("step", "common_step")
    found = {int(part[key]) for part in _dicts(optimizer_state) for key in counters if key in part}
    if len(found) > 1:
        raise ValueError(f"the optimizer has different step counts for different parameters: {sorted(found)}")
    return found.pop() if found else None


def adapt_step(optimizer: Any, optimizer_state: Any, step: int) -> None:
    """Puts the step count of a loaded checkpoint where Megatron looks for it when it loads this kind of optimizer."""
    per_parameter = all(_counts_per_parameter(adam) for adam in inner_optimizers(optimizer))
    for state in list(_dicts(optimizer_state)):
        for group in state.get("param_groups", []):
            group["step"] = step
        if "param_groups" in state and "state" in state:  # without the distributed optimizer
            state["state"].pop("common_step", None)
            if per_parameter:
                state["state"]["common_step"] = torch.tensor(float(step))


def fit_chain(optimizer: Any, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """The optimizer's part of a loaded checkpoint, for as many chained optimizers as we have. Megatron gives experts an
    optimizer of their own only where ranks share them in another way than the other layers, so the checkpoint may have
    another number. Tensors were loaded by name, into entries of ours. All other values are the same in every entry,
    but for the parameter groups: each of ours gets the options of a saved group of its kind."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    top = {key: value for key, value in loaded.items() if not isinstance(key, int)}
    parts = [part for key, part in loaded.items() if isinstance(key, int)]
    shared = {key: value for part in (top, *parts) for key, value in part.items() if key != "state"}
    groups = [group for state in _dicts(loaded) for group in state.get("param_groups", [])]
    options = {_group_kind(group): group for group in groups if "wd_mult" in group}
    entries = [top] if len(chained) == 1 else [loaded[index] for index in range(len(chained))]
    fitted = []
    for part, state in zip(chained, entries, strict=True):
        own = [
            {**options.get(_group_kind(group), group), **{key: group[key] for key in OWN if key in group}}
            for group in part.optimizer.state_dict()["param_groups"]
        ]
        whole = {**shared, **state, "param_groups": own}
        if "optimizer" in whole:  # of the distributed optimizer
            whole["optimizer"] = {**whole["optimizer"], "param_groups": whole.pop("param_groups")}
        fitted.append(whole)
    return fitted[0] if len(chained) == 1 else dict(enumerate(fitted))


def _group_kind(group: dict[str, Any]) -> tuple[Any, ...]:
    return group.get("wd_mult"), group.get("lr_mult")


def drop_classes(optimizer_state: Any) -> None:
    """Megatron's optimizer with CPU offload has classes among the options of its parameter groups. A checkpoint must
    not hold them: torch refuses to load such a file."""
    for state in _dicts(optimizer_state):
        for group in state.get("param_groups", []):
            for key in [key for key, value in group.items() if isinstance(value, type)]:
                del group[key]


def set_step(optimizer: Any, step: int) -> None:
    """Every parameter has made `step` updates. Each of torch's counters is a tensor of its own."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups if _parts(inner) else ():  # it would set its parts back to this count
            group.pop("step", None)
    for adam, group in _groups(optimizer):
        if not _counts_per_parameter(adam):
            group["step"] = step
            continue
        group.pop("step", None)  # Megatron's, from the checkpoint
        for parameter in group["params"]:
            adam.state[parameter]["step"] = _step_tensor(group, parameter, step)


def _step_tensor(group: dict[str, Any], parameter: Tensor, step: int) -> Tensor:
    """torch's counter of one parameter. Fused kernels read it on the parameter's device."""
    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    return torch.tensor(float(step), device=device)


def set_fused(optimizer: Any, fused: bool) -> None:
    """Whether torch's AdamW, where Megatron has picked it, steps in one kernel. Loading a checkpoint sets what the
    saved optimizer had. The Adam of Transformer Engine or apex is always fused."""
    for adam in inner_optimizers(optimizer):
        if _counts_per_parameter(adam):
            for options in (adam.defaults, *adam.param_groups):
                options.update(fused=fused, foreach=None if not fused else False)


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)


def _positions(optimizer: Any) -> Iterator[tuple[int, Tensor, int, Pieces]]:
    """(index, parameter, number of elements, pieces) in the order in which Megatron numbers the parameters."""
    ranks, index = optimizer.data_parallel_group.size(), 0
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            yield index, parameter, end - start, _pieces(buffer.buckets[bucket], start, end, ranks)
            index += 1


def _writers(optimizer: Any) -> Iterator[tuple[int, Tensor, int, Pieces, int]]:
    """As `_positions`, with the rank of the data-parallel group that writes the parameter. The same on every rank."""
    to_write = [0] * optimizer.data_parallel_group.size()
    for index, parameter, size, pieces in _positions(optimizer):
        writer = min(pieces, key=lambda rank: to_write[rank])
        to_write[writer] += size
        yield index, parameter, size, pieces, writer


def _to_write(optimizer: Any, model_state: dict[str, Any], to_host: ToHost) -> dict[int, dict[str, Any]]:
    """Collective. Sharded tensors of the parameters that this rank writes, by parameter number."""
    described, me = _described(model_state), optimizer.data_parallel_group.rank()
    _connect(optimizer)
    states = {}
    for index, parameter, _, pieces, writer in _writers(optimizer):
        whole = _joined(optimizer, parameter, pieces, writer, to_host)
        if writer == me:
            states[index] = _sharded(described[parameter], parameter, whole, me, is_writer=True)
    return states


def _to_read(optimizer: Any, model_state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Sharded tensors of the parameters of which this rank holds a piece, by parameter number."""
    described, me = _described(model_state), optimizer.data_parallel_group.rank()
    states = {}
    for index, parameter, size, pieces, writer in _writers(optimizer):
        if me in pieces:
            empty = {key: torch.empty(size, dtype=torch.float32, device="cpu") for key in KEYS}
            states[index] = _sharded(described[parameter], parameter, empty, me, is_writer=writer == me)
    return states


def _described(model_state: dict[str, Any]) -> dict[Tensor, Any]:
    return {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}


def _sharded(entry: Any, parameter: Tensor, whole: dict[str, Tensor], me: int, *, is_writer: bool) -> dict[str, Any]:
    assert entry.replica_id[-1] == me
    replica = (*entry.replica_id[:-1], 0 if is_writer else 1 + me)
    return {
        key: _like(entry, f"optimizer.state.{key}.{entry.key}", state.view(parameter.shape), replica)
        for key, state in whole.items()
    }


def _like(entry: Any, key: str, state: Tensor, replica: tuple[int, ...]) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=key, data=state, replica_id=replica)
    return replace(entry, key=key, data=state, dtype=state.dtype, replica_id=replica)


def _pieces(bucket: Any, start: int, end: int, ranks: int) -> Pieces:
    """Which rank holds which part of the parameter at [start, end) of the buffer: each has one slice of the bucket."""
    share = bucket.grad_data.numel() // ranks
    first, last = start - bucket.offset, end - bucket.offset
    return {
        rank: slice(max(first, rank * share) - first, min(last, (rank + 1) * share) - first)
        for rank in range(first // share, (last - 1) // share + 1)
    }


def _joined(optimizer: Any, parameter: Tensor, pieces: Pieces, writer: int, to_host: ToHost) -> dict[str, Tensor]:
    """On the writer the whole state of a parameter, flat; on the others nothing."""
    group = optimizer.data_parallel_group
    me = group.rank()
    if me not in pieces:
        return {}
    state, narrow = optimizer._get_main_param_and_optimizer_states(parameter), _narrow(optimizer.optimizer)
    if not optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        state |= {key: optimizer.optimizer.get_unscaled_state(state["param"], key) for key in narrow}
    mine = {key: state[key].detach().view(-1) for key in KEYS}
    if len(pieces) == 1:  # stays where it is, but for fp32 copies of narrower state, which leave the device at once
        return {key: to_host(piece) if key in narrow else piece for key, piece in mine.items()}
    # State that is kept in host memory has to pass through the device's process group.
    mine = {key: piece.to(parameter.device, torch.float32) for key, piece in mine.items()}
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
    return {key: to_host(joined) for key, joined in whole.items()}


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _connect(optimizer: Any) -> None:
    """NCCL wants all ranks of a group in its first call; only some take part in those that send pieces."""
    device = optimizer.buffers[0].grad_data.device
    dist.all_reduce(torch.zeros(1, device=device), group=optimizer.data_parallel_group)
