"""Causal attention over packed sequences in one kernel, with linear memory and without Transformer Engine.

torch's `varlen_attn` (FlashAttention) is used on CUDA for half-precision inputs. Its parameters differ between torch
versions, so its signature is inspected. Where torch lacks it, the caller attends sequence by sequence.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _function() -> tuple[Any, frozenset[str]] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def can_attend(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _function() is not None


def attend(query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor, longest: int, scale: float) -> Tensor:
    """query [t, n, h], key and value [t, groups, h] to [t, n, h]; `cumulative` [sequences + 1] int32 on the device."""
    found = _function()
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
