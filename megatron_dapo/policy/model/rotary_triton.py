"""The Triton kernel of the rotary embedding in local_spec: one program per token rotates all heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, out, cos, sin, token_stride, head_stride, heads, HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane, head = tl.arange(0, LANES), tl.arange(0, HEADS)
    real = lane < HALF
    c = tl.load(cos + token * HALF + lane, mask=real, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + lane, mask=real, other=0.0)[None, :]
    if BACK:
        s = -s
    inside = real[None, :] & (head < heads)[:, None]
    source = x + token * token_stride + head[:, None] * head_stride + lane[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head[:, None]) * (2 * HALF) + lane[None, :]
    kind = out.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(kind), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotates x [tokens, heads, h] forward or back; returns a new contiguous tensor."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rotate[(tokens,)](
            x, out, cos, sin, x.stride(0), x.stride(1), heads, HALF=head_dim // 2,
            HEADS=triton.next_power_of_2(heads), LANES=triton.next_power_of_2(head_dim // 2), BACK=back, num_warps=4,
        )  # fmt: skip
    return out
