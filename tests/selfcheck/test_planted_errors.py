"""The random self-check finds the errors that MoE layouts had: each is planted and seen in cases that it draws."""

import planted_errors as errors
import pytest
from long_lists import some

from megatron_dapo.selfcheck import layouts
from megatron_dapo.selfcheck.cases import Variants, cases_of, random_cases
from megatron_dapo.selfcheck.synthetic import MODELS

ONE_UPDATE = layouts.Settings(updates=1)
CASES = random_cases(200, seed=0)


def size(case, kind):
    return case.layout.size(kind)


def small(case):
    return case.shape.is_moe and case.layout.world_size <= 4


def dense(case):
    return case.model == "dense" and case.objective == "dapo"


def one_pass(case):
    """No sequence-level term, for which the output layer is computed twice."""
    off_policy = case.algorithm.get("off_policy", {})
    return (
        case.objective != "gspo"
        and off_policy.keys() <= {"importance_weight", "weight_cap"}
        and (off_policy.get("importance_weight") != "sequence")
    )


PLANTED = [
    (
        errors.experts_reduced_over_data_ranks_only,
        lambda c: small(c) and size(c, "tp") > 1 == size(c, "ep") == size(c, "etp"),
    ),
    (errors.megatrons_auxiliary_loss, lambda c: small(c) and size(c, "dp") > 1),
    (errors.balance_of_each_micro_batch, lambda c: small(c) and size(c, "dp") > 1),
    (errors.balance_split_over_tensor_and_context_ranks, lambda c: small(c) and size(c, "tp") * size(c, "cp") > 1),
    (errors.experts_of_other_tokens, lambda c: small(c) and "replay" in c.name and size(c, "tp") * size(c, "cp") > 1),
    (errors.padding_is_balanced, lambda c: small(c) and size(c, "cp") > 1),
    (errors.mean_of_each_micro_batch, lambda c: c.model == "dense" and size(c, "dp") > 1 and one_pass(c)),
    (errors.tokens_counted_over_data_ranks_only, lambda c: dense(c) and size(c, "cp") > 1),
    (errors.norms_of_own_tokens, lambda c: c.model == "dense" and c.layout.sequence_parallel),
]


CHOSEN = {  # the cheapest case that each error affects
    plant: min(filter(affected, CASES), key=lambda c: (c.layout.world_size, [*MODELS].index(c.model)))
    for plant, affected in PLANTED
}
CRITIC = errors.value_gradients_added_over_tensor_ranks  # random cases have no critic
(CHOSEN[CRITIC],) = cases_of(errors.PLANTED[CRITIC][0], variants=Variants(["dense"]))
CHOSEN = some(
    CHOSEN, errors.experts_reduced_over_data_ranks_only, errors.experts_of_other_tokens, errors.padding_is_balanced,
    errors.norms_of_own_tokens, CRITIC,
)  # fmt: skip


@pytest.fixture(scope="module")
def without_error():
    """The results of the chosen cases by their keys; several errors are planted in the same case."""
    cases = {case.key: case for case in CHOSEN.values()}
    outcomes = layouts.check([*cases.values()], ONE_UPDATE)
    return outcomes, {key: layouts._result(case, outcomes, 1e-5) for key, case in cases.items()}


def test_the_random_cases_reach_every_error_more_than_once():
    assert all(sum(map(affected, CASES)) >= 2 for _, affected in PLANTED)


@pytest.mark.parametrize("plant", CHOSEN, ids=[plant.__name__ for plant in CHOSEN])
def test_a_planted_error_is_found(plant, without_error, monkeypatch):
    case = CHOSEN[plant]
    outcomes, results = without_error
    assert results[case.key].ok
    plant(monkeypatch)
    (found,) = layouts._run_in_ranks(case.layout.world_size, [case], ONE_UPDATE)
    result = layouts._result(case, outcomes | {case.key: found}, 1e-5)
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
