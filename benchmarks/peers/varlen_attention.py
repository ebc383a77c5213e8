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


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, h], position_ids [1, tokens] (0: a sequence begins) to [1, tokens, heads, h]."""
    starts = (position_ids[0] == 0).nonzero()[:, 0].int()
    ends = torch.nn.functional.pad(starts, (0, 1), value=position_ids.shape[1])
    longest = int(position_ids.max()) + 1
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
