"""The gated DeltaNet layer of Qwen3-Next and Qwen3.5, in the place of attention in a Megatron layer.

Megatron-Core has one, but before 0.18 it refuses packed sequences and context parallelism, and it never runs without
CUDA. This one takes the packs of `policy/batch.py` on any device.

Tensor parallelism splits heads: a rank's input projection holds its share of each of q, k, v, z, b and a. Context
parallelism splits heads, too: around convolution and rule, tokens are exchanged for heads, so that a rank sees whole
sequences for a part of its heads. The gate z, the norm and the projections stay with the tokens.

`A_log` and the norm's weight stay in fp32 whatever the other weights are: log A rounded to bf16 moves A by up to 1.6 %.
The norm multiplies by its weight, not by 1 + weight as the model's other norms do, so conversion keeps its bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from megatron_dapo.config import ConfigError
from megatron_dapo.config.model import LinearAttention
from megatron_dapo.policy.model.delta_rule import Chunks, causal_convolution, gated_delta_rule
from megatron_dapo.policy.model.local_spec import segment_lengths, zigzag_positions

PARTS = ("query", "key", "value", "z", "beta", "alpha")  # of the input projection, as checkpoints name them


@dataclass
class GatedDeltaNetSubmodules:
    in_proj: Any  # a column-parallel linear layer
    out_proj: Any  # a row-parallel one


class _Exchange(torch.autograd.Function):
    """x [ranks, …]: block j goes to rank j; block i of the result is from rank i. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grads[0], ctx.group), None


class GatedNorm(torch.nn.Module):
    """RMSNorm(x) · weight · SiLU(z) over the channels of each head; computed in fp32."""

    def __init__(self, size: int, eps: float, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=torch.float32, device=torch.cuda.current_device()))
        self.eps = eps
        self._tp_group = tp_group

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [tokens, heads, channels]. Each rank has its own heads: the weight's gradient is summed over ranks."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight, group=self._tp_group)
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return (normed * weight.float() * F.silu(z.float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        *,
        linear: LinearAttention,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.linear = linear
        self.layer_number = layer_number
        tp, cp = self.tp_group.size(), self.cp_group.size()
        if linear.key_heads % (tp * cp):
            raise ConfigError(
                f"tensor_parallel × context_parallel is {tp} × {cp}, but the gated DeltaNet layers have "
                f"{linear.key_heads} key heads, which both split"
            )
        self.parts = [rows // tp for rows in linear.parts]
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, sum(linear.parts), init_method=config.init_method,
            gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1", **common,
        )  # fmt: skip
        self.out_proj = build_module(
            submodules.out_proj, linear.parts[3], config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="fc2", **common,
        )  # fmt: skip
        channels, device = sum(self.parts[:3]), torch.cuda.current_device()
        self.conv1d = torch.nn.Conv1d(
            channels, channels, linear.conv_width, groups=channels, bias=False, dtype=config.params_dtype, device=device
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(self.parts[4], dtype=config.params_dtype, device=device))
        self.A_log = torch.nn.Parameter(torch.zeros(self.parts[4], dtype=torch.float32, device=device))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.gated_norm = GatedNorm(linear.value_dim, config.layernorm_epsilon, self.tp_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """A conversion of the whole model to bf16 leaves the fp32 parameters as they are."""
        kept = {parameter: parameter.data for parameter in (self.A_log, self.gated_norm.weight)}
        super()._apply(fn, recurse)
        for parameter, data in kept.items():
            if parameter.dtype != data.dtype and not parameter.is_meta:
                parameter.data = data.to(parameter.device)
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [tokens, 1, hidden] of a pack, or [positions, batch, hidden]."""
        mixed, _bias = self.in_proj(hidden_states)
        steps, batch = mixed.shape[:2]
        packs = PackOrder.of(packed_seq_params, steps, batch, self.cp_group, mixed.device)
        tokens = mixed.transpose(0, 1).flatten(0, 1)
        q, k, v, z, b, a = tokens.split(self.parts, -1)
        whole = self._to_heads([q, k, v, b, a], packs)
        out = self._to_tokens(self._mix(whole, packs.chunks).flatten(1), packs)
        heads = (-1, self.linear.value_dim)
        normed = self.gated_norm(out.unflatten(-1, heads), z.unflatten(-1, heads)).flatten(1)
        projected, bias = self.out_proj(normed.unflatten(0, (batch, steps)).transpose(0, 1))
        return projected, bias

    def _mix(self, parts: Sequence[Tensor], chunks: Chunks) -> Tensor:
        """Convolution, gates and rule for the heads at hand, on whole sequences; [tokens, value heads, dv]."""
        q, k, v, b, a = parts
        taps = torch.cat([self._share(weight) for weight in self.conv1d.weight.split(self.parts[:3])])
        qkv = causal_convolution(torch.cat([q, k, v], -1), taps, chunks)
        dims = (self.linear.key_dim, self.linear.key_dim, self.linear.value_dim)
        split = qkv.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(split, dims, strict=True))
        g = -self._share(self.A_log).float().exp() * F.softplus(a.float() + self._share(self.dt_bias).float())
        return gated_delta_rule(q, k, v, g, b.sigmoid(), chunks)

    def _share(self, weight: Tensor) -> Tensor:
        """This context-parallel rank's heads."""
        return weight.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _to_heads(self, parts: list[Tensor], packs: PackOrder) -> Sequence[Tensor]:
        """From all heads of this rank's tokens to all tokens of this rank's share of the heads."""
        n = self.cp_group.size()
        if n == 1:
            return parts
        blocks = torch.cat([x.unflatten(-1, (n, -1)) for x in parts], -1).transpose(0, 1)
        gathered = _Exchange.apply(blocks, self.cp_group).flatten(0, 1)[packs.order.flatten().argsort()]
        return gathered.split([x.shape[-1] // n for x in parts], -1)

    def _to_tokens(self, x: Tensor, packs: PackOrder) -> Tensor:
        """From x [all tokens, this rank's share of the heads] to [this rank's tokens, all heads]."""
        if self.cp_group.size() == 1:
            return x
        return _Exchange.apply(x[packs.order], self.cp_group).transpose(0, 1).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As Megatron's own layer stores it: each part is a tensor, which tensor-parallel ranks split evenly."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        found = make_sharded_tensors_for_checkpoint(own, prefix, {"A_log": 0, "dt_bias": 0}, sharded_offsets, **groups)
        for name, module in self.named_children():
            where = f"{prefix}{name}."
            if name == "conv1d":
                state = module.state_dict(prefix="", keep_vars=True)
                found |= make_sharded_tensors_for_checkpoint(state, where, {"weight": 0}, sharded_offsets, **groups)
            else:
                found |= sharded_state_dict_default(module, where, sharded_offsets, metadata, tp_group=self.tp_group)
        for name, parts in ((f"{prefix}in_proj.weight", self.parts), (f"{prefix}conv1d.weight", self.parts[:3])):
            found[name] = _by_parts(found[name], parts)
        return found


def _by_parts(tensor: ShardedTensor, rows: Sequence[int]) -> Any:
    """Megatron's own splitting into separately stored parts."""
    try:
        from megatron.core.ssm.utils import _split_tensor_factory as split  # from 0.19 on
    except ImportError:
        from megatron.core.ssm.gated_delta_net import _split_tensor_factory as split
    return split(tensor, list(rows), list(PARTS[: len(rows)]), 0)


@dataclass(frozen=True, slots=True)
class PackOrder:
    """The sequences of a micro-batch for these layers; made by the first one, and kept with the micro-batch."""

    chunks: Chunks
    order: Tensor  # [cp ranks, tokens per rank]: the tokens of each context-parallel rank, as indices in the pack

    @classmethod
    def of(cls, packed: Any, steps: int, batch: int, group: dist.ProcessGroup, device: torch.device) -> PackOrder:
        known: PackOrder | None = getattr(packed, "delta_order", None)
        if known is not None:
            return known
        cp = group.size()
        lengths = [steps * cp] * batch if packed is None else segment_lengths(packed)
        made = cls(Chunks.of(lengths, device), _zigzag(lengths, cp).to(device))
        if packed is not None:
            packed.delta_order = made
        return made


def _zigzag(lengths: Sequence[int], cp: int) -> Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.stack(
        [
            torch.cat([start + zigzag_positions(n, cp, rank) for start, n in zip(starts, lengths, strict=True)])
            for rank in range(cp)
        ]
    )


# Puts gated DeltaNet layers into a block spec, where the model has them instead of attention.


NORM_KEY = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}  # where Megatron's own layer stores this norm


def use_gated_delta_net(spec: Any, config: Any, vp_stage: int | None, linear: LinearAttention) -> None:
    """Changes the layers of this stage that `linear` names; the others stay as they are."""
    first = get_transformer_layer_offset(config, vp_stage)
    spec.layer_specs = [
        _delta_layer(layer, linear) if first + i in linear.layers else layer for i, layer in enumerate(spec.layer_specs)
    ]


def _delta_layer(layer: ModuleSpec, linear: LinearAttention) -> ModuleSpec:
    layer = copy.deepcopy(layer)
    submodules, attention = layer.submodules, layer.submodules.self_attention.submodules
    in_proj, out_proj, norm = attention.linear_qkv, attention.linear_proj, submodules.input_layernorm
    if _fuses_norm(in_proj):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        in_proj, norm = TEColumnParallelLinear, TENorm
    submodules.input_layernorm = norm
    submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet, params={"linear": linear}, submodules=GatedDeltaNetSubmodules(in_proj, out_proj)
    )
    known = {k: v for k, v in submodules.sharded_state_dict_keys_map.items() if not k.startswith("input_layernorm")}
    submodules.sharded_state_dict_keys_map = known | NORM_KEY
    return layer


def _fuses_norm(linear: Any) -> bool:
    return "LayerNorm" in getattr(linear, "__name__", "")
