"""GSPO: the ratio belongs to the sequence, s = exp(mean log-ratio); the bounds are DAPO's."""

from __future__ import annotations

from torch import Tensor

from megatron_dapo.algorithm.objective import Needs, Scores, Sums, TokenBatch, bounded_exp
from megatron_dapo.algorithm.objectives.dapo import DAPO


class GSPO(DAPO):
    needs = Needs(whole_sequences=True)

    def sequence_values(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        return {"length": batch.mask, "log_ratio": scores.logprobs - batch.old_logprobs}

    def ratio(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        """The value is the sequence's ratio s; the gradient is s·∇log π of the token alone.

        s_t = sg(s)·exp(log π_t − sg(log π_t)), where sg stops the gradient. Summed over a sequence this is the gradient
        of length·s, and it needs no collective that autograd knows about.
        """
        mean = sums["log_ratio"] / sums["length"].clamp_min(1)
        return bounded_exp(mean + (scores.logprobs - scores.logprobs.detach()))


objective = GSPO
