"""Layout invariance: the update in every parallel layout is the update of one process, and that one is right.

The layouts are compared with one process (`selfcheck`), and the one process with a naive oracle: transformers' model
in fp64, sample by sample, with the objective written out as in the paper. Planted errors show that both comparisons
can fail.
"""

import pytest
import torch
from joined_ranks import RankJobs
from long_lists import ALL_CASES, some
from planted_errors import mean_of_each_micro_batch, right_tokens_of_each_micro_batch
from reference_models import fp64, hf_model, hf_weights, in_fp64, naive_gradients

from megatron_dapo.algorithm import Needs
from megatron_dapo.algorithm.objectives.dapo import DAPO
from megatron_dapo.policy import step
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.routing_replay import ExpertLoad
from megatron_dapo.selfcheck import trace
from megatron_dapo.selfcheck.cases import (
    AGGREGATIONS,
    DEFAULT_LAYOUTS,
    OBJECTIVES,
    Case,
    LayoutSpec,
    cases_of,
    loss_settings,
    selfcheck_config,
)
from megatron_dapo.selfcheck.synthetic import MODELS, awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import compare, gather_full, trace_updates

UPDATES = 2
jobs = RankJobs()
traces = {}


def traced(case, updates=UPDATES):
    """The job that traces the case, and the one of its single-process reference."""
    for one in (case, case.reference):
        if (one.key, updates) not in traces:
            traces[one.key, updates] = jobs.add(one.layout.world_size, trace_updates, one, updates)
    return traces[case.key, updates], traces[case.reference.key, updates]


def difference(found, reference):
    return compare(found.results()[0], reference.results()[0])


LAYOUTS = some(
    [*DEFAULT_LAYOUTS, "dp3", "tp2dp2do", "cp2dp2"],
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "ep2", "tp2cp2sp", "ep2tp2sp",
    "tp2cp2sp+critic", "pp2+critic",
)  # fmt: skip
# Each model where its own layers are split.
SPLIT_LAYERS = {
    "dense": {"tp2", "pp2vpp2", "cp2", "dp2", "dp2do", "tp2cp2sp+critic", "pp2+critic"},
    "tied": {"pp2"},
    "moe": {"tp2sp", "cp2", "dp2do", "ep2"},
    "moe-shared": {"ep2tp2sp"},
    "moe-mixed": {"pp2vpp2"},
    "hybrid": {"pp2vpp2", "tp2cp2sp"},
}
named = {(case.name, case.model): case for name in LAYOUTS for case in cases_of(name)}
split = {key: traced(case) for key, case in some(named, *(k for k in named if k[0] in SPLIT_LAYERS[k[1]])).items()}


def test_every_model_is_checked_in_the_layouts_that_split_it():
    assert {("tp2sp", "moe"), ("ep2", "moe"), ("pp2", "tied"), ("pp2vpp2", "dense")} <= split.keys()
    assert {("ep2tp2sp", "moe-shared"), ("tp2cp2sp", "hybrid"), ("pp2vpp2", "hybrid")} <= split.keys()
    assert ("ep2", "dense") not in split and ("tp2", "moe") not in split  # the latter needs sequence parallelism


@pytest.mark.parametrize(("name", "model"), split)
def test_layout_gives_the_update_of_one_process(name, model):
    found = difference(*split[name, model])
    assert found.loss <= 1e-5
    assert found.grad_norm <= 1e-5
    assert found.gradients <= 1e-5, found.gradients_at
    assert found.later_gradients <= 1e-5, found.later_gradients_at
    assert found.weights <= 1e-4, found.weights_at


LOSSES = [(o, a, "sequence weight") for o in OBJECTIVES for a in AGGREGATIONS]
LOSSES += [("dapo", a, "masks") for a in AGGREGATIONS]
LOSSES = some(
    LOSSES, ("dapo", AGGREGATIONS[0], "sequence weight"), ("gspo", AGGREGATIONS[1], "sequence weight"),
    ("gspo", AGGREGATIONS[2], "sequence weight"), ("dapo", AGGREGATIONS[-1], "masks"),
)  # fmt: skip
losses = {case: traced(Case(LayoutSpec.parse("cp2"), "dense", loss_settings(*case)), 1) for case in LOSSES}


@pytest.mark.parametrize("case", LOSSES, ids=" ".join)
def test_sequence_level_terms_under_context_parallelism(case):
    """GSPO's ratio and the importance weight belong to a sequence that two ranks share; sequence means count it once,
    not per rank."""
    found = difference(*losses[case])
    assert found.ok, found


def make_policy(rendezvous, layout, model, folder=None):
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder or random_hf_weights(synthetic_shape(model)))
    return policy


def metrics_of_gradients(rendezvous):
    return make_policy(rendezvous, "single", "dense").gradients(awkward_batch(synthetic_shape("dense"), 0))


awkward = jobs.add(1, metrics_of_gradients)


def test_the_batch_exercises_clipping_masking_and_unequal_lengths():
    """Otherwise the comparison above would prove little."""
    metrics = awkward.results()[0]
    assert metrics["clip_fraction_high"] > 0.02
    assert metrics["clip_fraction_low"] > 0.02
    batch = awkward_batch(synthetic_shape("dense"), 0)
    assert metrics["tokens"] == batch.loss_mask.sum() < len(batch.loss_mask)
    assert len(set(batch.lengths.tolist())) > 5


# ---- the oracle ----


# Planted errors: each gets a MonkeyPatch in the forked ranks.


def with_extra_counts(patch, extra):
    """Adds to the denominator at an active token, which the loss cannot blank out."""

    def planted(aggregation, mask, sequence_ids, sequences, norm):
        weights, counts = real(aggregation, mask, sequence_ids, sequences, norm)
        counts[mask.nonzero()[0]] += extra(mask, sequence_ids, sequences)
        return weights, counts

    real = step.token_weights
    patch.setattr(step, "token_weights", planted)


def count_before_mask(patch):
    with_extra_counts(patch, lambda mask, ids, n: int((~mask).sum()))


def masked_sample_counts_one_token(patch):
    with_extra_counts(patch, lambda mask, ids, n: int(torch.zeros(n).index_add_(0, ids, mask.float()).eq(0).sum()))


def mean_per_micro_batch(patch):
    mean_of_each_micro_batch(patch)


def missing_context_factor(patch):
    """Megatron's per-micro-batch path: it divides by each rank's own count and forgets context parallelism."""
    real = Policy.gradients

    def planted(self, *args, **kwargs):
        self.megatron_config.calculate_per_token_loss = False
        return real(self, *args, **kwargs)

    patch.setattr(Policy, "gradients", planted)


def balance_divided_by_the_denominator(patch):
    """The load-balancing loss is attached without the factor that Megatron's division takes away."""
    real = ExpertLoad.slopes
    patch.setattr(ExpertLoad, "slopes", lambda self, coefficient, denominator: real(self, coefficient, 1))


def two_passes(patch):
    patch.setattr(DAPO, "needs", Needs(whole_sequences=True))


def missing_context_factor_in_two_passes(patch):
    missing_context_factor(patch)
    two_passes(patch)


def nothing(patch):
    pass


CASES = [
    ("single", nothing), ("single", count_before_mask), ("single", masked_sample_counts_one_token),
    ("dp2", mean_per_micro_batch), ("dp2", right_tokens_of_each_micro_batch),
    ("cp2", missing_context_factor), ("cp2", missing_context_factor_in_two_passes),
    ("tp2pp2sp", nothing), ("tp2pp2sp", two_passes), ("single", balance_divided_by_the_denominator),
]  # fmt: skip

PLANTED_MODELS = MODELS if ALL_CASES else ("moe",)
BALANCED_MODELS = ("moe", "moe-shared")
# Four ranks: each kind of layer once. What else a model has is split above.
ORACLE_CASES = some(
    [(layout, model) for layout in ("single", "tp2pp2sp") for model in MODELS],
    *(("single", model) for model in MODELS), *(("tp2pp2sp", model) for model in ("dense", "moe-shared", "hybrid")),
)  # fmt: skip


def is_needed(layout, plant, model):
    if plant is nothing:
        return (layout, model) in ORACLE_CASES
    return model in (BALANCED_MODELS if plant is balance_divided_by_the_denominator else PLANTED_MODELS)


def loss_and_gradients(rendezvous, layout, model, folder, plant):
    """Loss and gradients of one mini-batch on rank 0, or the error that ended it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        policy = make_policy(rendezvous, layout, model, folder)
        try:
            metrics = policy.gradients(awkward_batch(synthetic_shape(model), 0))
        except RuntimeError as error:
            return str(error)
        return metrics["loss"], gather_full(policy, policy.runtime, gradient=True)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """For each model: its weights on disk, the written-out loss and gradients, and our jobs."""
    found = {}
    for model in MODELS:
        shape = synthetic_shape(model)
        reference = hf_model(shape)
        folder = hf_weights(reference, tmp_path_factory.mktemp(model))
        with fp64():
            config = selfcheck_config(LayoutSpec.parse("single"))
            expected = naive_gradients(in_fp64(reference, shape), awkward_batch(shape, 0), config)
        ours = {
            case: oracle_jobs.add(
                LayoutSpec.parse(case[0]).world_size, loss_and_gradients, case[0], model, folder, case[1]
            )
            for case in CASES
            if is_needed(*case, model)
        }
        found[model] = (expected, ours)
    return found


oracle_jobs = RankJobs()
PLANTED_MODEL = pytest.mark.parametrize("model", PLANTED_MODELS)


def difference_to_oracle(oracles, model, layout, plant=nothing):
    (loss, gradients), ours = oracles[model]
    found_loss, found = ours[layout, plant].results()[0]
    worst = max(trace._relative(found, gradients).values())
    return max(worst, abs(found_loss - loss) / abs(loss))


@pytest.mark.parametrize(("layout", "model"), ORACLE_CASES)
def test_gradients_are_those_of_the_written_out_objective(layout, model, oracles):
    # The hybrid model's normalisations of normalised values amplify rounding in fp32; one process has 4e-6.
    assert difference_to_oracle(oracles, model, layout) <= (1e-5 if model == "hybrid" else 5e-6)


@PLANTED_MODEL
@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (count_before_mask, "single"),
        (masked_sample_counts_one_token, "single"),
        (mean_per_micro_batch, "dp2"),
        (right_tokens_of_each_micro_batch, "dp2"),
    ],
)
def test_planted_errors_are_seen(plant, layout, model, oracles):
    assert difference_to_oracle(oracles, model, layout, plant) > 1e-3


@pytest.mark.parametrize("model", BALANCED_MODELS)
def test_a_wrong_scale_of_the_load_balancing_loss_is_seen(model, oracles):
    assert difference_to_oracle(oracles, model, "single", balance_divided_by_the_denominator) > 1e-3


@PLANTED_MODEL
def test_a_missing_context_factor_is_seen(model, oracles):
    """The one-pass head refuses a loss that Megatron scales; a loss in two passes shows the wrong gradient."""
    for message in oracles[model][1]["cp2", missing_context_factor].results():
        assert "per-token path must be on" in message
    assert difference_to_oracle(oracles, model, "cp2", missing_context_factor_in_two_passes) > 1e-3


@PLANTED_MODEL
def test_the_two_pass_head_gives_the_same_gradients(model, oracles):
    assert difference_to_oracle(oracles, model, "tp2pp2sp", two_passes) <= 1e-5
