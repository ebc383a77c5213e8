"""Triton kernels that a trainer and an SGLang server share, so that both compute the same bits for a token.

An element of a result depends on its own row (token) and on its weights, not on the other rows, their number or the
row's place among them: sums have one fixed order (but for `row_stats` with `exact=False`). For bf16 on CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# ---- matrix product ----


@triton.jit(do_not_specialize=["M"])
def _product(  # type: ignore[no-untyped-def]
    a, b, c, M, N, K, a_row, a_column, b_row, b_column, c_row, c_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    tile_row = first + program % (GROUP * across) % height
    tile_column = program % (GROUP * across) // height
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left = a + (row % M).to(tl.int64)[:, None] * a_row + depth[None, :] * a_column
    right = b + depth[:, None] * b_row + (column % N).to(tl.int64)[None, :] * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        inside = depth < K - start
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None], other=0.0)
        total = tl.dot(x, y, total)
        left += DEPTH * a_column
        right += DEPTH * b_row
    target = c + row.to(tl.int64)[:, None] * c_row + column.to(tl.int64)[None, :] * c_column
    tl.store(target, total.to(c.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


# (ROWS, COLUMNS, warps, stages). Every one gives the same bits: a tile's shape does not change the order of a sum.
TILES = {"few": (64, 32, 4, 5), "some": (64, 128, 4, 4), "many": (128, 128, 4, 3)}


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a [rows, k] · b [k, columns]."""
    rows, depth = a.shape
    columns = b.shape[1]
    if out is None:
        out = a.new_empty(rows, columns)
    if rows == 0 or columns == 0:
        return out
    tile = "many" if rows >= 1024 else "few" if rows <= 256 and columns < 8192 else "some"
    height, width, warps, stages = TILES[tile]
    _product[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
        a, b, out, rows, columns, depth, *a.stride(), *b.stride(), *out.stride(),
        ROWS=height, COLUMNS=width, DEPTH=64, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# ---- norm ----


@triton.jit
def _norm(x, weight, out, scale, stride, size, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (values * inverse * w).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, inverse)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., size] normalised in fp32 and multiplied by the weight; and the factor of each row [..., 1], fp32."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if len(flat):
        block = triton.next_power_of_2(size)
        _norm[(len(flat),)](
            flat, weight, out, scale, flat.stride(0), size, eps, BLOCK=block, num_warps=4 if block > 512 else 1
        )
    return out.view(x.shape), scale


# ---- rotary embedding ----


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at `positions` [tokens], each [tokens, head_dim / 2] in fp32."""
    channels = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * (1.0 / base ** (channels / head_dim))
    return angles.cos(), angles.sin()


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


# ---- attention ----


@triton.jit(do_not_specialize=["tokens"])
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, out, log_sums, q_starts, k_starts, slots, scale, tokens, group,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    q_start = tl.load(q_starts + sequence).to(tl.int64)
    queries = (tl.load(q_starts + sequence + 1) - q_start).to(tl.int32)
    k_start = tl.load(k_starts + sequence).to(tl.int64)
    keys = (tl.load(k_starts + sequence + 1) - k_start).to(tl.int32)
    # A row is one head of one token: the heads that share keys are next to each other.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < queries * group
    if tl.program_id(0) * ROWS >= queries * group:
        return
    token = tl.minimum(row // group, queries - 1)
    head = kv_head * group + row % group
    place = keys - queries + token  # in the sequence
    channel = tl.arange(0, SIZE)
    x = tl.load(
        q + (q_start + token)[:, None] * q_token + head[:, None] * q_head + channel[None, :],
        mask=real[:, None], other=0.0,
    )  # fmt: skip
    peak = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, tl.max(place, 0) + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < keys
        if PAGED:  # noqa: SIM108
            slot = tl.load(slots + k_start + key, mask=exists, other=0).to(tl.int64)
        else:
            slot = k_start + key
        y = tl.load(k + slot[None, :] * k_token + kv_head * k_head + channel[:, None], mask=exists[None, :], other=0.0)
        scores = tl.dot(x, y) * scale
        scores = tl.where(key[None, :] <= place[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        z = tl.load(v + slot[:, None] * v_token + kv_head * v_head + channel[None, :], mask=exists[:, None], other=0.0)
        mixed = tl.dot(weights.to(z.dtype), z, mixed * shrink[:, None])
        peak = new_peak
    target = out + (q_start + token)[:, None] * o_token + head[:, None] * o_head + channel[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(log_sums + head * tokens + q_start + token, (peak + tl.log2(total)) * 0.6931471805599453, mask=real)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    longest: int,
    scale: float,
    *,
    slots: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences: q [tokens, heads, h], k and v [slots, kv heads, h]; the result has q's
    shape, and log Σ exp of the scores is [heads, tokens]. Sequence i has the queries q_starts[i]:q_starts[i + 1] and
    the keys k_starts[i]:k_starts[i + 1], of which the last are its queries' own; with `slots` these are indices into
    it, and it holds the places of keys in k and v. `longest`: the largest number of queries of a sequence."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[-2]
    out = torch.empty_like(q) if out is None else out
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    rows, group = 64, heads // kv_heads
    if tokens:
        _attend[(triton.cdiv(longest * group, rows), kv_heads, len(q_starts) - 1)](
            q, k, v, out, log_sums, q_starts, k_starts, slots, scale * 1.4426950408889634, tokens, group,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
            SIZE=size, ROWS=rows, KEYS=64, PAGED=slots is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out, log_sums


# ---- log-probs ----


@triton.jit
def _sum(x, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """By pairs. The order of tl.sum depends on how a thread loaded its values, and so on their type."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
    return tl.sum(x, 0)


@triton.jit
def _row_stats(  # type: ignore[no-untyped-def]
    logits, peak_out, total_out, weighted_out, stride, real, scale,
    EXACT: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, real, BLOCK):
        column = start + offsets
        inside = column < real
        x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, scale) if EXACT else x * scale
        new = tl.maximum(peaks, x)
        # A lane without a value yet has peak −inf, and −inf − (−inf) is NaN.
        moved = tl.where(peaks == -float("inf"), 0.0, peaks - new)
        shrink = tl.where(peaks == -float("inf"), 0.0, tl.exp(moved))
        shifted = tl.where(inside, x - new, 0.0)
        p = tl.where(inside, tl.exp(shifted), 0.0)
        weighted = shrink * (weighted + totals * moved) + p * shifted
        totals = totals * shrink + p
        peaks = new
    peak = tl.max(peaks, 0)
    moved = tl.where(peaks == -float("inf"), 0.0, peaks - peak)
    shrink = tl.where(peaks == -float("inf"), 0.0, tl.exp(moved))
    weighted = shrink * (weighted + totals * moved)
    totals *= shrink
    tl.store(peak_out + row, peak)
    tl.store(total_out + row, _sum(totals, LEVELS) if EXACT else tl.sum(totals, 0))
    tl.store(weighted_out + row, _sum(weighted, LEVELS) if EXACT else tl.sum(weighted, 0))


def row_stats(logits: Tensor, real: int, scale: float, *, exact: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first `real` logits of each row, divided by `scale`: m, their maximum; Σ exp(x − m); Σ exp(x − m)·(x − m).
    Not `exact`: multiplied by `scale`, and sums have any order."""
    rows = logits.shape[0]
    peak, total, weighted = (torch.empty(rows, device=logits.device) for _ in range(3))
    if rows:
        _row_stats[(rows,)](
            logits, peak, total, weighted, logits.stride(0), real, scale,
            EXACT=exact, BLOCK=4096, LEVELS=12, num_warps=16,
        )  # fmt: skip
    return peak, total, weighted
