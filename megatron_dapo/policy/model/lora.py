"""LoRA under Megatron: adapters on the linear layers of a model whose own weights are frozen.

Each adapted layer has, for every HF layer that it is made of, y += scale · B·(A·x). Tensor-parallel ranks share the
work as they share the layer's:

    outputs split (qkv, fc1)    A on every rank, B by rows. A·x is needed whole by every rank's B, so its gradient is
                                summed over the ranks: by an all-reduce, or, where x is split along the sequence, by
                                the reduce-scatter of the gather's backward pass.
    inputs split (proj, fc2)    A by columns, B on every rank. The partial A·x are summed, and scattered along the
                                sequence where the layer's output is.

With sequence parallelism the half that every rank holds sees a part of the tokens, so its gradient is summed over the
tensor-parallel ranks like that of a layer norm (Megatron's `sequence_parallel` attribute).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.config.families.tensors import Split
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.weights.adapters import adapted, adapter_mappings, adapter_name, initial_adapter
from megatron_dapo.weights.mapping import ParameterMapping, shard_copies
from megatron_dapo.weights.model_weights import RankPosition, live_mappings, shard


class Adapters(MegatronModule):
    """All adapters of one model chunk. `enabled = False` leaves the frozen base: the reference policy."""

    def __init__(
        self, chunk: Any, shape: ModelShape, lora: LoraConfig, position: RankPosition, groups: Any, seed: int
    ) -> None:
        super().__init__(config=chunk.config)
        self.enabled = True
        self.scale = lora.alpha / lora.rank
        self._position = position
        self._groups = groups
        self.mappings: dict[str, ParameterMapping] = {}
        self._layers: dict[str, _AdaptedLayer] = {}  # by the name of the base weight
        table = adapter_mappings(shape, lora.rank, tuple(lora.targets))
        owners = {id(weight): module for module in chunk.modules() for weight in module.parameters(recurse=False)}
        for mapping, weight in live_mappings([chunk], shape, position):
            weight.requires_grad_(False)
            if names := adapted(mapping, lora.targets):
                self._adapt(owners[id(weight)], mapping, names, weight, table, seed)
        if chunk.pre_process:  # recomputed layers need an input that requires a gradient
            chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())

    def _adapt(
        self, module: nn.Module, mapping: ParameterMapping, names: Sequence[str], weight: Tensor,
        table: Mapping[str, ParameterMapping], seed: int,
    ) -> None:  # fmt: skip
        rank, size = self._position.split(mapping)

        def half(name: str, which: str) -> nn.Parameter:
            adapter = table[adapter_name(name, which)]
            value = shard(adapter, initial_adapter(adapter, seed), rank, size)
            return self._register(adapter, value, weight)

        halves = [(half(name, "A"), half(name, "B")) if name in names else None for name in mapping.hf]
        group = self._groups.expt_tp if mapping.expert is not None else self._groups.tp
        layer = _AdaptedLayer(self, mapping, halves, rows_in_shard_order(mapping, rank, size, weight), group)
        self._layers[mapping.name] = layer
        module.register_forward_hook(layer.add)

    def _register(self, mapping: ParameterMapping, value: Tensor, base: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value.to(base, copy=True))
        expert = mapping.expert is not None
        split = mapping.split is not Split.NONE
        # Megatron reads these: which ranks hold the same parameter, and which sum its gradient.
        parameter.tensor_model_parallel = split or expert  # type: ignore[attr-defined]
        parameter.partition_dim = int(mapping.split is Split.COLUMNS)  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
        parameter.sequence_parallel = self.config.sequence_parallel and not split and not expert  # type: ignore[attr-defined]
        parameter.allreduce = getattr(base, "allreduce", True)  # type: ignore[attr-defined]
        self.register_parameter(mapping.name.replace(".", "-"), parameter)
        self.mappings[mapping.name] = mapping
        return parameter

    def live(self) -> Iterator[tuple[ParameterMapping, nn.Parameter]]:
        """Every adapter of this rank with its mapping."""
        for name, mapping in self.mappings.items():
            yield mapping, self.get_parameter(name.replace(".", "-"))

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """This rank's shard of a base weight with its adapter added."""
        return self._layers[name].merged(weight) if name in self._layers else weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Under PEFT's names, so any layout can load them."""
        state = {}
        for mapping, parameter in self.live():
            rank, size = self._position.split(mapping)
            offsets = [] if mapping.split is Split.NONE else [(int(mapping.split is Split.COLUMNS), rank, size)]
            replicas = self._groups.expt_dp if mapping.expert is not None else self._groups.dp_cp
            replica = (0, 0 if offsets else rank, replicas.rank())
            state[f"{prefix}{mapping.name.replace('.', '-')}"] = ShardedTensor.from_rank_offsets(
                mapping.name, parameter, *offsets, replica_id=replica
            )
        return state


class _AdaptedLayer:
    """One linear layer of Megatron's and its adapters, one for each HF layer in it."""

    def __init__(
        self, owner: Adapters, mapping: ParameterMapping, halves: list[tuple[nn.Parameter, nn.Parameter] | None],
        order: Tensor | None, group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._owner = owner
        self._splits_inputs = mapping.split is Split.COLUMNS
        self._halves = halves  # None: a HF layer without adapter
        self._rows = [rows[0] if self._splits_inputs else rows[0] // group.size() for rows in mapping.hf_shapes]
        self._order = order
        self._group = group
        self._alone = group.size() == 1

    def add(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """The layer's forward hook."""
        if not self._owner.enabled:
            return None
        return self._added(output[0], inputs[0]), *output[1:]

    def _added(self, output: Tensor, x: Tensor) -> Tensor:
        """One product adds all B's to the output: each pass over activations costs more than joining the B's."""
        hidden = x @ torch.cat([pair[0] for pair in self._halves if pair is not None]).t()
        if not self._alone:
            hidden = self._exchange(hidden)
        flat, scale = hidden.flatten(0, -2), self._owner.scale
        return torch.addmm(output.flatten(0, -2), flat, self._all_b().t(), alpha=scale).view(output.shape)

    def _all_b(self) -> Tensor:
        """[rows, ranks]: each B in the rows of its HF layer and in the columns of its A, in the order of the shard."""
        like = next(pair[1] for pair in self._halves if pair is not None)
        blocks = (
            like.new_zeros(rows, 0) if pair is None else pair[1]
            for pair, rows in zip(self._halves, self._rows, strict=True)
        )
        found = torch.block_diag(*blocks)
        return found if self._order is None else found.index_select(0, self._order)

    def _exchange(self, hidden: Tensor) -> Tensor:
        sequence = self._owner.config.sequence_parallel
        if self._splits_inputs:
            reduce = (
                reduce_scatter_to_sequence_parallel_region if sequence else reduce_from_tensor_model_parallel_region
            )
            return reduce(hidden, group=self._group)
        spread = gather_from_sequence_parallel_region if sequence else copy_to_tensor_model_parallel_region
        return spread(hidden, group=self._group)

    def merged(self, weight: Tensor) -> Tensor:
        change = torch.cat(
            [
                weight.new_zeros(rows, weight.shape[1], dtype=torch.float32) if pair is None
                else pair[1].float() @ pair[0].float()
                for pair, rows in zip(self._halves, self._rows, strict=True)
            ]
        )  # fmt: skip
        if self._order is not None:
            change = change.index_select(0, self._order)
        return (weight.float() + self._owner.scale * change).to(weight.dtype)


def rows_in_shard_order(mapping: ParameterMapping, rank: int, size: int, weight: Tensor) -> Tensor | None:
    """Where the rows of a rank's shard are in [HF layer 0's rows, HF layer 1's rows, …] of this rank; None: in this
    order. Each HF layer's rows must be an equal share, in one piece, as B is split."""
    if mapping.split is Split.COLUMNS or (size == 1 and len(mapping.segments) == 1):
        return None
    shares = [rows[0] // size for rows in mapping.hf_shapes]
    first = [sum(shares[:source]) for source in range(len(shares))]
    order = torch.empty(weight.shape[0], dtype=torch.int64)
    for copy in shard_copies(mapping, rank, size, weight.shape):
        start = copy.hf_row - rank * shares[copy.source]
        if start < 0 or start + copy.rows > shares[copy.source]:
            raise ConfigError(
                f"policy.lora: tensor_parallel {size} does not split {mapping.hf[copy.source]} into equal, connected "
                "parts: lower it, or leave this layer out of policy.lora.targets"
            )
        order[copy.shard_row : copy.shard_row + copy.rows] = torch.arange(copy.rows) + first[copy.source] + start
    return None if torch.equal(order, torch.arange(len(order))) else order.to(weight.device)


@torch.no_grad()
def load_adapters(chunks: Iterable[Any], tensors: Mapping[str, Tensor], position: RankPosition) -> None:
    """Fills the adapters from full tensors under PEFT's names."""
    for chunk in chunks:
        for mapping, parameter in chunk.adapters.live():
            parameter.copy_(shard(mapping, tensors[mapping.name], *position.split(mapping)))
