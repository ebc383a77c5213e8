"""Gated DeltaNet layers for the embedded engine: one token after the other, so that a token's bits depend only on the
tokens before it in its own sequence.

A page of the paged cache also holds, for each of these layers, the convolution's window and the recurrent state after
the last position that was written to it, and those before it: the last token of a cached prompt is computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CURRENT, BEFORE = 0, 1  # the state after the last written position, and before it


class Update(NamedTuple):
    """One token of a forward pass: where its state comes from, and the page that it is written to."""

    row: int
    source: tuple[int, int] | None  # page, and CURRENT or BEFORE; None: the sequence starts
    page: int


class LinearStates:
    """Windows [layers, pages, 2, width − 1, channels] and states [layers, pages, 2, heads, dk, dv], in fp32."""

    def __init__(self, config: Any) -> None:
        heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * keys + heads * values
        layers = sum(kind == "linear_attention" for kind in config.layer_types)
        self.windows = torch.zeros(layers, 1, 2, config.linear_conv_kernel_dim - 1, channels)
        self.states = torch.zeros(layers, 1, 2, heads, keys, values)
        self.written = [-1]  # by page: the last position that was written, in the page

    def grow(self, pages: int) -> None:
        for name in ("windows", "states"):
            tensor = getattr(self, name)
            layers, _, *rest = tensor.shape
            setattr(self, name, torch.cat([tensor, torch.zeros(layers, pages, *rest)], dim=1))
        self.written += [-1] * pages

    def clear(self, page: int) -> None:
        self.written[page] = -1

    def copy(self, pages: list[int], copies: list[int]) -> None:
        self.windows[:, copies], self.states[:, copies] = self.windows[:, pages], self.states[:, pages]
        for page, copied in zip(pages, copies, strict=True):
            self.written[copied] = self.written[page]

    def plan(self, positions: list[int], pages: list[list[int]], page_size: int) -> list[Update]:
        """The updates of one forward pass, in order. Rows without pages are padding."""
        updates = []
        for row, (position, held) in enumerate(zip(positions, pages, strict=True)):
            block, offset = divmod(position, page_size)
            page = held[block]
            if page == 0:
                continue
            if offset == 0:
                source = (held[block - 1], CURRENT) if block else None
            else:
                again = self.written[page] == offset
                assert again or self.written[page] == offset - 1, f"position {position} after {self.written[page]}"
                source = (page, BEFORE if again else CURRENT)
            updates.append(Update(row, source, page))
            self.written[page] = offset
        return updates


def linear_attention(module: Any, hidden: Tensor, states: LinearStates, layer: int, updates: list[Update]) -> Tensor:
    """hidden [batch tokens, hidden size] through a transformers' gated DeltaNet; `layer` counts these layers."""
    mixed, z, b, a = _projections(module, hidden)
    beta = b.sigmoid().float()
    decay = (-module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)).exp()
    weight = module.conv1d.weight.squeeze(1).float().T  # [width, channels]
    out = torch.zeros(hidden.shape[0], module.num_v_heads, module.head_v_dim)
    for row, source, page in updates:
        windows, memories = states.windows[layer], states.states[layer]
        if source is None:
            window, memory = torch.zeros_like(windows[0, 0]), torch.zeros_like(memories[0, 0])
        else:
            window, memory = windows[source].clone(), memories[source].clone()
        inputs = torch.cat([window, mixed[row : row + 1].float()])
        q, k, v = _heads(module, F.silu((inputs * weight).sum(0)))
        new = memory * decay[row, :, None, None]
        delta = (v - (new * k[..., None]).sum(-2)) * beta[row, :, None]
        new = new + k[..., None] * delta[:, None, :]
        out[row] = (new * q[..., None]).sum(-2)
        windows[page, BEFORE], memories[page, BEFORE] = window, memory
        windows[page, CURRENT], memories[page, CURRENT] = inputs[1:], new
    heads = out.to(hidden.dtype).reshape(-1, module.head_v_dim)
    normed = module.norm(heads, z.reshape(-1, module.head_v_dim))
    projected: Tensor = module.out_proj(normed.view(hidden.shape[0], -1))
    return projected


def _projections(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [batch tokens, channels], then z, b and a."""
    if not hasattr(module, "in_proj_qkvz"):
        return module.in_proj_qkv(hidden), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
    fused = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
    q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*fused))
    return torch.cat([x.reshape(hidden.shape[0], -1) for x in (q, k, v)], dim=-1), z, b, a


def _heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of unit length, one per value head; q is also divided by √dk."""
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim])
    q, k = (x.view(-1, module.head_k_dim) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = module.num_v_heads // module.num_k_heads
    q, k = (x.repeat_interleave(repeats, dim=0) for x in (q, k))
    return q * module.head_k_dim**-0.5, k, v.view(-1, module.head_v_dim)
