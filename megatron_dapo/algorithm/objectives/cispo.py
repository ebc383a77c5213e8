"""CISPO: REINFORCE on log π, weighted by the clipped ratio without its gradient. Every token keeps a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dapo.algorithm.objective import (
    Objective,
    Scores,
    Sums,
    TokenBatch,
    TokenMetrics,
    bounded_exp,
    ratio_metrics,
)


class CISPO(Objective):
    """The weight is clipped on both sides whatever the sign of Â; there is no dual clip. By default it has no lower
    bound (clip_low = 1), as published, and is at most 5."""

    def token_losses(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        lower, upper = self._bounds()
        weight = bounded_exp(scores.logprobs - batch.old_logprobs).detach().clamp(lower, upper)
        return -weight * batch.advantages * scores.logprobs

    def metrics(self, scores: Scores, batch: TokenBatch, sums: Sums) -> TokenMetrics:
        ratio = bounded_exp(scores.logprobs - batch.old_logprobs)
        lower, upper = self._bounds()
        metrics = ratio_metrics(ratio)
        metrics.means |= {
            "clip_fraction_high": ratio > upper,
            "clip_fraction_low": ratio < lower,
            "clip_fraction_dual": torch.zeros_like(ratio),
        }
        return metrics

    def _bounds(self) -> tuple[float, float]:
        return 1 - self.config.clip_low, 1 + self.config.clip_high


objective = CISPO
