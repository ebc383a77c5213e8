"""Routing replay: with given experts our update is that of transformers' model in fp64 with the same experts, in every
layout, with and without recomputation; what the old-log-prob pass records is what the updates replay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from joined_ranks import RankJobs
from long_lists import some
from reference_models import GivenExperts, hf_model, hf_weights, naive_gradients, routers

from megatron_dapo.config import ConfigError, check_model, parse_config
from megatron_dapo.errors import RankError
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model.router import PolicyRouter
from megatron_dapo.policy.policy import Policy
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import ModelSize, awkward_batch, random_experts, synthetic_shape
from megatron_dapo.selfcheck.trace import _relative, gather_full

SHAPE = replace(synthetic_shape("moe", ModelSize(experts=8)), experts_per_token=3)
TOLERANCE = 5e-6
MINI_BATCHES = [list(range(7)), list(range(7, 14))]


def config_of(layout, mode="engine", **policy):
    settings = {"routing_replay": mode, "moe_aux_loss_coefficient": 0.0, **policy}
    return selfcheck_config(LayoutSpec.parse(layout), policy=settings)


def routed_batch():
    """A sample without experts; of the others about a fifth of the tokens, and all last tokens."""
    batch = awkward_batch(SHAPE, 0)
    batch.routed_experts = random_experts(SHAPE, batch, seed=1)
    batch.routed_experts[4] = None
    return batch


def tables(routed):
    shape = (-1, SHAPE.layers, SHAPE.experts_per_token)
    return [np.zeros((0, *shape[1:])) if x is None else x.reshape(shape) for x in routed]


def make(rendezvous, config, folder):
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    return policy


def replayed(rendezvous, config, folder):
    policy = make(rendezvous, config, folder)
    batch = routed_batch()
    scores = policy.log_probs(batch)[0]
    metrics = policy.gradients(batch)
    return metrics, gather_full(policy, policy.runtime, gradient=True), scores


def recorded(rendezvous, config, folder, other):
    """Old log-probs with one set of weights, an update's gradients with another."""
    policy = make(rendezvous, config, folder)
    batch = awkward_batch(SHAPE, 0)
    policy.old_log_probs(batch, MINI_BATCHES)
    collected = policy.collect_experts(batch, MINI_BATCHES[1:])
    policy.load_hf(other)
    found = [collected]
    for mini in MINI_BATCHES:
        metrics = policy.gradients(batch.select(mini))
        found.append((metrics, gather_full(policy, policy.runtime, gradient=True)))
    return found


LAYOUTS = {
    "single": {}, "tp2sp": {"recompute": "full"}, "ep2tp2sp": {}, "etp2tp2sp": {}, "cp2": {"recompute": "full"},
    "tp2cp2sp": {}, "dp2": {}, "ep2": {"recompute": "full"}, "pp2": {"recompute": "full"},
    "pp2vpp2": {"recompute": "full"}, "ep2pp2": {"recompute": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip
LAYOUTS = some(LAYOUTS, "single", "tp2cp2sp", "ep2", "pp2vpp2")
RECORDED = some(("single", "tp2sp", "tp2cp2sp", "pp2vpp2", "dp2", "ep2tp2sp"), "tp2sp", "pp2vpp2", "dp2")
jobs = RankJobs()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two sets of weights: (transformers' model, folder)."""
    found = []
    for seed in (0, 1):
        model = hf_model(SHAPE, seed)
        found.append((model, hf_weights(model, tmp_path_factory.mktemp("hf"))))
    return found


@pytest.fixture(scope="module")
def ours(models):
    folder, other = (folder for _, folder in models)
    world = {name: LayoutSpec.parse(name).world_size for name in (*LAYOUTS, *RECORDED)}
    return {
        "replayed": {n: jobs.add(world[n], replayed, config_of(n, **p), folder) for n, p in LAYOUTS.items()},
        "ignored": jobs.add(1, replayed, config_of("single", "off"), folder),
        "recorded": {
            n: jobs.add(world[n], recorded, config_of(n, "old_log_probs"), folder, other) for n in RECORDED
        },
    }  # fmt: skip


def written_out(model, batch, experts):
    given = GivenExperts(model, experts)
    model.zero_grad()
    return naive_gradients(model, batch, config_of("single"), given.before)


@pytest.fixture(scope="module")
def expected(models):
    return written_out(hf_model(SHAPE, 0), routed_batch(), tables(routed_batch().routed_experts))


def _largest(found, reference):
    differences = _relative(found, reference)
    worst = max(differences, key=differences.get)
    return differences[worst], worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_experts_give_the_update_of_the_model_with_these_experts(layout, ours, expected):
    metrics, gradients, scores = ours["replayed"][layout].results()[0]
    loss, right = expected
    worst = _largest(gradients, right)
    assert worst[0] <= TOLERANCE, worst
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert 0.6 < metrics["routing_replayed"] < 0.9
    assert metrics["routing_changed"] > 0.5  # random experts are rarely those of the router
    np.testing.assert_allclose(scores, ours["replayed"]["single"].results()[0][2], atol=2e-5)


def test_without_replay_the_gradients_are_others(ours, expected):
    metrics, gradients, _ = ours["ignored"].results()[0]
    assert _largest(gradients, expected[1])[0] > 0.1
    assert "routing_replayed" not in metrics


@pytest.mark.parametrize("layout", RECORDED)
def test_updates_replay_the_experts_of_the_old_log_probs(layout, ours, models):
    batch, chosen = awkward_batch(SHAPE, 0), own_choices(models[0][0])
    for mini, (metrics, gradients) in zip(MINI_BATCHES, ours["recorded"][layout].results()[0][1:], strict=True):
        _, right = written_out(hf_model(SHAPE, 1), batch.select(mini), [chosen[i] for i in mini])
        worst = _largest(gradients, right)
        assert worst[0] <= TOLERANCE, worst
        assert metrics["routing_replayed"] == 1
        assert 0.05 < metrics["routing_changed"] < 1


@pytest.mark.parametrize("layout", RECORDED)
def test_rank_0_collects_the_experts_that_other_ranks_have_recorded(layout, ours, models):
    """For a checkpoint between two updates: those of the updates that are left, in all layers."""
    chosen = own_choices(models[0][0])
    collected = ours["recorded"][layout].results()[0][0]
    assert sorted(collected) == MINI_BATCHES[1]
    for sample, experts in collected.items():
        assert np.array_equal(experts, chosen[sample].reshape(len(chosen[sample]), -1))


def own_choices(model):
    """Of each sample of the awkward batch [tokens, layers, k], counted from 1."""
    batch, layers = awkward_batch(SHAPE, 0), []
    hooks = [r.register_forward_hook(lambda _, args, output: layers.append(output[2])) for r in routers(model)]
    found = []
    for ids in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1]):
        layers.clear()
        with torch.no_grad():
            model(torch.from_numpy(ids).long()[None])
        found.append(torch.stack(layers, dim=1).numpy() + 1)
    for hook in hooks:
        hook.remove()
    return found


# ---- what is refused ----


def bad_batches(rendezvous, folder):
    policy = make(rendezvous, config_of("single"), folder)
    messages = []
    for change in (lambda x: x[:, :-1], lambda x: np.concatenate([x, x]), lambda x: x * 0 + 9, lambda x: x * 0 + 1):
        batch = routed_batch()
        batch.routed_experts[2] = change(batch.routed_experts[2])
        try:
            policy.update(batch)
        except (RankError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_experts_of_another_model_are_errors(models):
    messages = RankJobs().add(1, bad_batches, models[0][1]).results()[0]
    assert ["routed_experts is" in messages[0], "routed_experts is" in messages[1]] == [True, True]
    assert "sample 2: expert 8 of 8 was routed to" in messages[2]
    assert "names an expert twice" in messages[3]


def test_the_configuration_of_routing_replay():
    engine = parse_config({"policy": {"routing_replay": "engine"}})
    assert engine.rollout.servers.demands.returns_experts
    assert not parse_config({}).rollout.servers.demands.returns_experts
    with pytest.raises(ConfigError, match=r"rollout\.engine is embedded: only SGLang"):
        parse_config({"policy": {"routing_replay": "engine"}, "rollout": {"engine": "embedded"}})
    with pytest.raises(ConfigError, match=r"routed_experts"):  # one key for both
        parse_config({"rollout": {"servers": {"routed_experts": True}}})
    with pytest.raises(ConfigError, match="the trainer computes none"):
        parse_config({"policy": {"routing_replay": "old_log_probs"}, "trainer": {"old_logprobs": "engine"}})
    kept_requests = {"max_staleness": 1, "weights": {"pause_mode": "retract"}}
    with pytest.raises(ConfigError, match=r"pause_mode is retract: .* the older weights generated"):
        parse_config({"policy": {"routing_replay": "engine"}, "rollout": kept_requests})
    for rollout in ({"max_staleness": 1}, {"max_staleness": 1, "weights": {"pause_mode": "in_place"}}):
        parse_config({"policy": {"routing_replay": "engine"}, "rollout": rollout})
    with pytest.raises(ConfigError, match="router_fusion chooses the experts itself"):
        parse_config({"policy": {"routing_replay": "engine", "moe": {"router_fusion": True}}})
    with pytest.raises(ConfigError, match="the model has no experts"):
        check_model(engine.policy, synthetic_shape("dense"))
    assert issubclass(PolicyRouter, torch.nn.Module)
