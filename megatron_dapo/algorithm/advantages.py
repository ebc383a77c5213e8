"""Advantage estimators: pure functions on the whole rollouts of a step, before anything is packed or split.

`algorithm.advantage` names one: a key of ESTIMATORS, or `python:module.function`, a function of your own that takes
(AdvantageInput, AlgorithmConfig). It returns one advantage for each rollout [rollouts] or for each token [responses].
One that reads `values` has an attribute `reads_values = True`: it is called when the critic has scored the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.algorithm.advantage_input import AdvantageInput, Doubles, discounted_sums, whitened
from megatron_dapo.algorithm.gae import generalized_advantages
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.errors import UserError
from megatron_dapo.plugins import load_function

Estimator = Callable[[AdvantageInput, AlgorithmConfig], NDArray[Any]]


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


def _group(batch: AdvantageInput, config: AlgorithmConfig, *, normalize_std: bool) -> NDArray[np.float32]:
    return group_advantages(
        torch.from_numpy(batch.rewards),
        torch.from_numpy(batch.groups),
        normalize_std=normalize_std,
        eps=config.advantage_eps,
        valid=torch.from_numpy(batch.valid),
    ).numpy()


group_std, group_mean = partial(_group, normalize_std=True), partial(_group, normalize_std=False)


def rloo(batch: AdvantageInput, config: AlgorithmConfig) -> Doubles:
    """R − mean of the other rewards = (R − mean) · G/(G − 1), of the valid rollouts; 0 for one alone."""
    _, group, counts = np.unique(batch.groups, return_inverse=True, return_counts=True)
    size = np.bincount(group, batch.valid, minlength=len(counts))[group]
    return group_mean(batch, config) * (size / np.maximum(size - 1, 1))


def reinforce_plus_plus(batch: AdvantageInput, config: AlgorithmConfig) -> Doubles:
    """The discounted rewards that follow each token, whitened over the batch."""
    returns = np.zeros(len(batch.generated))
    for _, places, rewards in batch.steps():
        returns[places] = discounted_sums(rewards, config.gae.gamma)
    return whitened(returns, batch.in_loss, config.advantage_eps)


def reinforce_plus_plus_baseline(batch: AdvantageInput, config: AlgorithmConfig) -> Doubles:
    """R − mean of the group, whitened over the tokens of the batch."""
    return whitened(group_mean(batch, config)[batch.rollout_of].astype(float), batch.in_loss, config.advantage_eps)


def gae(batch: AdvantageInput, config: AlgorithmConfig) -> Doubles:
    return generalized_advantages(batch, config).advantages


ESTIMATORS: dict[str, Estimator] = {
    "group-std": group_std,
    "group-mean": group_mean,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}


def load_estimator(config: AlgorithmConfig) -> Estimator:
    """The estimator that the configuration names."""
    return ESTIMATORS.get(config.advantage) or load_function(config.advantage, "algorithm.advantage")


def reads_values(config: AlgorithmConfig) -> bool:
    """Whether the estimator needs a critic."""
    return config.advantage == "gae" or bool(getattr(load_estimator(config), "reads_values", False))


def estimate(batch: AdvantageInput, config: AlgorithmConfig) -> NDArray[np.float32]:
    """[rollouts] or [responses], as the estimator returns it."""
    found = np.asarray(load_estimator(config)(batch, config))
    shapes = {"rollout": len(batch.rewards), "response token": len(batch.generated)}
    if found.ndim != 1 or len(found) not in shapes.values() or not np.isfinite(found).all():
        expected = " or ".join(f"one finite number for each {what} ({size})" for what, size in shapes.items())
        raise UserError(
            f"algorithm.advantage {config.advantage}: expected {expected}, found {found.shape} {found!r:.80}"
        )
    return found.astype(np.float32)
