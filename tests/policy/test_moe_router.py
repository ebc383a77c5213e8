"""MoE layouts that would be wrong are refused, and the load of the experts is that of the whole mini-batch."""

import numpy as np
import pytest
import torch

from megatron_dapo.config import ConfigError, check_model, parse_config
from megatron_dapo.policy.model.gpt import check_grouped_experts
from megatron_dapo.policy.routing_replay import ExpertLoad
from megatron_dapo.selfcheck.synthetic import synthetic_shape

MOE, DENSE = synthetic_shape("moe"), synthetic_shape("dense")


def policy_of(**settings):
    return parse_config({"policy": settings}).policy


def test_experts_under_tensor_parallelism_need_sequence_parallelism():
    settings = policy_of(tensor_parallel=2, sequence_parallel=False)
    with pytest.raises(ConfigError, match=r"policy\.sequence_parallel is false, but the model has experts"):
        check_model(settings, MOE)
    check_model(settings, DENSE)
    check_model(policy_of(tensor_parallel=2), MOE)


def test_grouped_experts_are_refused_where_their_gradient_norm_would_be_wrong():
    both = policy_of(tensor_parallel=2, expert_parallel=2)
    with pytest.raises(ConfigError, match=r"Megatron-Core 0\.16\.1 counts only the experts of the first"):
        check_grouped_experts(MOE, both, te=True, version="0.16.1")
    check_grouped_experts(MOE, both, te=True, version="0.19.2")
    check_grouped_experts(MOE, both, te=True, version="0.20.0rc1")
    check_grouped_experts(MOE, both, te=False, version="0.16.1")
    check_grouped_experts(DENSE, policy_of(tensor_parallel=2), te=True, version="0.16.1")
    check_grouped_experts(MOE, policy_of(expert_parallel=2), te=True, version="0.16.1")


def test_the_load_balancing_loss_by_hand():
    # One layer, 4 experts, 2 per token, 5 tokens: 10 choices, shares 0.5, 0.3, 0.1, 0.1.
    dispatched = torch.tensor([[5.0, 3.0, 1.0, 1.0]], dtype=torch.float64)
    probability = torch.tensor([[2.0, 1.5, 1.0, 0.5]], dtype=torch.float64)
    load = ExpertLoad(dispatched, probability, experts_per_token=2, moe_layers=len(dispatched))
    # E · Σ f·P = 4 · (0.5·0.4 + 0.3·0.3 + 0.1·0.2 + 0.1·0.1) = 4 · 0.32
    assert load.metrics() == pytest.approx({"expert_load_max": 4 * 0.5, "aux_loss": 1.28})
    # The loss times the denominator 7 and the coefficient 0.01, as slopes of the probabilities.
    slopes = load.slopes(0.01, denominator=7)
    assert float((slopes * probability).sum()) == pytest.approx(0.01 * 7 * 1.28)
    np.testing.assert_allclose(slopes.numpy(), [[0.01 * 7 * 4 * f / 5 for f in (0.5, 0.3, 0.1, 0.1)]], rtol=1e-6)
