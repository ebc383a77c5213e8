"""DAPO: PPO's clipped surrogate on token ratios, with decoupled bounds and an optional dual clip."""

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


class DAPO(Objective):
    def token_losses(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        lower, upper = self.bounds(batch.advantages)
        return -self.ratio(scores, batch, sums).clamp(lower, upper) * batch.advantages

    def ratio(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        """π/π_old of each token."""
        return bounded_exp(scores.logprobs - batch.old_logprobs)

    def bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The interval (lower, upper) to which each token's ratio is clamped.

        min(r·Â, clip(r)·Â) binds on one side only: from above where Â > 0, from below where Â < 0. The dual clip adds
        an upper bound where Â < 0.
        """
        config = self.config
        dual = torch.inf if config.dual_clip is None else config.dual_clip
        negative, positive = advantages < 0, advantages > 0
        lower = torch.zeros_like(advantages).masked_fill(negative, 1 - config.clip_low)
        upper = torch.full_like(advantages, torch.inf)
        upper = upper.masked_fill(positive, 1 + config.clip_high).masked_fill(negative, dual)
        return lower, upper

    def metrics(self, scores: Scores, batch: TokenBatch, sums: Sums) -> TokenMetrics:
        """clip_fraction_high, _low, _dual: tokens whose ratio the upper, lower and dual bound replaced."""
        ratio = self.ratio(scores, batch, sums)
        lower, upper = self.bounds(batch.advantages)
        above, negative = ratio > upper, batch.advantages < 0
        metrics = ratio_metrics(ratio)
        metrics.means |= {
            "clip_fraction_high": above & ~negative,
            "clip_fraction_low": ratio < lower,
            "clip_fraction_dual": above & negative,
        }
        return metrics


objective = DAPO
