"""Layers for a machine without Transformer Engine: Megatron's local spec with our norm and core attention.

`RMSNorm` works under sequence parallelism; Megatron's own torch norm does not. `CoreAttention` is rotary embedding and
causal attention in torch. Batches [s, b, n, h] use SDPA. Packed sequences [t, n, h] use one variable-length kernel on
CUDA, elsewhere one SDPA call per sequence, so that no token attends across a boundary. Under context parallelism keys
and values are gathered along the sequence; each rank holds a front and a back chunk, in Megatron's zigzag order.

The model is built without position embedding, because the attention rotates. Megatron's torch version loops over the
packed sequences in Python and reads their lengths from the device, twice in every layer; on a GPU that costs more than
the attention itself. Here cosines and sines are computed once per micro-batch (`RotaryTable`), and one kernel rotates
queries or keys. Channel i is rotated together with channel i + h/2 (Qwen's and Llama's convention), in fp32. YaRN
and Llama 3 change the frequencies; YaRN's attention factor multiplies cosines and sines, as in transformers.
"""

from __future__ import annotations

import inspect
import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_dapo import batch_invariant
from megatron_dapo.config.model import RopeScaling, Yarn
from megatron_dapo.policy.head.fused import has_triton


class RMSNorm(torch.nn.Module):
    """Normalises in fp32, and multiplies by the weight or, in models with zero-centred norms, by 1 + weight.

    The weight has Megatron's sequence-parallel attribute, so its gradient is summed over TP.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.zero_centred = config.layernorm_zero_centered_gamma
        weight = torch.full((hidden_size,), 0.0 if self.zero_centred else 1.0, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight.to(torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            return (F.rms_norm(x.float(), self.weight.shape, None, self.eps) * (1 + self.weight.float())).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ExactRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        from megatron_dapo.policy.model import exact

        return exact.rms_norm(x, self.weight, self.eps)


class _GatherSequence(torch.autograd.Function):
    """All-gather along the first axis; the backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad, group=ctx.group)
        return out, None


def zigzag_positions(length: int, cp_size: int, cp_rank: int, device: torch.device | None = None) -> Tensor:
    """Positions of a sequence of `length` that one context-parallel rank holds: chunk r and chunk 2·cp−1−r."""
    if cp_size == 1:
        return torch.arange(length, device=device)
    chunk = length // (2 * cp_size)
    front = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk, device=device)
    back = torch.arange((2 * cp_size - cp_rank - 1) * chunk, (2 * cp_size - cp_rank) * chunk, device=device)
    return torch.cat([front, back])


class CoreAttention(MegatronModule):
    """softmax(r(q)·r(k)ᵀ)·v with a causal mask, where r rotates by position. Megatron's attention layer calls it."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        rotary_base: float,
        rotary_dim: int,
        rope_scaling: RopeScaling | None = None,
        exact: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.exact = exact
        self.rotary_base = rotary_base
        self.rotary_dim = rotary_dim
        self.rope_scaling = rope_scaling
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        table = self._rotary_table(query, packed_seq_params)
        query, key = rotate(query, table), rotate(key, table)
        if packed_seq_params is None:
            return self._attend(query, key, value, attention_mask)
        cp = self.cp_group.size()
        if cp == 1 and can_attend_packed(query):
            cumulative, longest = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.max_seqlen_q
            ordinary = partial(attend_packed, cumulative=cumulative, longest=longest, scale=self.scale)
            if self.exact:
                from megatron_dapo.policy.model import exact

                return exact.attend(query, key, value, cumulative, longest, self.scale, ordinary).flatten(1)
            return ordinary(query, key, value).flatten(1)
        q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        lengths = [length // cp for length in segment_lengths(packed_seq_params)]
        parts = [
            self._attend(*segment)
            for segment in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            if segment[0].shape[0]
        ]
        return torch.cat(parts).squeeze(1)

    def _rotary_table(self, query: Tensor, packed: Any) -> RotaryTable:
        """A packed micro-batch gets its table in the first layer; the other layers reuse it."""
        table: RotaryTable | None = getattr(packed, "rotary_table", None)
        if table is None:
            table = RotaryTable.of(self._positions(query, packed), self.rotary_dim, self.rotary_base, self.rope_scaling)
            if packed is not None:
                packed.rotary_table = table
        return table

    def _positions(self, query: Tensor, packed: Any) -> Tensor:
        known: Tensor | None = getattr(packed, "positions", None)
        if known is not None:
            return known
        cp = self.cp_group
        lengths = [query.shape[0] * cp.size()] if packed is None else segment_lengths(packed)
        return torch.cat([zigzag_positions(length, cp.size(), cp.rank(), query.device) for length in lengths])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[s, b, n, h] to [s, b, n·h]. Megatron's mask is True where attention is forbidden."""
        cp = self.cp_group.size()
        if cp == 1:
            return self._sdpa(q, k, v, None if mask is None else ~mask)
        total = q.shape[0] * cp
        positions = [zigzag_positions(total, cp, rank, q.device) for rank in range(cp)]
        allowed = torch.cat(positions)[None, :] <= positions[self.cp_group.rank()][:, None]
        gathered_k, gathered_v = _GatherSequence.apply(torch.stack([k, v], dim=1), self.cp_group).unbind(1)
        return self._sdpa(q, gathered_k, gathered_v, allowed)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        if batch_invariant.active():
            return batch_invariant.attend_sequence(q.squeeze(1), k.squeeze(1), v.squeeze(1), self.scale).unsqueeze(1)
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k.permute(1, 2, 0, 3),
            v.permute(1, 2, 0, 3),
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def segment_lengths(packed: Any) -> list[int]:
    """Padded lengths of the packed sequences. Our packing keeps them on the host, which avoids a device sync."""
    known = getattr(packed, "lengths", None)
    if known is not None:
        return list(known)
    cumulative = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return list(cumulative.diff().tolist())


def local_block_spec(
    config: Any,
    vp_stage: int | None,
    rotary_base: float,
    rotary_dim: int,
    scaling: RopeScaling | None = None,
    *,
    exact: bool = False,
) -> TransformerBlockSubmodules:
    """Megatron's local spec with our norm and attention in the layers, and our final norm. For a GPTModel with
    position_embedding_type "none". `exact`: with the kernels of `model/exact`."""
    first, layers = get_transformer_layer_offset(config, vp_stage), get_num_layers_to_build(config, vp_stage)
    experts, pattern = config.num_moe_experts, config.moe_layer_freq
    wanted = [experts if pattern == 1 or pattern[first + i] else None for i in range(layers)]
    attention = partial(
        CoreAttention, rotary_base=rotary_base, rotary_dim=rotary_dim, rope_scaling=scaling, exact=exact
    )
    norm = ExactRMSNorm if exact else RMSNorm
    specs = {count: _layer_spec(config, count, attention, norm) for count in set(wanted)}
    return TransformerBlockSubmodules(layer_specs=[specs[count] for count in wanted], layer_norm=norm)


def _layer_spec(config: Any, experts: int | None, core_attention: Any, norm: Any) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if experts:
        # In checkpoints this norm is part of linear_fc1 in dense layers only; Transformer Engine's MoE layers store it
        # separately.
        layer.sharded_state_dict_keys_map = {
            name: key for name, key in layer.sharded_state_dict_keys_map.items() if "pre_mlp" not in name
        }
    attention = layer.self_attention.submodules
    attention.core_attention = core_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


# ---- rotary position embedding ----


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles, each [tokens, h/2] in fp32. Channels of a head beyond h are not rotated."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, base: float, scaling: RopeScaling | None = None) -> RotaryTable:
        """positions [tokens]: the index of each token in its own sequence."""
        angles = torch.outer(positions.float(), inverse_frequencies(head_dim, base, scaling, positions.device))
        scale = scaling.attention_factor if scaling else 1.0
        return cls(angles.cos() * scale, angles.sin() * scale)


def inverse_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Angle per position of each pair of channels, [head_dim / 2]."""
    channels = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    periods = base ** (channels / head_dim)
    if scaling is None:
        return 1.0 / periods
    if isinstance(scaling, Yarn):
        low, high = scaling.ramp(head_dim, base)
        divided = ((channels / 2 - low) / (high - low)).clamp(0, 1)
    else:
        turns = scaling.original_positions / (2 * math.pi * periods)
        divided = 1 - ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return divided / (scaling.factor * periods) + (1 - divided) / periods


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotates the first h channels of x [tokens, …, heads, channels]; same dtype and shape. Differentiable."""
    rotated = 2 * table.cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotated], table), x[..., rotated:]], dim=-1)
    if x.is_cuda and x.dim() == 3 and has_triton():
        return _Rotate.apply(x, table)
    cos, sin = (part.view(part.shape[0], *[1] * (x.dim() - 2), -1) for part in table)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: RotaryTable) -> Tensor:
        from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels

        ctx.table = table
        return kernels.rotate(x, table.cos, table.sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels

        return kernels.rotate(grads[0], ctx.table.cos, ctx.table.sin, back=True), None


# ---- torch's attention kernel for packed sequences ----


@lru_cache(maxsize=1)
def _varlen_attn() -> tuple[Any, frozenset[str]] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def can_attend_packed(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor, longest: int, scale: float) -> Tensor:
    """query [t, n, h], key and value [t, groups, h] to [t, n, h]; `cumulative` [sequences + 1] int32 on the device."""
    found = _varlen_attn()
    assert found is not None
    function, options = found
    keywords: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in options:
            keywords["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    keywords |= {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}
    if "scale" in options:
        keywords["scale"] = scale
    else:  # it divides by √h; apply the remaining factor
        query = query * (scale * query.shape[-1] ** 0.5)
    return function(query, key, value, cumulative, cumulative, longest, longest, **keywords)
