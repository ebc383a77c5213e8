"""Generalised advantage estimation (arXiv 1506.02438) as VAPO uses it (arXiv 2504.05118): in fp64, on whole rollouts.

With δ_t = r_t + γ·V_{t+1} − V_t over the generated tokens of a rollout, Â_t = Σ_k (γλ)^k δ_{t+k}. Tokens of tools and
users are no steps: a value and a sum are carried over them. The critic's λ is independent of the policy's. At λ = 1 its
targets are the rewards to come, added up without the values, so that nothing cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dapo.algorithm.advantage_input import AdvantageInput, Bools, Doubles, Ints, discounted_sums, whitened
from megatron_dapo.config.algorithm import AlgorithmConfig, GAEConfig

POSITION_BINS = 10


@dataclass(frozen=True, slots=True)
class GAE:
    """Both are 0 at tokens that the policy has not generated."""

    advantages: Doubles  # [responses]
    returns: Doubles  # [responses]: the critic's targets
    lambdas: Doubles  # [rollouts]: of the policy


def generalized_advantages(batch: AdvantageInput, config: AlgorithmConfig) -> GAE:
    assert batch.values is not None, "GAE reads the critic's values"
    settings, lengths = config.gae, batch.lengths
    values = batch.values.astype(np.float64)[batch.generated]
    last = np.cumsum(lengths)[lengths > 0] - 1
    rewards = batch.generated_rewards()
    if settings.bootstrap_truncated:
        # Instead of the final reward, not beside it: a target of V + r at V's own token has no fixed point but r = 0.
        rewards = batch.generated_rewards(final=~batch.truncated)
        cut = last[batch.truncated[lengths > 0]]
        rewards[cut] += settings.gamma * values[cut]
    following = np.append(values[1:], 0.0)[: len(values)]
    following[last] = 0.0
    errors = rewards + settings.gamma * following - values
    lambdas = policy_lambdas(lengths, settings)
    advantages = batch.spread(discounted_sums(errors, lengths, settings.gamma * lambdas))
    if settings.whitening == "batch":
        advantages = whitened(advantages, batch.in_loss, config.advantage_eps) * batch.generated
    return GAE(advantages, batch.spread(_targets(rewards, errors, values, lengths, settings)), lambdas)


def policy_lambdas(lengths: Ints, config: GAEConfig) -> Doubles:
    """[rollouts]. The formula is negative below 1/alpha tokens."""
    if config.lambda_policy != "adaptive":
        return np.full(len(lengths), float(config.lambda_policy))
    return np.maximum(0.0, 1 - 1 / (config.alpha * np.maximum(lengths, 1)))


def _targets(rewards: Doubles, errors: Doubles, values: Doubles, lengths: Ints, config: GAEConfig) -> Doubles:
    factors = np.full(len(lengths), config.gamma * config.lambda_critic)
    if config.lambda_critic == 1.0:
        return discounted_sums(rewards, lengths, factors)
    return discounted_sums(errors, lengths, factors) + values


def value_metrics(batch: AdvantageInput, found: GAE, right: Bools) -> dict[str, float]:
    """How good the values are: explained variance 1 − Var(return − V)/Var(return) and bias, the mean of V − return, of
    the tokens in the loss; the bias also by position in the response (10 bins) and by the grader's verdict `right`
    [rollouts]. A figure of no token, or of returns that are all equal, is left out."""
    assert batch.values is not None
    rollout, lengths = batch.rollout_of, batch.lengths
    place = np.cumsum(batch.generated) - 1 - (np.cumsum(lengths) - lengths)[rollout]  # among the generated tokens
    bins = place * POSITION_BINS // np.maximum(lengths[rollout], 1)
    parts = {"": batch.in_loss} | {f"/position_{i}": batch.in_loss & (bins == i) for i in range(POSITION_BINS)}
    parts |= {"/right": batch.in_loss & right[rollout], "/wrong": batch.in_loss & ~right[rollout]}
    metrics = {}
    for name, chosen in parts.items():
        values, returns = batch.values[chosen], found.returns[chosen]
        if not chosen.any():
            continue
        metrics[f"critic/bias{name}"] = float((values - returns).mean())
        if returns.max() > returns.min():
            metrics[f"critic/explained_variance{name}"] = float(1 - (returns - values).var() / returns.var())
    metrics |= {"critic/value_mean": float(batch.values[batch.in_loss].mean())} if batch.in_loss.any() else {}
    known = found.lambdas[lengths > 0]
    return metrics | (
        {"critic/lambda_mean": float(known.mean()), "critic/lambda_min": float(known.min())} if known.size else {}
    )
