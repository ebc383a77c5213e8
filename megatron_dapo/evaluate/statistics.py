"""Statistics of an evaluation: pass@k, and a confidence interval over problems. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance


def pass_at_k(responses: int, right: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the probability that k of the n responses, drawn without replacement, include a correct
    one."""
    k = min(k, responses)  # some responses may be ungraded
    return 1.0 - math.comb(responses - right, k) / math.comb(responses, k)


def clustered_interval(means: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean over problems, limited to [0, 1].

    If all means are 0 (or all 1), t would give an interval of width 0; the exact binomial interval is returned instead.
    """
    if len(means) < 2:
        return None
    if set(means) in ({0.0}, {1.0}):
        far = 1 - ((1 - confidence) / 2) ** (1 / len(means))
        return (0.0, far) if means[0] == 0 else (1 - far, 1.0)
    low, high = mean_interval(means, confidence) or (0.0, 1.0)
    return max(0.0, low), min(1.0, high)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student_t(confidence, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half


def student_t(confidence: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = confidence, by bisection. The distribution has a finite series."""

    def inside(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        odd = freedom % 2
        term = math.cos(angle) if odd else 1.0
        total = term if freedom > 1 else 0.0
        for i in range(3 if odd else 2, freedom, 2):
            term *= (i - 1) / i * math.cos(angle) ** 2
            total += term
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

    low, high = 0.0, 1e9
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return low
