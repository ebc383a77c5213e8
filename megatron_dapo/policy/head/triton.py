"""The head's gradient in Triton: one program per row of logits. `fused.write_gradient` says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 16


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
