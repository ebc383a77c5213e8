"""Off-policy corrections against numbers derived by hand. Unequal lengths and a fully masked sequence throughout."""

import math

import pytest
import torch
from loss_cases import Sequence, pack, poison, policy_loss

from megatron_dapo.algorithm import Needs, PolicyLoss
from megatron_dapo.config.algorithm import AlgorithmConfig

ln = math.log
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# π/π_old as in test_policy_loss.py, and w = π_old/π_engine. Bounds 0.8 and 1.28, dual clip 10.
#   GOOD, Â = 1    w     3       0.5     1      1        product 1.5, geometric mean 1.5^(1/4) = 1.106682
#                  loss −1      −1.28   −0.5   −1.2      sum −3.98
#   BAD, Â = −2    w    (7)      1       1.5    1        product 1.5, geometric mean 1.5^(1/3) = 1.144714
#                  loss  –       1.6     20     4        sum 25.6; with the w of 7, at a prompt position, the product
#                                                        would be 10.5 and the mean 1.800103
GOOD = Sequence([1, 1.5, 0.5, 1.2], 1.0, engine_ratios=[3, 0.5, 1, 1])
BAD = Sequence([1, 0.5, 20, 2], -2.0, active=[False, True, True, True], engine_ratios=[7, 1, 1.5, 1])
MASKED = Sequence([3, 0.1], 5.0, active=[False, False], engine_ratios=[100, 100])
CASE = [GOOD, BAD, MASKED]
GRADIENT = [-1, 0, -0.5, -1.2, 0, 0, 0, 4, 0, 0]


def run(sequences, extras=("engine_logprobs",), aggregation="token-mean", **off_policy):
    config = AlgorithmConfig(
        aggregation=aggregation, off_policy=off_policy, kl={"coefficient": 1.0 if "ref_logprobs" in extras else 0.0},
        entropy_coefficient=1.0 if "entropy" in extras else 0.0,
    )  # fmt: skip
    inputs = poison(pack(sequences, config, extras=extras))
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    outputs.loss_sum.backward()
    return outputs, inputs.logprobs.grad.tolist()


# ---- token mask ----


@pytest.mark.parametrize(
    ("aggregation", "loss_sum", "denominator"),
    [
        # The tokens with w = 3 and 0.5 are outside [0.6, 2]: −0.5 − 1.2 + 25.6. All seven tokens count.
        ("token-mean", 23.9, 7),
        ("seq-mean-token-sum", 23.9, 2),
        ("seq-mean-token-mean", -1.7 / 4 + 25.6 / 3, 2),  # the length stays 4
        ("seq-mean-token-sum-norm", 0.239, 2),
    ],
)
def test_a_token_outside_the_bounds_has_no_gradient_and_counts(aggregation, loss_sum, denominator):
    outputs, gradient = run(CASE, aggregation=aggregation, token_mask=[0.6, 2.0])
    assert outputs.loss_sum.item() == pytest.approx(loss_sum)
    assert outputs.denominator == denominator
    assert gradient[:2] == [0, 0] and gradient[2] < 0
    assert outputs.sums["token_mask_share"] == 2
    assert outputs.sums["tokens"] == 7


def test_tokens_inside_the_bounds_are_not_changed():
    outputs, _ = run(CASE, token_mask=[0.4999, 3.0001])
    assert outputs.loss_sum.item() == pytest.approx(21.62)
    assert outputs.sums["token_mask_share"] == 0


def test_icepop_weights_the_tokens_inside_by_their_ratio():
    # w·loss inside [0.6, 5], 0 outside: −3 + 0 − 0.5 − 1.2 + 1.6 + 1.5·20 + 4
    outputs, gradient = run(CASE, importance_weight="token", weight_cap=5.0, token_mask=[0.6, 5.0])
    assert outputs.loss_sum.item() == pytest.approx(30.9)
    assert gradient == pytest.approx([-3, 0, -0.5, -1.2, 0, 0, 0, 4, 0, 0])
    assert outputs.denominator == 7


# ---- sequence masks ----


@pytest.mark.parametrize(
    ("aggregation", "loss_sum", "denominator"),
    [
        # BAD's geometric mean of 1.1447 is above 1.12, GOOD's 1.1067 is not: −3.98 over GOOD's four tokens.
        ("token-mean", -3.98, 4),
        ("seq-mean-token-sum", -3.98, 1),
        ("seq-mean-token-mean", -3.98 / 4, 1),
        ("seq-mean-token-sum-norm", -0.0398, 1),
    ],
)
def test_a_sequence_outside_the_bounds_is_excluded_and_not_counted(aggregation, loss_sum, denominator):
    outputs, gradient = run(CASE, aggregation=aggregation, geometric_mask=[0.9, 1.12])
    assert outputs.loss_sum.item() == pytest.approx(loss_sum)
    assert outputs.denominator == denominator
    assert gradient[4:] == [0] * 6 and gradient[0] < 0
    # A share of all active tokens, as the other metrics: the three of BAD among seven.
    assert outputs.sums["sequence_mask_share"] == 3
    assert outputs.sums["tokens"] == 7


def test_the_geometric_mean_has_a_lower_bound():
    outputs, _ = run([Sequence([1, 1, 1], 1.0, engine_ratios=[0.5, 1, 1]), BAD, MASKED], geometric_mask=[0.8, 2.0])
    assert outputs.loss_sum.item() == pytest.approx(25.6)  # 0.5^(1/3) = 0.7937 is below 0.8
    assert outputs.denominator == 3


def test_masked_positions_do_not_enter_the_product():
    outputs, _ = run(CASE, product_mask=[0.0, 1.6])
    assert outputs.sums["sequence_mask_share"] == 0
    assert outputs.loss_sum.item() == pytest.approx(21.62)
    outputs, _ = run(CASE, product_mask=[0.0, 1.4])
    assert outputs.sums["sequence_mask_share"] == 7


def test_masked_importance_sampling_weights_the_rest():
    # MIS: GOOD's product 3·0.4 = 1.2 is its weight; BAD's 1.5 is above 1.4 and excluded.
    good = Sequence(GOOD.ratios, 1.0, engine_ratios=[3, 0.4, 1, 1])
    outputs, gradient = run([good, BAD, MASKED], importance_weight="sequence", product_mask=[0.0, 1.4])
    assert outputs.loss_sum.item() == pytest.approx(1.2 * -3.98)
    assert outputs.denominator == 4
    assert gradient == pytest.approx([-1.2, 0, -0.6, -1.44, 0, 0, 0, 0, 0, 0])


def test_both_sequence_masks_exclude_what_either_does():
    long = Sequence([1] * 5, 1.0, engine_ratios=[1.1] * 5)  # product 1.61, geometric mean 1.1
    outputs, _ = run([GOOD, BAD, long, MASKED], geometric_mask=[0.9, 1.12], product_mask=[0.0, 1.55])
    assert outputs.sums["sequence_mask_share"] == 3 + 5
    assert outputs.denominator == 4


def test_when_every_sequence_is_excluded_the_loss_and_its_denominator_are_zero():
    outputs, gradient = run(CASE, product_mask=[0.0, 1.4])
    assert (outputs.loss_sum.item(), outputs.denominator.item(), gradient) == (0, 0, [0] * 10)


# ---- OPSM ----

# w·ratio is π/π_engine: 0.5 and 0.25. Mean of log π_engine − log π: (ln 2 + ln 4)/2 = 1.039721.
DRIFTED = [0.5, 0.5], [1.0, 0.5]


@pytest.mark.parametrize(
    ("delta", "advantage", "masked"), [(1.0, -2.0, 2), (1.1, -2.0, 0), (1.0, 2.0, 0), (1.0, 0.0, 0)]
)
def test_opsm_masks_sequences_with_a_negative_advantage_that_drifted(delta, advantage, masked):
    drifted = Sequence(DRIFTED[0], advantage, engine_ratios=DRIFTED[1])
    outputs, gradient = run([GOOD, drifted, MASKED], opsm_delta=delta)
    assert outputs.sums["opsm_share"] == masked
    own = {-2.0: 1.6, 2.0: -1.0, 0.0: 0.0}[advantage]  # bound 0.8 for Â < 0; none from below for Â > 0
    assert outputs.loss_sum.item() == pytest.approx(-3.98 + (0 if masked else 2 * own))
    assert outputs.denominator == 6  # it counts: the denominator does not depend on π
    assert gradient[4:] == pytest.approx([0 if masked or own != -1.0 else -1.0] * 2 + [0, 0])


def test_opsm_and_the_token_mask_add_up():
    drifted = Sequence(DRIFTED[0], -2.0, engine_ratios=DRIFTED[1])
    outputs, gradient = run([GOOD, drifted, MASKED], opsm_delta=1.0, token_mask=[0.6, 2.0])
    assert outputs.loss_sum.item() == pytest.approx(-0.5 - 1.2)
    assert gradient == pytest.approx([0, 0, -0.5, -1.2, 0, 0, 0, 0])
    assert (outputs.sums["opsm_share"], outputs.sums["token_mask_share"]) == (2, 3)


# ---- together ----


def test_the_decoupled_objective_is_written_out():
    """Σ π_old/π_engine · min(r Â, clip(r) Â), r = π/π_old: clipping is around the proximal policy."""
    outputs, gradient = run(CASE, importance_weight="token", weight_cap=1e6)
    weights = [3, 0.5, 1, 1, 0, 1, 1.5, 1, 0, 0]
    losses = [-1, -1.28, -0.5, -1.2, 0, 1.6, 20, 4, 0, 0]
    assert outputs.loss_sum.item() == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)))
    assert gradient == pytest.approx([w * g for w, g in zip(weights, GRADIENT, strict=True)])


def test_removed_tokens_have_no_kl_term_and_no_entropy_bonus():
    everything = ("engine_logprobs", "ref_logprobs", "entropy")
    tokens = Sequence([1, 1], 1.0, engine_ratios=[9, 1], ref_ratios=[2, 2], entropy=[3, 5])
    excluded = Sequence([1, 1, 1], 1.0, engine_ratios=[2, 2, 2], ref_ratios=[2, 2, 2], entropy=[7, 7, 7])
    outputs, _ = run([tokens, excluded, MASKED], everything, token_mask=[0.5, 8.0], product_mask=[0.0, 7.0])
    # The first sequence's product is 9, the second's 8: both are excluded. With a bound of 8.5 only the first.
    assert outputs.loss_sum.item() == 0
    outputs, _ = run([tokens, excluded, MASKED], everything, token_mask=[0.5, 8.0], product_mask=[0.0, 9.5])
    # Policy −1 four times, KL (k3 at ref/π = 2) 1 − ln 2, entropy −5 and −7: not the token with w = 9.
    assert outputs.loss_sum.item() == pytest.approx(-4 + 4 * (1 - ln(2)) - 5 - 21)
    assert outputs.denominator == 5


def test_a_nan_is_counted_also_where_a_mask_removes_the_token():
    config = AlgorithmConfig(off_policy={"token_mask": [0.6, 2.0]})
    inputs = pack(CASE, config)
    inputs.batch.engine_logprobs[2] = math.nan
    assert policy_loss(inputs.scores, inputs.batch, config).sums["nonfinite_tokens"] == 1


@pytest.mark.parametrize(
    ("off_policy", "needs"),
    [
        ({}, Needs()),
        ({"token_mask": [0.5, 2.0]}, Needs(engine=True)),  # one pass over the head is enough
        ({"geometric_mask": [0.5, 2.0]}, Needs(engine=True, whole_sequences=True)),
        ({"product_mask": [0.5, 2.0]}, Needs(engine=True, whole_sequences=True)),
        ({"opsm_delta": 0.0}, Needs(engine=True, whole_sequences=True)),
    ],
)
def test_what_each_correction_reads(off_policy, needs):
    assert PolicyLoss(AlgorithmConfig(off_policy=off_policy)).needs == needs


def test_no_host_synchronisation():
    """Meta tensors have no values: .item() or an `if` on a tensor would raise."""
    bounds = {"token_mask": [0.5, 2.0], "geometric_mask": [0.9, 1.1], "product_mask": [0.1, 9.0], "opsm_delta": 0.1}
    config = AlgorithmConfig(off_policy={"importance_weight": "sequence", **bounds})
    inputs = pack(CASE, config)
    for name in ("logprobs", "entropy", *inputs.batch.tensors):
        inputs.put(name, inputs.get(name).detach().to("meta"))
    assert policy_loss(inputs.scores, inputs.batch, config).loss_sum.shape == torch.Size([])


# ---- exact values ----


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_small_importance_weights_are_not_raised(level):
    """Truncation has no lower bound: 0.01 stays 0.01 whatever the cap. 5 becomes 2."""
    case = [Sequence([1.0, 1.0], 1.0, engine_ratios=[0.1, 0.1]), Sequence([1.0], 1.0, engine_ratios=[5.0]), MASKED]
    outputs, gradient = run(case, importance_weight=level, weight_cap=2.0)
    weight = 0.1 if level == "token" else 0.01
    assert gradient[:3] == pytest.approx([-weight, -weight, -2.0])
    assert outputs.sums["importance_weight"].item() == pytest.approx(2 * weight + 2.0)


def test_sums_over_a_sequence_are_exact():
    """In fp32, 2²⁵ + 1 − 2²⁵ is 0."""
    config = AlgorithmConfig(off_policy={"importance_weight": "sequence", "weight_cap": 10.0})
    inputs = pack([Sequence([1.0] * 3, 1.0), MASKED], config, dtype=torch.float32)
    inputs.batch.old_logprobs[:3] = inputs.logprobs.data[:3] = torch.tensor([2.0**25, 1.0, -(2.0**25)])
    inputs.batch.engine_logprobs[:3] = 0.0
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    assert outputs.sums["importance_weight"].item() == pytest.approx(3 * math.e, rel=1e-6)


def test_weights_at_the_cap_and_ratios_at_the_bounds_are_inside():
    case = [Sequence([1.0] * 4, 1.0, old=0.0, engine_ratios=[2.0, 2.01, 0.5, 0.49]), MASKED]
    outputs, _ = run(case, importance_weight="token", weight_cap=2.0)
    assert outputs.sums["mismatch_over_cap"] == 1
    outputs, _ = run(case, token_mask=[0.5, 2.0])
    assert outputs.sums["token_mask_share"] == 2
    outputs, _ = run(case, weight_cap=2.0)
    assert outputs.sums["mismatch_over_cap"] == 1
