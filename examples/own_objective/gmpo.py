"""An objective of your own, part 2: GMPO, whose loss needs whole sequences.

    export PYTHONPATH=examples/own_objective
    python examples/quickstart/quickstart.py --run-dir runs/gmpo --set algorithm.aggregation=seq-mean-token-mean \\
        --set algorithm.objective=python:gmpo.GMPO

Geometric-Mean Policy Optimization (arXiv:2507.20673) clips each token's log-ratio l to the side that Â allows, within
±ε, and maximises Â times the geometric mean of the clipped ratios of the sequence:

    −Â · s,   s = exp(mean of l'),   l' = min(l, ε) where Â > 0, max(l, −ε) where Â < 0

A token's loss is −Â·s with the gradient of its own l' alone: with aggregation seq-mean-token-mean the tokens of a
sequence add up to exactly −Â·s and its gradient. `needs` says that sums over sequences are needed. The loss then
adds them up over context-parallel ranks, and the head makes two passes.
"""

from typing import ClassVar

from torch import Tensor

from megatron_dapo.algorithm import Needs, Objective, Scores, TokenBatch, TokenMetrics
from megatron_dapo.algorithm.objective import Sums, bounded_exp, ratio_metrics


class GMPO(Objective):
    needs = Needs(whole_sequences=True)
    default_options: ClassVar = {"epsilon": 0.4}

    def sequence_values(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        return {"length": batch.mask, "log_ratio": self._clipped(scores, batch)}

    def token_losses(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        clipped = self._clipped(scores, batch)
        mean = sums["log_ratio"] / sums["length"].clamp_min(1)
        return -bounded_exp(mean + (clipped - clipped.detach())) * batch.advantages

    def metrics(self, scores: Scores, batch: TokenBatch, sums: Sums) -> TokenMetrics:
        """The sequence's ratio, and the share of tokens that the bound replaced."""
        metrics = ratio_metrics(bounded_exp(sums["log_ratio"] / sums["length"].clamp_min(1)))
        metrics.means["clip_fraction"] = self._clipped(scores, batch) != scores.logprobs - batch.old_logprobs
        return metrics

    def _clipped(self, scores: Scores, batch: TokenBatch) -> Tensor:
        log_ratio, epsilon = scores.logprobs - batch.old_logprobs, self.options["epsilon"]
        return log_ratio.clamp(max=epsilon).where(batch.advantages > 0, log_ratio.clamp(min=-epsilon))
