"""The gated delta rule and its causal convolution, for packed sequences.

Per value head, with keys and queries of unit length, decay g ≤ 0 and step size β:

    S ← exp(g_t)·S;   S ← S + k_t·(β_t·(v_t − Sᵀk_t))ᵀ;   o_t = Sᵀq_t/√dk

Neither the state nor the convolution's window crosses a sequence boundary. On CUDA, where flash-linear-attention is
installed, its kernels run; they get the boundaries as `cu_seqlens`. Elsewhere the rule is evaluated in torch, chunk by
chunk: inside a chunk one triangular solve replaces the sequential updates, and step i of the scan handles chunk i of
every sequence that has one, as one batch. `Chunks` describes a pack once for all layers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dapo import batch_invariant

CHUNK = 64
UNIT_EPS = 1e-6  # of the unit length, under the root


@lru_cache(maxsize=1)
def has_fla() -> bool:
    """Whether flash-linear-attention is installed and right on this GPU. A broken installation is an error, not a
    fallback. With Triton 3.4.0 to 3.7.0 its gradients are wrong on Hopper, so it refuses the backward pass."""
    if importlib.util.find_spec("fla") is None:
        return False
    import fla.ops.gated_delta_rule  # noqa: F401

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and _triton_is_wrong_on_hopper():
        warnings.warn(
            "flash-linear-attention is not used: its gradients are wrong on Hopper with this Triton. The rule is "
            "computed in torch, which is slower; install Triton >= 3.7.1, or tilelang",
            stacklevel=2,
        )
        return False
    return True


def _triton_is_wrong_on_hopper() -> bool:
    version = torch.torch_version.TorchVersion(importlib.metadata.version("triton"))  # 3.7.1rc1 is before 3.7.1
    return version >= "3.4" and version < "3.7.1" and importlib.util.find_spec("tilelang") is None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where each token of a pack is computed.

    Chunks are stored step by step: chunk 0 of every sequence, longest sequence first, then chunk 1 of those that have
    one, and so on. A step is thus a contiguous run of chunks.
    """

    positions: Tensor  # [tokens]: the index of a token in its sequence
    slots: Tensor  # [tokens]: the index of a token among the chunked, padded tokens
    steps: tuple[int, ...]  # number of chunks of each step; never increasing
    cumulative: Tensor  # [sequences + 1]: for kernels

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        lengths = [length for length in lengths if length]
        chunks = [-(-length // CHUNK) for length in lengths]
        by_length = sorted(range(len(lengths)), key=lambda i: -chunks[i])
        rank = {sequence: r for r, sequence in enumerate(by_length)}
        steps = tuple(sum(count > i for count in chunks) for i in range(max(chunks)))
        first = torch.tensor([0, *steps]).cumsum(0)
        positions = [torch.arange(length) for length in lengths]
        slots = [(first[p // CHUNK] + rank[i]) * CHUNK + p % CHUNK for i, p in enumerate(positions)]
        cumulative = torch.tensor([0, *lengths]).cumsum(0)
        tensors = (torch.cat(positions), torch.cat(slots), cumulative)
        at, where, ends = (x.to(device, non_blocking=True) for x in tensors)
        return cls(at, where, steps, ends)

    def chunked(self, x: Tensor) -> Tensor:
        """[tokens, …] to [chunks, CHUNK, …], zero where there is no token: zeros leave the state as it is."""
        blank = x.new_zeros((sum(self.steps) * CHUNK, *x.shape[1:]))
        return blank.index_copy(0, self.slots, x).unflatten(0, (-1, CHUNK))

    def packed(self, x: Tensor) -> Tensor:
        """Back to [tokens, …]."""
        return x.flatten(0, 1)[self.slots]


def causal_convolution(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """SiLU of the depthwise causal convolution of x [tokens, channels] with weight [channels, 1, width].

    Taps that reach before the start of a sequence are zero.
    """
    if x.is_cuda and has_fla():
        from fla.modules.convolution import causal_conv1d

        found: Any = causal_conv1d(x[None], weight.squeeze(1), activation="silu", cu_seqlens=chunks.cumulative)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out[0]
    wide, taps = x.float(), weight.float().squeeze(1).flip(-1).unbind(-1)
    total = wide * taps[0]
    for back in range(1, min(len(taps), len(x))):
        earlier = F.pad(wide[:-back], (0, 0, back, 0))
        total = total + torch.where((chunks.positions >= back)[:, None], earlier, 0.0) * taps[back]
    return F.silu(total).to(x.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """q, k [tokens, key heads, dk], not normalised; v [tokens, value heads, dv]; g (log decay, fp32) and beta
    [tokens, value heads]. Returns [tokens, value heads, dv]. A key head serves consecutive value heads."""
    if q.is_cuda and has_fla():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        repeats = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (q, k))
        out: Tensor = chunk_gated_delta_rule(
            q[None], k[None], v[None], g[None], beta[None], use_qk_l2norm_in_kernel=True, cu_seqlens=chunks.cumulative
        )[0][0]
        return out
    if batch_invariant.active():
        return _one_by_one(q, k, v, g, beta, chunks).to(v.dtype)
    return _in_torch(q, k, v, g, beta, chunks).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Token by token, as an engine does it."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(repeats, dim=1) for x in (q, k))
    q, v, decay, beta = q * q.shape[-1] ** -0.5, v.float(), g.exp(), beta.float()
    state, out = v.new_zeros(0), []
    for token, position in enumerate(chunks.positions.tolist()):
        if position == 0:
            state = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
        read, state = batch_invariant.delta_rule_step(state, q[token], k[token], v[token], decay[token], beta[token])
        out.append(read)
    return torch.stack(out)


def _in_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    groups = (k.shape[1], -1)
    q, k = (chunks.chunked(_unit(x.float())).transpose(1, 2).unsqueeze(2) for x in (q, k))  # [n, hk, 1, c, dk]
    q = q * q.shape[-1] ** -0.5
    v = chunks.chunked(v.float()).unflatten(2, groups).permute(0, 2, 3, 1, 4)  # [n, hk, r, c, dv]
    g, beta = (chunks.chunked(x.float()).unflatten(2, groups).permute(0, 2, 3, 1) for x in (g, beta))  # [n, hk, r, c]
    # Log decay since the start of the chunk, in fp64: with strong decay the sums reach thousands, and the differences
    # of fp32 sums would be off by up to 1e-4, the relative error of the decay between neighbours.
    since = g.double().cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # Masked before exp: above the diagonal the exponent is positive, and inf · 0 would make the gradient NaN.
    decay = (since[..., :, None] - since[..., None, :]).to(g.dtype).masked_fill(later, -torch.inf).exp()
    until_end, since = (since[..., -1:] - since).to(g.dtype), since.to(g.dtype)
    weight = beta[..., None]
    reads = torch.cat([weight * v, weight * since.exp()[..., None] * k], -1)
    system = weight * decay * (k @ k.mT)  # a unit diagonal is assumed, the upper triangle is not read
    written, erased = torch.linalg.solve_triangular(system, reads, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    within, read = decay * (q @ k.mT), q * since.exp()[..., None]
    kept, fade = k * until_end.exp()[..., None], since[..., -1].exp()[..., None, None]
    return chunks.packed(_scan((written, erased, within, read, kept, fade), chunks.steps).flatten(1, 2).transpose(1, 2))


def _scan(terms: tuple[Tensor, ...], steps: tuple[int, ...]) -> Tensor:
    """The state from chunk to chunk, of all sequences at once; each step has the sequences that reach it."""
    written, erased = terms[0], terms[1]
    state = written.new_zeros((steps[0], *written.shape[1:3], erased.shape[-1], written.shape[-1]))
    out = []
    for w, e, inner, read, kept, fade in zip(*(x.split(steps) for x in terms), strict=True):
        state = state[: len(w)]
        new = w - e @ state
        out.append(read @ state + inner @ new)
        state = fade * state + kept.mT @ new
    return torch.cat(out)
