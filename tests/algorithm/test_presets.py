"""Every preset against its formula (docs/algorithms.md), written out in fp64: the gradient of one update with respect
to the log-probs of all tokens. And every off-policy correction against a peer's function, or its formula."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from peer_functions import SLIME, functions, needs_slime, needs_verl, verl

from megatron_dapo.algorithm import AdvantageInput, PolicyLoss, Scores, TokenBatch, positive_weights, token_weights
from megatron_dapo.algorithm.advantages import estimate
from megatron_dapo.algorithm.off_policy import OffPolicy
from megatron_dapo.config import dump_config, load_config, parse_config
from megatron_dapo.config.algorithm import PRESETS, AlgorithmConfig, OffPolicyConfig

LENGTHS, GROUPS, REWARDS = [3, 5, 2, 30], [0, 0, 1, 1], [1.0, -1.0, -0.5, 1.0]
OFFSETS = np.cumsum([0, *LENGTHS])
OF = np.repeat(np.arange(4), LENGTHS)
RNG = np.random.default_rng(0)
OLD, ENGINE, REF = (torch.from_numpy(-2 + 0.4 * RNG.normal(size=40)) for _ in range(3))
NEW, VALUES = torch.from_numpy(-2 + 0.4 * RNG.normal(size=40)), RNG.normal(size=40)
RIGHT = np.array([True, False, False, True])
HORIZON = 64


def ours(config):
    """The gradient of the loss that a step computes for this configuration."""
    algorithm, everything = config.algorithm, np.ones(40, bool)
    known = AdvantageInput(
        np.array(REWARDS), np.array(GROUPS), np.ones(4, bool), np.zeros(4, bool), OFFSETS, everything, everything,
        values=VALUES,
    )  # fmt: skip
    found = estimate(known, algorithm).astype(float)
    mask, ids = torch.ones(40, dtype=torch.bool), torch.from_numpy(OF)
    weights, counts = token_weights(algorithm.aggregation, mask, ids, 4, HORIZON)
    batch = TokenBatch(
        OLD, torch.from_numpy(found if len(found) == 40 else found[OF]), mask, weights.double(), counts, ids, 4,
        ref_logprobs=REF, engine_logprobs=ENGINE,
    )  # fmt: skip
    if algorithm.positive_coefficient:
        batch.positive = positive_weights(0.1, torch.from_numpy(RIGHT[OF]), int(counts.sum())).double()
    logprobs = NEW.clone().requires_grad_()
    outputs = PolicyLoss(algorithm)(Scores(logprobs), batch)
    (outputs.loss_sum / outputs.denominator).backward()
    return logprobs.grad


def clipped(logp, advantages, low, high):
    ratio = torch.exp(logp - OLD)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def group(scale):
    values = np.zeros(4)
    for g in set(GROUPS):
        own = np.array(GROUPS) == g
        rewards = np.array(REWARDS)[own]
        values[own] = (rewards - rewards.mean()) * scale(rewards)
    return torch.from_numpy(values[OF])


def gae(policy_lambda):
    found = np.zeros(40)
    for i, length in enumerate(LENGTHS):
        total, following, factor = 0.0, 0.0, policy_lambda(length)
        for t in reversed(range(OFFSETS[i], OFFSETS[i] + length)):
            reward = REWARDS[i] if t == OFFSETS[i] + length - 1 else 0.0
            total = reward + following - VALUES[t] + factor * total
            following, found[t] = VALUES[t], total
    return torch.from_numpy((found - found.mean()) / found.std(ddof=1))


def per_sequence(losses, reduce):
    return torch.stack([reduce(part) for part in losses.split(LENGTHS)]).mean()


def by_std(rewards):
    return 1 / rewards.std(ddof=1)


def dapo(logp):
    advantages = group(by_std)
    losses = torch.minimum(
        clipped(logp, advantages, 0.2, 0.28), torch.where(advantages < 0, -10 * advantages, torch.inf)
    )
    return losses.mean()


def vapo(logp):
    advantages = gae(lambda length: max(0.0, 1 - 1 / (0.05 * length)))
    return clipped(logp, advantages, 0.2, 0.28).mean() - 0.1 * logp[torch.from_numpy(RIGHT[OF])].mean()


def ppo(logp):
    return clipped(logp, gae(lambda length: 0.95), 0.2, 0.2).mean()


def grpo(logp):
    kl = torch.exp(REF - logp) - (REF - logp) - 1
    return per_sequence(clipped(logp, group(by_std), 0.2, 0.2) + 0.04 * kl, torch.mean)


def dr_grpo(logp):
    return per_sequence(clipped(logp, group(lambda rewards: 1.0), 0.2, 0.2), torch.sum) / HORIZON


def gspo(logp):
    advantages, losses = group(by_std), []
    for part, start in zip((logp - OLD).split(LENGTHS), OFFSETS, strict=False):
        ratio, advantage = part.mean().exp(), advantages[start]
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage))
    return torch.stack(losses).mean()


def cispo(logp):
    weight = torch.exp(logp.detach() - OLD).clamp(0, 5)
    return -(weight * group(by_std) * logp).mean()


def rloo(logp):
    return per_sequence(clipped(logp, group(lambda rewards: len(rewards) / (len(rewards) - 1)), 0.2, 0.2), torch.sum)


def reinforce_plus_plus(logp):
    returns = np.array(REWARDS)[OF]
    return clipped(logp, torch.from_numpy((returns - returns.mean()) / returns.std(ddof=1)), 0.2, 0.2).mean()


FORMULAS = {
    "dapo": dapo, "vapo": vapo, "ppo": ppo, "grpo": grpo, "dr-grpo": dr_grpo, "gspo": gspo, "cispo": cispo,
    "rloo": rloo, "reinforce++": reinforce_plus_plus,
}  # fmt: skip


def test_every_preset_has_a_formula():
    assert FORMULAS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_formula(name):
    logprobs = NEW.clone().requires_grad_()
    FORMULAS[name](logprobs).backward()
    config = parse_config({"algorithm": {"preset": name, "advantage_eps": 0.0}})
    torch.testing.assert_close(ours(config), logprobs.grad, rtol=2e-6, atol=1e-8)
    assert logprobs.grad.count_nonzero() > 5


def test_keys_beside_a_preset_win_and_the_resolved_file_reads_back(tmp_path):
    config = load_config(None, ["algorithm.preset=grpo", "algorithm.kl.coefficient=0", "rollout.dynamic_sampling=true"])
    assert (config.algorithm.kl.coefficient, config.rollout.dynamic_sampling) == (0, True)
    assert (config.algorithm.aggregation, config.algorithm.clip_high) == ("seq-mean-token-mean", 0.2)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config and "aggregation: seq-mean-token-mean" in file.read_text()


# ---- off-policy corrections ----


def corrections(advantages=None, **keys):
    config = OffPolicyConfig(**keys)
    mask, ids = torch.ones(40, dtype=torch.bool), torch.from_numpy(OF)
    some = torch.zeros(40) if advantages is None else advantages
    batch = TokenBatch(OLD, some, mask, torch.ones(40), torch.ones(40).long(), ids, 4, engine_logprobs=ENGINE)
    if config.normalize_weights:
        batch.mean_weight = OffPolicy(config).mean_weight(batch)
    return PolicyLoss(AlgorithmConfig(off_policy=config))._sequence_terms(Scores(NEW), batch, lambda x: x).corrections


def table(values):
    return torch.nn.utils.rnn.pad_sequence(values.split(LENGTHS), batch_first=True)


def flat(padded):
    return torch.cat([row[:length] for row, length in zip(padded, LENGTHS, strict=True)])


@needs_verl
@pytest.mark.parametrize(
    ("keys", "theirs"),
    [
        ({"importance_weight": "token", "weight_cap": 1.2}, {"rollout_is": "token", "rollout_is_threshold": 1.2}),
        ({"importance_weight": "sequence", "weight_cap": 1.2}, {"rollout_is": "sequence", "rollout_is_threshold": 1.2}),
        ({"importance_weight": "token", "weight_cap": 2.0, "token_mask": [0.6, 2.0]},
         {"rollout_is": "token", "rollout_is_threshold": "0.6_2.0"}),
        *[({"importance_weight": level, "weight_cap": 1.2, "normalize_weights": True},
           {"rollout_is": level, "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True})
          for level in ("token", "sequence")],
    ],
    ids=["TIS", "sequence TIS", "IcePop", "normalised TIS", "normalised sequence TIS"],
)  # fmt: skip
def test_importance_weights_are_those_of_verl(keys, theirs):
    helper = verl("trainer/ppo/rollout_corr_helper.py")
    mask = table(torch.ones(40, dtype=torch.float64))
    expected, _ = helper.compute_rollout_correction_weights(table(OLD - ENGINE), mask, **theirs)
    found = corrections(**keys)
    weights = found.weights if found.masked is None else found.weights * ~found.masked
    torch.testing.assert_close(weights, flat(expected))
    assert weights.unique().numel() > 1


@needs_verl
@pytest.mark.parametrize(
    ("keys", "option", "bounds"),
    [
        ({"geometric_mask": [0.86, 1.2]}, "seq_mean_k1", (0.86, 1.2)),
        ({"product_mask": [0.5, 2.0], "importance_weight": "sequence"}, "seq_sum_k1", (0.5, 2.0)),
        ({"token_mask": [0.6, 1.8]}, "token_k1", (0.6, 1.8)),
    ],
    ids=["geometric", "MIS", "token mask"],
)
def test_rejections_are_those_of_verl(keys, option, bounds):
    """verl bounds π_engine/π_old: the same interval turned over."""
    helper, (low, high) = verl("trainer/ppo/rollout_corr_helper.py"), bounds
    mask = table(torch.ones(40, dtype=torch.float64))
    kept, _ = helper.compute_rollout_rejection_mask(table(OLD - ENGINE), mask, option, f"{1 / high}_{1 / low}")
    found = corrections(**keys)
    removed = found.excluded if found.masked is None else found.masked
    assert removed.tolist() == (flat(kept) == 0).tolist()
    assert 0 < int(removed.sum()) < 40


@needs_slime
def test_opsm_is_that_of_slime():
    advantages = torch.from_numpy(np.array([-1.0, -1.0, 1.0, -1.0])[OF])
    peer = functions(Path(SLIME, "slime/utils/ppo_utils.py"))
    parts = [values.split(LENGTHS) for values in (NEW, ENGINE, advantages, torch.ones(40))]
    kept, _ = peer.compute_opsm_mask(Namespace(opsm_delta=0.0), *parts)
    found = corrections(advantages, opsm_delta=0.0)
    assert found.masked.tolist() == (kept == 0).tolist()
    assert 0 < int(found.masked.sum()) < 40


def test_a_veto_excludes_the_whole_response():
    ratios = (OLD - ENGINE).exp()
    smallest = torch.stack([part.min() for part in ratios.split(LENGTHS)])
    bound = float(smallest.sort().values[1:3].mean())
    found = corrections(veto=bound)
    assert found.excluded.tolist() == (smallest < bound)[torch.from_numpy(OF)].tolist()
    assert 0 < int(found.excluded.sum()) < 40
