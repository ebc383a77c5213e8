"""Overlong responses: the length penalty that is added to the reward, and the samples whose loss is masked.

A penalty is a number ≤ 0 per sample. Add it after any scaling of the reward, or it is scaled too. Filter groups before
adding it, or a difference in length looks like a difference in correctness.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dapo.config.algorithm import OverlongConfig
from megatron_dapo.types import Sample


def soft_overlong_penalty(
    lengths: Tensor | Sequence[int], max_length: int, cache_length: int, factor: float = 1.0
) -> Tensor:
    """DAPO's soft overlong punishment, fp32 [samples], a penalty in three stages.

    0 up to max_length − cache_length; then linear down to −factor at max_length; −factor beyond it.
    """
    if not 0 < cache_length < max_length:
        raise ValueError(
            f"cache_length: expected between 1 and max_length − 1 = {max_length - 1}, found {cache_length}"
        )
    beyond = torch.as_tensor(lengths).double() - (max_length - cache_length)
    return _penalty(factor * (beyond / cache_length).clamp(0, 1))


def length_penalty(lengths: Tensor | Sequence[int], config: OverlongConfig, max_length: int) -> Tensor:
    """The penalty that the configuration names, fp32 [samples]; `max_length` is the resolved L_max."""
    if config.penalty in ("soft", "linear"):  # two names of one formula
        return soft_overlong_penalty(lengths, max_length, config.cache_length, config.factor)
    beyond = torch.as_tensor(lengths).double() - max_length
    if config.penalty == "none":
        return _penalty(torch.zeros_like(beyond))
    if max_length <= 0:
        raise ValueError(f"max_length: expected above 0, found {max_length}")
    return _penalty(config.factor * (beyond / max_length).clamp_min(0))  # relative: it has no floor


def _penalty(size: Tensor) -> Tensor:
    return (0.0 - size).float()  # 0 − 0 is 0, where −(0) would be −0


def carries_loss(sample: Sample, config: OverlongConfig) -> bool:
    """Whether a sample's tokens enter the loss and its denominator: it is graded, and not filtered as truncated.

    The engine's finish reason says whether a sample is truncated; its length is not compared with a limit.
    """
    graded = sample.grade is not None and not sample.grade.ungraded
    return graded and not (config.filter and sample.truncated)
