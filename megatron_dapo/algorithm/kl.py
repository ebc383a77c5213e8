"""Per-token estimates of a KL divergence from the log-probs of sampled tokens.

With tokens sampled from π and d = log ref − log π, the estimators of KL(π‖ref) are

    k1 = −d                unbiased; may be negative
    k2 = d² / 2            biased, small variance, never negative
    k3 = exp(d) − 1 − d    unbiased, small variance, never negative

As loss terms they differ in another way: an estimator's gradient is not the gradient of what it estimates.
Differentiated on tokens sampled from π,

    k1 gives ∇log π                     zero on average: the term only adds noise
    k2 gives (log π − log ref) ∇log π   on average ∇KL(π‖ref), the usual penalty
    k3 gives (1 − ref/π) ∇log π         on average ∇KL(ref‖π), the divergence in the other direction
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, expm1

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: larger than any meaningful ratio, far below overflow


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Elementwise estimate of KL(π‖ref) from π's and ref's log-probs of tokens sampled from π.

    Differentiable in both. k3 bounds d by 20 from above, beyond which its gradient is zero; it needs no lower bound.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"ref_logprobs: expected the shape of logprobs {tuple(logprobs.shape)}, found {tuple(ref_logprobs.shape)}"
        )
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        bounded = difference.clamp(max=MAX_LOG_RATIO)
        return expm1(bounded) - bounded  # expm1 keeps the digits that exp(d) − 1 loses near d = 0
    raise ValueError(f"KL estimator: expected k1, k2 or k3, found {estimator!r}")
