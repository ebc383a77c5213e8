"""The two passes over a chunk of logits that the head needs: row statistics, and the gradient written over the logits.

Triton on CUDA, torch elsewhere and where Triton is absent. Tests compare the Triton kernels with the torch versions.
Columns from `real` on are padding: they are never read, and their gradient is zero. Statistics are relative to each
row's own maximum, which starts at −inf.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowStats(NamedTuple):
    """Over this rank's columns, at temperature: maximum m, Σ exp(x−m), and Σ exp(x−m)·(x−m). Each [rows], fp32."""

    peak: Tensor
    total: Tensor
    weighted: Tensor


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def row_stats(logits: Tensor, real: int, inverse_temperature: float) -> RowStats:
    """logits [rows, columns] in any floating type."""
    if logits.is_cuda and has_triton():
        from megatron_dapo.policy.head import triton as head_triton

        return RowStats(*head_triton.row_stats(logits, real, inverse_temperature))
    x = logits[:, :real].float() * inverse_temperature
    if real == 0:  # all of this rank's columns are padding
        nothing = torch.zeros(logits.shape[0], device=logits.device)
        return RowStats(nothing - float("inf"), nothing, nothing)
    peak = x.amax(dim=-1)
    shifted = x - peak[:, None]
    weights = shifted.exp()
    return RowStats(peak, weights.sum(dim=-1), torch.linalg.vecdot(weights, shifted))


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
    """Overwrites logits [rows, columns] with the gradient of Σ grad_logprob·logp + grad_entropy·entropy.

    d logp / d x = 1[target] − p;  d entropy / d x = −p·(log p + entropy). `target` is this rank's column, or −1 if the
    target is in another rank's.
    """
    arguments: tuple[Any, ...] = (log_sum, entropy, target, grad_logprob, grad_entropy)
    if logits.is_cuda and has_triton():
        from megatron_dapo.policy.head import triton as head_triton

        head_triton.write_gradient(logits, real, inverse_temperature, *arguments)
        return
    log_p = logits[:, :real].float() * inverse_temperature - log_sum[:, None]
    slope = grad_logprob[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    gradient = log_p.exp_().mul_(slope).neg_()
    here = target >= 0
    gradient.scatter_add_(1, target.clamp_min(0)[:, None], torch.where(here, grad_logprob, 0.0)[:, None])
    logits[:, :real] = (gradient * inverse_temperature).to(logits.dtype)
    logits[:, real:] = 0
