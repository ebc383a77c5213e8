"""Statistics of an evaluation against enumeration, tables and hand-derived values."""

import math
from itertools import combinations

import pytest

from megatron_dapo.evaluation.results import clustered_interval, pass_at_k, student_t


@pytest.mark.parametrize("responses", [1, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(responses):
    for right in range(responses + 1):
        for k in range(1, responses + 1):
            draws = list(combinations([True] * right + [False] * (responses - right), k))
            assert pass_at_k(responses, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_student_t_against_the_tables():
    for freedom, expected in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (29, 2.0452), (1318, 1.9618)):
        assert student_t(0.95, freedom) == pytest.approx(expected, abs=5e-5)
    assert student_t(0.99, 10) == pytest.approx(3.1693, abs=5e-5)


def test_the_interval_by_hand():
    means = [0.25, 0.5, 0.5, 0.75]
    half = 3.1824 * math.sqrt((0.0625 + 0 + 0 + 0.0625) / 3 / 4)
    assert clustered_interval(means, 0.95) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    assert clustered_interval([0.5], 0.95) is None
    # Never (or always) right in 10 problems proves little: 1 − 0.025^(1/10) = 0.3085.
    assert clustered_interval([0.0] * 10, 0.95) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert clustered_interval([1.0] * 10, 0.95) == pytest.approx((0.6915, 1.0), abs=1e-4)
