"""Generalised advantage estimation (arXiv 1506.02438) as VAPO uses it (arXiv 2504.05118): in fp64, on whole rollouts.

With δ_t = r_t + γ·V_{t+1} − V_t over the generated tokens of a rollout, Â_t = Σ_k (γλ)^k δ_{t+k}. Tokens of tools and
users are no steps: a value and a sum are carried over them. The critic's λ is independent of the policy's. At λ = 1 its
targets are the rewards to come, added up without the values, so that nothing cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dapo.algorithm.advantage_input import AdvantageInput, Bools, Doubles, discounted_sums, whitened
from megatron_dapo.config.algorithm import AlgorithmConfig, GAEConfig

POSITIONS = 10  # parts of a response, in metrics
SMALLEST_SPREAD = 1e-12  # relative to the mean square: below, returns are equal up to rounding


@dataclass(frozen=True, slots=True)
class GAE:
    """Both are 0 at tokens that the policy has not generated."""

    advantages: Doubles  # [responses]
    returns: Doubles  # [responses]: the critic's targets
    lambdas: Doubles  # [rollouts]: of the policy; NaN without a generated token


def generalized_advantages(batch: AdvantageInput, config: AlgorithmConfig) -> GAE:
    assert batch.values is not None, "GAE reads the critic's values"
    settings, gamma = config.gae, config.gae.gamma
    advantages, returns = np.zeros(len(batch.generated)), np.zeros(len(batch.generated))
    lambdas = np.full(len(batch.rewards), np.nan)
    for rollout, places, rewards in batch.steps():
        values = batch.values[places]
        if settings.bootstrap_truncated and batch.truncated[rollout]:
            # Instead of the final reward, not beside it: a value that is its own target plus r has no fixed point.
            earned = 0.0 if batch.turn_rewards is None else batch.turn_rewards[places[-1]]
            rewards[-1] = earned + gamma * values[-1]
        errors = rewards - values
        errors[:-1] += gamma * values[1:]
        lambdas[rollout] = policy_lambda(len(places), settings)
        advantages[places] = discounted_sums(errors, gamma * lambdas[rollout])
        if settings.lambda_critic == 1.0:
            returns[places] = discounted_sums(rewards, gamma)
        else:
            returns[places] = discounted_sums(errors, gamma * settings.lambda_critic) + values
    if settings.whitening == "batch":
        advantages = np.where(batch.generated, whitened(advantages, batch.in_loss, config.advantage_eps), 0.0)
    return GAE(advantages, returns, lambdas)


def policy_lambda(length: int, config: GAEConfig) -> float:
    """Of a response with `length` generated tokens. VAPO's formula is negative below 1/alpha tokens."""
    if config.lambda_policy == "adaptive":
        return max(0.0, 1 - 1 / (config.alpha * length))
    return config.lambda_policy


def value_metrics(batch: AdvantageInput, found: GAE, right: Bools) -> dict[str, float]:
    """How good the values are at the tokens in the loss: explained variance, 1 − Var(return − V)/Var(return), and bias,
    the mean of V − return; of all of them, by tenths of the response and by the grader's verdict `right` [rollouts].
    A figure of no token, or of equal returns, is left out."""
    assert batch.values is not None
    sums = np.zeros((5, 2, POSITIONS))  # of wrong and right responses: all that means and variances need
    centre = float(found.returns[batch.in_loss].mean()) if batch.in_loss.any() else 0.0
    for rollout, places, _ in batch.steps():
        counted = batch.in_loss[places]
        tenths = (np.arange(len(places)) * POSITIONS // len(places))[counted]
        returns = found.returns[places[counted]] - centre
        errors = batch.values[places[counted]] - centre - returns
        for row, terms in enumerate((np.ones(len(tenths)), returns, returns**2, errors, errors**2)):
            sums[row, int(right[rollout])] += np.bincount(tenths, terms, POSITIONS)
    parts = {"": sums.sum((1, 2)), "/wrong": sums[:, 0].sum(1), "/right": sums[:, 1].sum(1)}
    parts |= {f"/position_{tenth}": sums[:, :, tenth].sum(1) for tenth in range(POSITIONS)}
    known = found.lambdas[~np.isnan(found.lambdas)]
    metrics = {"critic/lambda_mean": float(known.mean()), "critic/lambda_min": float(known.min())} if known.size else {}
    for name, (tokens, *totals) in parts.items():
        if tokens:
            mean, square, bias, error = (float(total / tokens) for total in totals)
            metrics[f"critic/bias{name}"] = bias
            if square - mean**2 > SMALLEST_SPREAD * square:
                metrics[f"critic/explained_variance{name}"] = 1 - (error - bias**2) / (square - mean**2)
    return metrics
