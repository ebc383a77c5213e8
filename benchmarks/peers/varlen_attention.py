"""Registers `varlen` with transformers: torch's own flash attention for packed sequences.

flash-attn has no wheel, and sdpa computes every pair of tokens of a packed row. With this module as verl's
`external_lib` its trainer has the kernel that megatron-dapo has without Transformer Engine.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

OPTIONS = inspect.signature(varlen_attn).parameters
last: tuple[Tensor, Tensor, int] | None = None  # positions, boundaries, longest: all layers of a pass have the same


def boundaries(position_ids: Tensor) -> tuple[Tensor, int]:
    """Of the sequences in positions [1, tokens] (0: one begins), [sequences + 1], and their longest. Once a pass:
    reading them waits for the GPU."""
    global last
    if last is None or last[0] is not position_ids:
        starts = (position_ids[0] == 0).nonzero()[:, 0].int()
        ends = torch.nn.functional.pad(starts, (0, 1), value=position_ids.shape[1])
        last = position_ids, ends, int(position_ids.max()) + 1
    return last[1:]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, h], position_ids [1, tokens] to [1, tokens, heads, h]."""
    ends, longest = boundaries(position_ids)
    if "enable_gqa" in OPTIONS:
        options: dict[str, Any] = {"enable_gqa": True}
    else:
        options = {}
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    options |= {"window_size": (-1, 0)} if "window_size" in OPTIONS else {"is_causal": True}
    packed = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return varlen_attn(*packed, ends, ends, longest, longest, scale=scaling, **options)[None], None


AttentionInterface.register("varlen", attend)
AttentionMaskInterface.register("varlen", lambda *_, **__: None)  # the positions say it all
