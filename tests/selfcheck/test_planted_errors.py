"""The random self-check finds the errors that MoE layouts had: each is planted and seen in cases that it draws."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dapo.policy import routing_replay, step
from megatron_dapo.policy.megatron import options
from megatron_dapo.policy.model import gpt, router
from megatron_dapo.selfcheck import layouts
from megatron_dapo.selfcheck.cases import random_cases
from megatron_dapo.selfcheck.synthetic import MODELS

TOLERANCE = 1e-5
CASES = random_cases(200, seed=0)


def size(case, kind):
    return case.layout.size(kind)


def small(case):
    return case.shape.is_moe and case.layout.world_size <= 4


def experts_reduced_over_data_ranks_only(patch):
    """Megatron-Core 0.16 to 0.18: with TP > 1 and EP 1 each rank's experts learn from its own tokens alone."""
    patch.setattr(gpt, "separate_expert_gradients", lambda chunk, config: None)


def megatrons_auxiliary_loss(patch):
    """Computed per micro-batch, scaled by its tokens, and divided by the policy loss's denominator."""
    real = options._moe_options

    def planted(shape, policy, te):
        return real(shape, policy, te) | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}

    patch.setattr(options, "_moe_options", planted)
    patch.setattr(step.UpdateStep, "_set_load_balancing", lambda self, micro_batches, denominator: None)


def balance_of_each_micro_batch(patch):
    """f of the micro-batch instead of the mini-batch."""

    def planted(self, micro_batches, denominator):
        self.score(micro_batches, head=False)
        for micro in micro_batches:
            load = routing_replay.ExpertLoad.gather([micro], self.shape, self.runtime)
            micro.packed.routing.slopes = load.slopes(0.5, denominator) / len(micro_batches)

    patch.setattr(step.UpdateStep, "_set_load_balancing", planted)


def balance_split_over_tensor_and_context_ranks(patch):
    """Before 0.19: half strength under TP 2 with sequence parallelism, and under CP 2."""
    real = router._AddLoss.apply
    ranks = SimpleNamespace(count=1)
    build = step.UpdateStep.__init__

    def init(self, config, *args):
        ranks.count = config.policy.tensor_parallel * config.policy.context_parallel
        build(self, config, *args)

    patch.setattr(step.UpdateStep, "__init__", init)
    patch.setattr(router, "_AddLoss", SimpleNamespace(apply=lambda probs, loss: real(probs, loss / ranks.count)))


def padding_is_balanced(patch):
    """Padding differs between layouts."""
    real = router.MicroBatchRouting
    patch.setattr(step, "MicroBatchRouting", lambda mask: real(torch.ones_like(mask)))


def experts_of_other_tokens(patch):
    """Where tensor and context parallelism split the tokens, replayed experts are those of the next token."""
    real = routing_replay.RoutingReplay.attach

    def planted(self, batch, micro):
        routed = micro.routed
        if self.runtime.groups.tp_cp.size() > 1:
            micro.routed = np.where(routed >= 0, (routed + 1) % len(batch.tokens), -1)
        real(self, batch, micro)
        micro.routed = routed

    patch.setattr(routing_replay.RoutingReplay, "attach", planted)


PLANTED = [
    (experts_reduced_over_data_ranks_only, lambda c: small(c) and size(c, "tp") > 1 == size(c, "ep") == size(c, "etp")),
    (megatrons_auxiliary_loss, lambda c: small(c) and size(c, "dp") > 1),
    (balance_of_each_micro_batch, lambda c: small(c) and size(c, "dp") > 1),
    (balance_split_over_tensor_and_context_ranks, lambda c: small(c) and size(c, "tp") * size(c, "cp") > 1),
    (experts_of_other_tokens, lambda c: small(c) and "replay" in c.name and size(c, "tp") * size(c, "cp") > 1),
    (padding_is_balanced, lambda c: small(c) and size(c, "cp") > 1),
]


CHOSEN = {  # the cheapest case that each error affects
    plant: min(
        filter(affected, CASES), key=lambda c: (c.layout.world_size, ["moe", "moe-shared", "hybrid"].index(c.model))
    )
    for plant, affected in PLANTED
}


@pytest.fixture(scope="module")
def without_error():
    """The results of the chosen cases by their keys; several errors are planted in the same case."""
    cases = {case.key: case for case in CHOSEN.values()}
    return dict(zip(cases, layouts.check([*cases.values()], updates=1), strict=True))


@pytest.mark.parametrize(("plant", "affected"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_error_is_found(plant, affected, without_error, monkeypatch):
    assert sum(map(affected, CASES)) >= 2  # the 200 cases reach it more than once
    case = CHOSEN[plant]
    assert without_error[case.key].within(TOLERANCE)
    plant(monkeypatch)
    (result,) = layouts.check([case], updates=1)
    if result.difference is None:
        assert "the replicas have diverged" in result.error
    else:
        assert result.difference.gradients > 1e-3, result


def test_the_random_cases_cover_the_options():
    assert len({case.key for case in CASES}) == 200
    assert {case.objective for case in CASES} == {"dapo", "gspo", "cispo"}
    assert len({case.aggregation for case in CASES}) == 4
    assert {case.model for case in CASES} == set(MODELS)
    for kind, large in (("tp", 4), ("pp", 4), ("vpp", 2), ("cp", 4), ("dp", 4), ("ep", 4), ("etp", 2)):
        assert sum(size(case, kind) >= large for case in CASES) >= 3, kind
    assert any(case.layout.world_size == 8 for case in CASES)
    assert all(case.layout.world_size <= 8 for case in CASES)
    assert [case.key for case in random_cases(200, 0)] == [case.key for case in CASES]
    assert [case.key for case in random_cases(200, 1)] != [case.key for case in CASES]
