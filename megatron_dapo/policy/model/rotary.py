"""Rotary position embedding for packed sequences: one table per micro-batch, one kernel for queries or keys.

Megatron's torch version loops over the packed sequences in Python and reads their lengths from the device, twice in
every layer; on a GPU that costs more than the attention itself. Here cosines and sines are computed once per
micro-batch. Channel i is rotated together with channel i + h/2 (Qwen's and Llama's convention), in fp32. YaRN changes
the frequencies, and its attention factor multiplies cosines and sines, as in transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dapo.config.model import Yarn
from megatron_dapo.policy.head.kernels import has_triton


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles, each [tokens, h/2] in fp32. Channels of a head beyond h are not rotated."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, base: float, yarn: Yarn | None = None) -> RotaryTable:
        """positions [tokens]: the index of each token in its own sequence."""
        angles = torch.outer(positions.float(), inverse_frequencies(head_dim, base, yarn, positions.device))
        scale = yarn.attention_factor if yarn else 1.0
        return cls(angles.cos() * scale, angles.sin() * scale)


def inverse_frequencies(
    head_dim: int, base: float, yarn: Yarn | None = None, device: torch.device | None = None
) -> Tensor:
    """Angle per position of each pair of channels, [head_dim / 2]."""
    channels = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    periods = base ** (channels / head_dim)
    if yarn is None:
        return 1.0 / periods
    low, high = yarn.ramp(head_dim, base)
    divided = ((channels / 2 - low) / (high - low)).clamp(0, 1)
    return divided / (yarn.factor * periods) + (1 - divided) / periods


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
        from megatron_dapo.policy.model import rotary_triton

        ctx.table = table
        return rotary_triton.rotate(x, table.cos, table.sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from megatron_dapo.policy.model import rotary_triton

        return rotary_triton.rotate(grads[0], ctx.table.cos, ctx.table.sin, back=True), None
