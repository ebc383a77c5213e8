"""Estimators against hand-made numbers and verl's own functions; GAE against a plain loop. All with unequal lengths,
tokens of tools between those of the policy, an ungraded rollout and one that is masked."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_functions import needs_verl, verl

from megatron_dapo.algorithm import AdvantageInput
from megatron_dapo.algorithm.advantages import ESTIMATORS, estimate
from megatron_dapo.algorithm.gae import GAE, generalized_advantages, value_metrics
from megatron_dapo.config.algorithm import ADVANTAGES, AlgorithmConfig
from megatron_dapo.errors import UserError


def rollouts(*tokens, rewards, groups, valid=None, masked=(), turns=None, values=None, truncated=()):
    """`tokens[i]`: "++-+" are three tokens of the policy and one of a tool."""
    generated = np.array([mark == "+" for text in tokens for mark in text], dtype=bool)
    lengths, numbers = [len(text) for text in tokens], range(len(tokens))
    return AdvantageInput(
        rewards=np.array(rewards, float),
        groups=np.array(groups),
        valid=np.ones(len(tokens), bool) if valid is None else np.array(valid),
        truncated=np.array([i in truncated for i in numbers]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        generated=generated,
        in_loss=generated & np.repeat([i not in masked for i in numbers], lengths),
        turn_rewards=None if turns is None else np.array(turns, float),
        values=None if values is None else np.array(values, float),
    )


CASE = rollouts(
    "++", "+-+", "+++", "+", "+-", "++",
    rewards=[1, 0, 0, 2, -1, 7], groups=[0, 0, 0, 1, 1, 1], valid=[True] * 5 + [False], masked=(5,),
)  # fmt: skip


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 − 0; 0 − 0.5 twice; 2 − (−1), −1 − 2: the ungraded one is no other.
    assert estimate(CASE, AlgorithmConfig(advantage="rloo")).tolist() == pytest.approx([1, -0.5, -0.5, 3, -3, 0])
    alone = rollouts("++", rewards=[5], groups=[0])
    assert estimate(alone, AlgorithmConfig(advantage="rloo")).tolist() == [0]


def test_reinforce_plus_plus_whitens_rewards_to_come_over_tokens():
    # Rewards to come of the tokens in the loss: 1 1, 3 1 (2 for the first turn), 0; mean 1.2, squares 0.04·3+3.24+1.44.
    batch = rollouts(
        "++", "+-+", "+", "+", rewards=[1, 3, 0, 9], groups=[0] * 4, masked=(3,), turns=[0, 0, 2] + [0] * 4
    )
    found = estimate(batch, AlgorithmConfig(advantage="reinforce++", advantage_eps=0.0))
    std = (4.8 / 4) ** 0.5
    assert found[[0, 1, 2, 4, 5]].tolist() == pytest.approx([x / std for x in (-0.2, -0.2, 1.8, -0.2, -1.2)], rel=1e-6)


def test_reinforce_plus_plus_with_a_baseline_subtracts_the_mean_of_the_group_first():
    batch = rollouts("+", "+++", "++", rewards=[1, 0, 4], groups=[0, 0, 1])  # 0.5; −0.5 three times; 0 twice
    found = estimate(batch, AlgorithmConfig(advantage="reinforce++-baseline", advantage_eps=0.0))
    raw = np.array([0.5, -0.5, -0.5, -0.5, 0, 0])
    assert found.tolist() == pytest.approx(((raw - raw.mean()) / raw.std(ddof=1)).tolist(), rel=1e-6)


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_equal_rewards_of_a_batch_give_exactly_zero(name):
    batch = rollouts("++", "+", rewards=[0.7, 0.7], groups=[0, 0])
    assert not estimate(batch, AlgorithmConfig(advantage=name, advantage_eps=0.0)).any()


def test_the_names_of_the_configuration_are_those_of_the_estimators():
    assert tuple(ESTIMATORS) == ADVANTAGES


def by_rank(batch, config):
    return np.argsort(np.argsort(batch.rewards)).astype(float)


def of_wrong_length(batch, config):
    return np.zeros(len(batch.generated) + 1)


def test_an_estimator_of_the_user(monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    config = AlgorithmConfig(advantage="python:test_advantage_estimators.by_rank")
    assert estimate(CASE, config).tolist() == [3, 1, 2, 4, 0, 5]
    with pytest.raises(UserError, match=r"each rollout \(6\) or .* each response token \(13\), found \(14,\)"):
        estimate(CASE, AlgorithmConfig(advantage="python:test_advantage_estimators.of_wrong_length"))


# ---- verl ----


def rectangle(batch, values):
    """verl's shape: [rollouts, longest], zero beyond the end."""
    parts = np.split(np.asarray(values, float), batch.offsets[1:-1])
    return torch.tensor([[*part, *[0.0] * (max(map(len, parts)) - len(part))] for part in parts], dtype=torch.float64)


def random_rollouts(seed=0, values=False):
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(["+", "+", "-"], rng.integers(0, 12))) + "+" for _ in range(12)]
    total = sum(map(len, texts))
    return rollouts(
        *texts, rewards=rng.normal(size=12), groups=np.repeat(np.arange(4), 3), values=rng.normal(size=total)
    )


@needs_verl
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("group-std", "compute_grpo_outcome_advantage"),
        ("rloo", "compute_rloo_outcome_advantage"),
        ("rloo", "compute_rloo_vectorized_outcome_advantage"),
        ("reinforce++", "compute_reinforce_plus_plus_outcome_advantage"),
        ("reinforce++-baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage"),
        ("gae", "compute_gae_advantage_return"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_verl(name, function, seed):
    batch = random_rollouts(seed)
    last = np.array([np.flatnonzero(batch.generated[:end]).max() for end in batch.offsets[1:]])
    rewards = np.zeros(len(batch.generated))
    rewards[last] = batch.rewards
    mask = rectangle(batch, batch.generated)
    known = {"token_level_rewards": rectangle(batch, rewards), "response_mask": mask}
    if name == "gae":
        known |= {"values": rectangle(batch, batch.values), "gamma": 0.99, "lam": 0.9}
    else:
        known |= {"index": batch.groups, "config": SimpleNamespace(gamma=0.99)}
    if "reinforce_plus_plus_outcome" in function:
        del known["index"]
    theirs, _ = getattr(verl("trainer/ppo/core_algos.py"), function)(**known)
    config = AlgorithmConfig(advantage=name, gae={"lambda_policy": 0.9, "gamma": 0.99})
    ours = estimate(batch, config)
    ours = ours[batch.rollout_of] if len(ours) == 12 else ours
    assert (rectangle(batch, ours * batch.generated) - theirs * mask).abs().max() < 1e-5


# ---- GAE ----


def plain_loop(batch, config):
    """GAE as the paper writes it: token by token from the end, in fp64."""
    advantages, returns = np.zeros(len(batch.generated)), np.zeros(len(batch.generated))
    for i, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        steps = [t for t in range(start, end) if batch.generated[t]]
        earned = [0.0 if batch.turn_rewards is None else batch.turn_rewards[t] for t in steps]
        cut = config.bootstrap_truncated and batch.truncated[i]
        final = 0.0 if cut else batch.rewards[i] - sum(earned)
        adaptive = config.lambda_policy == "adaptive"
        policy = max(0.0, 1 - 1 / (config.alpha * max(1, len(steps)))) if adaptive else config.lambda_policy
        for into, factor in ((advantages, policy), (returns, config.lambda_critic)):
            following, total = batch.values[steps[-1]] if cut and steps else 0.0, 0.0
            for k in reversed(range(len(steps))):
                reward = earned[k] + (final if k == len(steps) - 1 else 0.0)
                total = reward + config.gamma * following - batch.values[steps[k]] + config.gamma * factor * total
                following = batch.values[steps[k]]
                into[steps[k]] = total + (following if into is returns else 0.0)
    return advantages, returns


lambdas = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("+-", max_size=40), min_size=1, max_size=6), seed=st.integers(0, 99),
    policy=st.one_of(lambdas, st.just("adaptive")), critic=lambdas, gamma=st.sampled_from([1.0, 0.9]),
    bootstrap=st.booleans(), turns=st.booleans(),
)  # fmt: skip
def test_gae_is_the_plain_loop(texts, seed, policy, critic, gamma, bootstrap, turns):
    rng, total = np.random.default_rng(seed), sum(map(len, texts))
    batch = rollouts(
        *texts, rewards=rng.normal(size=len(texts)), groups=range(len(texts)), values=10 * rng.normal(size=total),
        turns=rng.normal(size=total) * [mark == "+" for text in texts for mark in text] if turns else None,
        truncated=range(0, len(texts), 2),
    )  # fmt: skip
    gae = {"lambda_policy": policy, "lambda_critic": critic, "gamma": gamma, "alpha": 0.1, "whitening": "none"}
    config = AlgorithmConfig(advantage="gae", gae={**gae, "bootstrap_truncated": bootstrap})
    found, expected = generalized_advantages(batch, config), plain_loop(batch, config.gae)
    np.testing.assert_allclose(found.advantages, expected[0], atol=1e-11)
    np.testing.assert_allclose(found.returns, expected[1], atol=1e-11)


def test_targets_at_lambda_1_are_the_rewards_to_come_exactly():
    """Whatever the values: with 1e12 in them, advantage + value has lost the reward."""
    batch = rollouts("+" * 50, "+-+", rewards=[0.1, 1], groups=[0, 1], turns=[0] * 50 + [0.3, 0, 0], values=[1e12] * 53)
    found = generalized_advantages(batch, AlgorithmConfig(advantage="gae", gae={"lambda_critic": 1.0}))
    assert found.returns.tolist() == [0.1] * 50 + [0.3 + (1 - 0.3), 0.0, 1 - 0.3]
    small = replace(batch, values=np.linspace(-1, 1, 53))
    full = generalized_advantages(
        small, AlgorithmConfig(advantage="gae", gae={"lambda_policy": 1.0, "whitening": "none"})
    )
    np.testing.assert_allclose(full.advantages + small.values * small.generated, full.returns, atol=1e-13)


def test_lambda_grows_with_the_length_and_is_never_negative():
    lengths = [1, 19, 20, 100, 400]
    batch = rollouts(*["+-" * n for n in lengths], rewards=[0] * 5, groups=range(5), values=[0.0] * (2 * sum(lengths)))
    found = generalized_advantages(batch, AlgorithmConfig(advantage="gae", gae={"alpha": 0.05}))
    assert found.lambdas.tolist() == pytest.approx([0, 0, 0, 0.8, 0.95])


def test_whitening_is_over_the_tokens_in_the_loss():
    batch = replace(random_rollouts(), in_loss=random_rollouts().generated & (random_rollouts().rollout_of > 3))
    plain, white = (
        generalized_advantages(batch, AlgorithmConfig(advantage="gae", advantage_eps=0.0, gae={"whitening": kind}))
        for kind in ("none", "batch")
    )
    counted = plain.advantages[batch.in_loss]
    expected = (counted - counted.mean()) / counted.std(ddof=1)
    np.testing.assert_allclose(white.advantages[batch.in_loss], expected, atol=1e-12)
    assert not white.advantages[~batch.generated].any()


def test_explained_variance_and_bias_by_position_and_outcome():
    batch = replace(random_rollouts(), in_loss=random_rollouts().generated & (random_rollouts().rollout_of != 2))
    right = np.arange(12) % 3 == 0
    returns = np.where(batch.generated, 100 + np.random.default_rng(1).normal(size=len(batch.generated)), 0.0)
    found = value_metrics(batch, GAE(returns, returns, np.linspace(0.5, 1, 12)), right)
    tenths = []
    for part in np.split(batch.generated, batch.offsets[1:-1]):
        tenths += [int(10 * (part[:t].sum()) / part.sum()) for t in range(len(part))]
    chosen = {"": batch.in_loss, "/right": batch.in_loss & right[batch.rollout_of]}
    chosen |= {f"/position_{i}": batch.in_loss & (np.array(tenths) == i) for i in range(10)}
    for name, tokens in chosen.items():
        error, target = batch.values[tokens] - returns[tokens], returns[tokens]
        assert found[f"critic/bias{name}"] == pytest.approx(error.mean())
        if tokens.sum() > 1:  # otherwise there is no variance
            assert found[f"critic/explained_variance{name}"] == pytest.approx(1 - error.var() / target.var(), rel=1e-4)
    assert (found["critic/lambda_mean"], found["critic/lambda_min"]) == (0.75, 0.5)


def test_equal_returns_have_no_explained_variance():
    batch = rollouts("+++", "++", rewards=[1, 1], groups=[0, 1], values=[0.0] * 5)
    found = value_metrics(batch, GAE(np.ones(5), np.ones(5), np.ones(2)), np.array([True, False]))
    assert not any("explained" in name for name in found) and found["critic/bias/wrong"] == -1
