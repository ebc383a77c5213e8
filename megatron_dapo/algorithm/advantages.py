"""Group-relative advantages: Â = (R − mean) / (std + eps) within each group of samples of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor | Sequence[float | None],
    group_ids: Tensor | Sequence[int],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """Advantage of every sample, fp32 [samples] on the CPU; groups may be uneven and their samples in any order.

    The std is unbiased, and eps is added to it, not to the variance. Rewards that are all equal, and a group of one,
    give exactly 0. normalize_std=False subtracts only the mean.

    valid  bool [samples]; False marks a sample that is left out of the statistics, whatever its reward, and gets 0: one
           that is ungraded, or masked as truncated with `overlong.group_statistics: in_loss`.
    """
    values, inverse, usable = _checked(rewards, group_ids, valid)
    groups = int(inverse.max()) + 1 if inverse.numel() else 0
    # fp64: in fp32, 0.7 minus the mean of ten times 0.7 is not 0, and neither is their std.
    values = torch.where(usable, values, 0.0)
    size = torch.zeros(groups, dtype=torch.float64).index_add_(0, inverse, usable.double())
    mean = torch.zeros(groups, dtype=torch.float64).index_add_(0, inverse, values) / size.clamp_min(1)
    advantages = values - mean[inverse]
    if normalize_std:
        squares = torch.where(usable, advantages.square(), 0.0)
        variance = torch.zeros(groups, dtype=torch.float64).index_add_(0, inverse, squares) / (size - 1).clamp_min(1)
        advantages = advantages / (variance.sqrt() + eps)[inverse]
    informative = _largest(values, inverse, usable, groups) > -_largest(-values, inverse, usable, groups)
    # where, not a product: with eps = 0 a group of equal rewards has just divided 0 by 0.
    return torch.where(usable & informative[inverse], advantages, 0.0).float()


def _largest(values: Tensor, inverse: Tensor, usable: Tensor, groups: int) -> Tensor:
    """[groups]: the largest usable value; −inf where there is none."""
    values = torch.where(usable, values, -torch.inf)
    return torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, inverse, values, reduce="amax")


def _checked(
    rewards: Tensor | Sequence[float | None], group_ids: Tensor | Sequence[int], valid: Tensor | Sequence[bool] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in fp64, group numbers 0..groups−1, usable samples, all on the CPU; or an error naming a sample."""
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    values = rewards.detach().to("cpu", torch.float64)
    ids = torch.as_tensor(group_ids, dtype=torch.int64).cpu()
    usable = torch.ones(len(values), dtype=torch.bool) if valid is None else torch.as_tensor(valid).cpu()
    for name, tensor in (("rewards", values), ("group_ids", ids), ("valid", usable)):
        if tuple(tensor.shape) != (values.numel(),):
            raise ValueError(f"{name}: expected one entry per reward ({values.numel()},), found {tuple(tensor.shape)}")
    if usable.dtype != torch.bool:
        raise ValueError(f"valid: expected torch.bool, found {usable.dtype}")
    broken = (usable & ~values.isfinite()).nonzero().flatten().tolist()
    if broken:
        first = broken[0]
        raise ValueError(
            f"rewards: expected a finite number for every graded sample, found {values[first]} for sample {first} of "
            f"group {ids[first]} ({len(broken)} such samples); mark ungraded samples with valid=False"
        )
    return values, torch.unique(ids, return_inverse=True)[1], usable
