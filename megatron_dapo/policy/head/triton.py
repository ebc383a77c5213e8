"""Triton kernels of the head: one program per row of logits. `kernels` says what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 16


@triton.jit
def _row_stats(  # type: ignore[no-untyped-def]
    logits, peak_out, total_out, weighted_out, stride, real, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, real, BLOCK):
        column = start + offsets
        inside = column < real
        x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
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
    tl.store(peak_out + row, peak)
    tl.store(total_out + row, tl.sum(totals * shrink, 0))
    tl.store(weighted_out + row, tl.sum(shrink * (weighted + totals * moved), 0))


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    logits, log_sum, entropy, target, grad_logprob, grad_entropy, stride, columns, real, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    lse = tl.load(log_sum + row)
    h = tl.load(entropy + row)
    t = tl.load(target + row)
    g = tl.load(grad_logprob + row)
    e = tl.load(grad_entropy + row)
    for start in range(0, columns, BLOCK):
        column = start + offsets
        inside = column < real
        log_p = tl.load(base + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - lse
        p = tl.where(inside, tl.exp(log_p), 0.0)
        gradient = tl.where(column == t, g, 0.0) - p * (g + e * (log_p + h))
        gradient = tl.where(inside, gradient, 0.0) * inverse_temperature
        tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def row_stats(logits: Tensor, real: int, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    peak, total, weighted = (torch.empty(rows, device=logits.device) for _ in range(3))
    if rows:
        _row_stats[(rows,)](
            logits, peak, total, weighted, logits.stride(0), real, inverse_temperature, BLOCK=BLOCK, num_warps=WARPS
        )
    return peak, total, weighted


def write_gradient(
    logits: Tensor,
    real: int,
    inverse_temperature: float,
    log_sum: Tensor,
    entropy: Tensor,
    target: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
) -> None:
    rows, columns = logits.shape
    if rows:
        _write_gradient[(rows,)](
            logits, log_sum, entropy, target, grad_logprob, grad_entropy, logits.stride(0), columns, real,
            inverse_temperature, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
