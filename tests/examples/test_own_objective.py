"""The example objectives: their numbers by hand, and real updates with them that are exact in two-rank layouts."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithm import PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.config import ConfigError
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.policy import step
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import Case, LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import compare, trace_updates

ROOT = Path(__file__).resolve().parents[2]
SAPO, GMPO = "python:examples.own_objective.sapo.SAPO", "python:examples.own_objective.gmpo.GMPO"
OBJECTIVES = {"one pass": SAPO, "whole sequences": GMPO}


@pytest.fixture(autouse=True)
def from_the_repository(monkeypatch):
    """The commands in the examples are run from the repository's root."""
    monkeypatch.chdir(ROOT)


def loss_and_gradient(config, ratios, advantages, ids):
    """Every token is active; log π_old is −1."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask, ids = torch.ones(len(ratios), dtype=torch.bool), torch.tensor(ids)
    sequences = int(ids.max()) + 1
    weights, counts = token_weights(config.aggregation, mask, ids, sequences)
    per_token = torch.tensor(advantages, dtype=torch.float64)
    batch = TokenBatch(old, per_token, mask, weights, counts, ids, sequences)
    outputs = PolicyLoss(config)(Scores(logprobs), batch)
    outputs.loss_sum.backward()
    return outputs, logprobs.grad.tolist()


def test_sapo_by_hand():
    # Â = 1, τ = 1, r = 1: loss −4·σ(0) = −2, gradient −1. r = 2: −4·σ(1), gradient −2·4·σ(1)·(1 − σ(1)).
    # Â = −2, τ = 2, r = 0.5: loss 2·2·σ(−1), gradient 2·0.5·4·σ(−1)·(1 − σ(−1)).
    config = AlgorithmConfig(objective=SAPO, objective_options={"tau_negative": 2.0})
    outputs, gradient = loss_and_gradient(config, [1, 2, 0.5], [1, 1, -2], [0, 0, 1])
    gate = 1 / (1 + math.exp(-1))
    slope = 4 * gate * (1 - gate)
    assert outputs.loss_sum.item() == pytest.approx(-2 - 4 * gate + 4 * (1 - gate))
    assert gradient == pytest.approx([-1, -2 * slope, slope])
    assert outputs.sums["gate_mean"].item() == pytest.approx(1 + 2 * slope)


def test_sapo_refuses_a_temperature_that_is_not_positive():
    with pytest.raises(ConfigError, match="expected temperatures above 0"):
        PolicyLoss(AlgorithmConfig(objective=SAPO, objective_options={"tau_positive": 0.0}))


def test_gmpo_by_hand():
    # ε = 0.4. Â = 1: log-ratios ln 1.2 and ln 4, the second is held at 0.4; s = exp((ln 1.2 + 0.4)/2).
    # Â = −2: ln 0.1 is held at −0.4, ln 3 is free; s = exp((−0.4 + ln 3)/2). A clipped token has no gradient.
    config = AlgorithmConfig(objective=GMPO, aggregation="seq-mean-token-mean")
    outputs, gradient = loss_and_gradient(config, [1.2, 4, 0.1, 3], [1, 1, -2, -2], [0, 0, 1, 1])
    good, bad = math.exp((math.log(1.2) + 0.4) / 2), math.exp((-0.4 + math.log(3)) / 2)
    assert outputs.loss_sum.item() == pytest.approx(-good + 2 * bad)
    assert gradient == pytest.approx([-good / 2, 0, 0, bad])
    assert outputs.sums["clip_fraction"].item() == 2


# ---- the real update ----


def algorithm_of(objective):
    return {"objective": objective, "aggregation": "seq-mean-token-mean"}


def traces(rendezvous, layouts):
    """Every objective in every layout of this world size; KL, entropy and importance weights are on."""
    return {
        (kind, layout): trace_updates(rendezvous, Case(LayoutSpec.parse(layout), "dense", algorithm_of(objective)), 2)
        for kind, objective in OBJECTIVES.items()
        for layout in layouts
    }


@cache
def traced(world):
    return run_ranks(world, traces, ["single"] if world == 1 else ["tp2", "cp2"])[0]


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_updates_are_those_of_one_process(kind, layout):
    difference = compare(traced(2)[kind, layout], traced(1)[kind, "single"])
    assert difference.ok, difference


def test_the_two_objectives_train_differently():
    """The comparison above would also hold for an objective that is silently ignored."""
    one, other = (traced(1)[kind, "single"] for kind in OBJECTIVES)
    assert compare(one, other).gradients > 0.01


def updates_and_paths(rendezvous, objective):
    """Metrics of several updates on one mini-batch, and the loss functions that the head was given."""
    used = set()

    class OnePass(step.OnePassLoss):
        def __init__(self, *args, **kwargs):
            used.add("OnePassLoss")
            super().__init__(*args, **kwargs)

    def make_loss_func(*args, real=step.make_loss_func, **kwargs):
        used.add("make_loss_func")
        return real(*args, **kwargs)

    step.OnePassLoss, step.make_loss_func = OnePass, make_loss_func  # in a forked rank
    shape = synthetic_shape("dense")
    config = selfcheck_config(LayoutSpec.parse("single"), **algorithm_of(objective), kl={"coefficient": 0.0})
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(shape))
    batch = awkward_batch(shape, 0)
    return [policy.update(batch) for _ in range(6)], used


@pytest.mark.parametrize(
    ("objective", "path", "metric"), [(SAPO, "OnePassLoss", "gate_mean"), (GMPO, "make_loss_func", "clip_fraction")]
)
def test_the_loss_falls_and_the_declared_path_is_used(objective, path, metric):
    metrics, used = run_ranks(1, updates_and_paths, objective)[0]
    assert used == {path}
    losses = [m["loss"] for m in metrics]
    assert losses[-1] < losses[0] - 0.05, losses
    assert 0 < metrics[0][metric] < 1
