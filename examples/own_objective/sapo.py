"""An objective of your own, part 1: SAPO, whose loss needs one token at a time.

    export PYTHONPATH=examples/own_objective
    python examples/quickstart/quickstart.py --run-dir runs/sapo \\
        --set algorithm.objective=python:sapo.SAPO
    megatron-dapo train run.yaml --set algorithm.objective=python:sapo.SAPO \\
        --set algorithm.objective_options.tau_negative=1.1

Soft Adaptive Policy Optimization (arXiv:2511.20347) replaces the hard clip by a sigmoid gate. With the ratio
r = π/π_old and a temperature τ that depends on the sign of Â, a token's loss is

    −Â · (4/τ) · σ(τ·(r − 1))

Its gradient is that of −Â·r times 4·σ·(1 − σ): 1 at r = 1, and falling smoothly on both sides. The loss needs nothing
of the token's sequence, so the fused head computes it in one pass; importance weights, KL term, entropy bonus and
aggregation are added as for every objective. The paper averages over sequences: algorithm.aggregation
seq-mean-token-mean.
"""

from typing import ClassVar

import torch
from torch import Tensor

from megatron_dapo.algorithm import Objective, Scores, TokenBatch, TokenMetrics
from megatron_dapo.algorithm.objective import Sums, bounded_exp, ratio_metrics
from megatron_dapo.config import ConfigError


class SAPO(Objective):
    default_options: ClassVar = {"tau_positive": 1.0, "tau_negative": 1.05}

    def __init__(self, config):
        super().__init__(config)
        if min(self.options.values()) <= 0:
            raise ConfigError(f"algorithm.objective_options: expected temperatures above 0, found {self.options}")

    def token_losses(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        gate, tau = self._gate(scores, batch)
        return -(4 / tau) * gate * batch.advantages

    def metrics(self, scores: Scores, batch: TokenBatch, sums: Sums) -> TokenMetrics:
        """`gate_mean`: what is left of the gradient, 1 where the policy has not moved."""
        gate, _ = self._gate(scores, batch)
        metrics = ratio_metrics(bounded_exp(scores.logprobs - batch.old_logprobs))
        metrics.means["gate_mean"] = 4 * gate * (1 - gate)
        return metrics

    def _gate(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        positive, negative = self.options["tau_positive"], self.options["tau_negative"]
        tau = torch.full_like(batch.advantages, negative).masked_fill(batch.advantages > 0, positive)
        ratio = bounded_exp(scores.logprobs - batch.old_logprobs)
        return torch.sigmoid(tau * (ratio - 1)), tau
