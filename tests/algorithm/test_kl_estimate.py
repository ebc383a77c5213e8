"""k1, k2, k3: values, gradients, and the expectation of each gradient."""

import math

import pytest
import torch

from megatron_dapo.algorithm.objective import kl_estimate

# d = log ref − log π = ln 2. k1 = −0.693147, k2 = 0.5·0.480453 = 0.240227, k3 = 2 − 1 − 0.693147 = 0.306853.
# Gradients in log π: k1 1, k2 −d = −0.693147, k3 1 − e^d = −1.
CASES = [("k1", -0.693147, 1.0), ("k2", 0.240227, -0.693147), ("k3", 0.306853, -1.0)]


@pytest.mark.parametrize(("estimator", "value", "gradient"), CASES)
def test_value_and_gradient(estimator, value, gradient):
    logprobs = torch.tensor([-2.0, -1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-2.0 + math.log(2), -1.0]), estimator)
    torch.testing.assert_close(estimate, torch.tensor([value, 0.0]), atol=1e-6, rtol=0)
    (got,) = torch.autograd.grad(estimate.sum(), logprobs)
    # Where π = ref the estimate is 0; k1 alone still has a gradient there.
    torch.testing.assert_close(got, torch.tensor([gradient, 1.0 if estimator == "k1" else 0.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        ("k1", lambda p, q: 0 * p.sum()),
        ("k2", lambda p, q: (p * (p / q).log()).sum()),  # KL(π‖ref)
        ("k3", lambda p, q: (q * (q / p).log()).sum()),  # KL(ref‖π)
    ],
)
def test_average_gradient_is_the_documented_one(estimator, objective):
    """The expectation over three actions, taken exactly, in the logits of π."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    sampled = (logits.softmax(0).detach() * kl_estimate(logits.log_softmax(0), ref.log(), estimator)).sum()
    (got,) = torch.autograd.grad(sampled, logits)
    (expected,) = torch.autograd.grad(objective(logits.softmax(0), ref), logits)
    torch.testing.assert_close(got, expected)


def test_k3_does_not_overflow_and_its_gradient_keeps_its_sign():
    logprobs = torch.tensor([-200.0, 0.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([0.0, -200.0]), "k3")
    # d = 200 is bounded by 20; d = −200 needs no bound: e^−200 − 1 + 200 = 199, with gradient 1.
    torch.testing.assert_close(estimate, torch.tensor([math.expm1(20) - 20, 199.0]))
    (got,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert got.tolist() == [0.0, 1.0]


def test_k3_keeps_its_digits_near_zero():
    # d = 1e-4: k3 = d²/2 + d³/6 = 5.0002e-9; exp(d) − 1 − d in fp32 would be off by up to 1e-7.
    estimate = kl_estimate(torch.tensor([0.0]), torch.tensor([1e-4]), "k3")
    assert estimate.item() == pytest.approx(5.0002e-9, rel=2e-3)


def test_errors():
    with pytest.raises(ValueError, match=r"ref_logprobs: expected the shape of logprobs \(2,\), found \(1,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")
    with pytest.raises(ValueError, match="expected k1, k2 or k3, found 'k4'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
