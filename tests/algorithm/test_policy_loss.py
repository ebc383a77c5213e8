"""The policy loss against numbers derived by hand. Unequal lengths and a fully masked sequence throughout."""

import math

import pytest
import torch
from loss_cases import INF, NAN, Sequence, pack, poison, policy_loss

from megatron_dapo.algorithm import PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.config.algorithm import AlgorithmConfig

ln = math.log

# Four tokens with Â = 1; a prompt position and three tokens with Â = −2; two tokens of a truncated, masked sample.
# Bounds 0.8 and 1.28, dual clip 10.
#   ratio       1     1.5      0.5    1.2  |  0.5           20            2
#   loss       −1    −1.28    −0.5   −1.2  |  2·0.8 = 1.6   2·10 = 20     2·2 = 4
#   gradient   −1     0       −0.5   −1.2  |  0             0             4
#                    (high)                   (low)        (dual)
# Â > 0 is not clipped from below (0.5 stays), Â < 0 not at 1.28 (2 stays). Sums −3.98 and 25.6.
GOOD = Sequence([1, 1.5, 0.5, 1.2], 1.0)
BAD = Sequence([1, 0.5, 20, 2], -2.0, active=[False, True, True, True])
MASKED = Sequence([3, 0.1], 5.0, active=[False, False])
CASE = [GOOD, BAD, MASKED]
TOKEN_CLIP = {"clip_low": 0.2, "clip_high": 0.28}  # gspo's own bounds are closer to 1
GRADIENT = [-1, 0, -0.5, -1.2, 0, 0, 0, 4, 0, 0]


def run(sequences, extras=(), dtype=torch.float64, **settings):
    """(outputs, inputs) with gradients filled in and junk at every masked position."""
    config = AlgorithmConfig(**settings)
    inputs = poison(pack(sequences, config, dtype, extras))
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    outputs.loss_sum.backward()
    return outputs, inputs


def close(tensor, expected, tolerance=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(tensor.detach().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("aggregation", "loss_sum", "denominator", "good_weight", "bad_weight"),
    [
        # −3.98 + 25.6 = 21.62. Seven tokens carry loss: not ten (counted before masking), not eight (a masked
        # sample counted as one).
        ("token-mean", 21.62, 7, 1, 1),
        ("seq-mean-token-sum", 21.62, 2, 1, 1),
        # −3.98/4 + 25.6/3 = −0.995 + 8.533333
        ("seq-mean-token-mean", 7.538333, 2, 1 / 4, 1 / 3),
        ("seq-mean-token-sum-norm", 0.2162, 2, 0.01, 0.01),
    ],
)
def test_loss_and_gradient_of_every_aggregation(aggregation, loss_sum, denominator, good_weight, bad_weight, dtype):
    outputs, inputs = run(CASE, dtype=dtype, aggregation=aggregation)
    close(outputs.loss_sum, loss_sum)
    assert outputs.denominator.dtype == torch.int64
    assert outputs.denominator == denominator
    weights = [good_weight] * 4 + [bad_weight] * 4 + [0, 0]
    close(inputs.logprobs.grad, [w * g for w, g in zip(weights, GRADIENT, strict=True)])


def test_metrics():
    outputs, _ = run(CASE)
    sums = {name: value.item() for name, value in outputs.sums.items()}
    # Σ ratio = 4.2 + 22.5 = 26.7; Π ratio = 0.9·20 = 18, so Σ(r − 1 − ln r) = 19.7 − ln 18.
    expected = {
        "tokens": 7, "nonfinite_tokens": 0, "ratio_mean": 26.7, "approx_kl": 19.7 - ln(18),
        "clip_fraction_high": 1, "clip_fraction_low": 1, "clip_fraction_dual": 1,
    }  # fmt: skip
    assert sums == pytest.approx(expected)
    assert outputs.maxima["ratio_max"].item() == pytest.approx(20)
    assert all(v.dtype == torch.float64 and not v.requires_grad for v in outputs.sums.values())


def test_metrics_of_optional_inputs():
    # old/engine 2.5 and 0.5, the rest 1. |ln 2.5| + |ln 0.5| = 0.916291 + 0.693147; KL(engine‖old) by k3:
    # (1.5 − ln 2.5) + (−0.5 + ln 2) = 1 − ln 1.25. One weight above the cap of 2. The ratio of 100 at a
    # masked token must not appear.
    good = Sequence([1, 1], 1.0, engine_ratios=[2.5, 0.5], ref_ratios=[2, 1], entropy=[0.25, 0.5])
    masked = Sequence([1], 1.0, [False], engine_ratios=[100], ref_ratios=[100], entropy=[100])
    outputs, _ = run([good, BAD, masked], extras=("entropy", "ref_logprobs", "engine_logprobs"))
    sums = {name: value.item() for name, value in outputs.sums.items()}
    assert sums["mismatch_mean"] == pytest.approx(ln(2.5) + ln(2))
    assert sums["mismatch_kl"] == pytest.approx(1 - ln(1.25))
    assert sums["mismatch_over_cap"] == 1
    assert sums["entropy"] == pytest.approx(0.75 + 3 * 0.5)
    assert sums["reference_kl"] == pytest.approx(1 - ln(2))  # k3 at ref/π = 2
    assert outputs.maxima["mismatch_max"].item() == pytest.approx(ln(2.5))
    # They only feed metrics: the loss has no correction, no KL term and no bonus.
    close(outputs.loss_sum, -2 + 25.6)
    assert "importance_weight" not in sums


def test_mismatch_where_the_old_log_probs_are_the_engines():
    """In the first update of a step the policy is the proximal one: π/engine is 2.5 and 0.5, the rest 1. Later ones
    have nothing to compare."""
    masked = Sequence([100], 1.0, [False])
    inputs = pack([Sequence([2.5, 0.5], 1.0), Sequence([1], -1.0), masked], AlgorithmConfig())
    first = {
        "mismatch_kl": 1 - ln(1.25), "mismatch_mean": ln(5), "mismatch_max": ln(2.5), "mismatch_over_cap": 1,
    }  # fmt: skip
    for proximal, expected in (("current", first), ("unknown", {})):
        inputs.batch.proximal = proximal
        outputs = policy_loss(inputs.scores, inputs.batch, AlgorithmConfig())
        found = {name: value.item() for name, value in (outputs.sums | outputs.maxima).items() if "mismatch" in name}
        assert found == pytest.approx(expected)
        close(outputs.loss_sum, -(1.28 + 0.5) + 1)  # the same loss


def test_without_dual_clip():
    outputs, inputs = run(CASE, dual_clip=None)
    close(outputs.loss_sum, 21.62 - 20 + 40)  # the ratio of 20 counts in full: 2·20
    close(inputs.logprobs.grad[6], 40)
    assert outputs.sums["clip_fraction_dual"] == 0


def test_the_configured_dual_clip_is_used():
    outputs, _ = run(CASE, dual_clip=3.0)
    close(outputs.loss_sum, 21.62 - 20 + 6)


def test_clip_bounds_are_decoupled():
    # Bounds 0.9 and 1.6: 1.5 is free (−1.5), 0.5 with Â < 0 becomes 0.9 (1.8).
    outputs, _ = run(CASE, clip_low=0.1, clip_high=0.6)
    close(outputs.loss_sum, 21.62 + 1.28 - 1.5 - 1.6 + 1.8)


def test_log_ratio_is_bounded_by_twenty():
    wild = Sequence([math.exp(30), math.exp(-30)], -1.0)
    outputs, inputs = run([wild, GOOD, MASKED], dual_clip=None, clip_low=1.0)
    # Loss e^20 and e^−20, and zero gradient beyond the bound.
    close(outputs.loss_sum, math.exp(20) + math.exp(-20) - 3.98)
    assert inputs.logprobs.grad[:2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # At ref/π = 2, and 0 elsewhere; k1 has gradient 1 also where π = ref.
    [("k1", -ln(2), 1), ("k2", ln(2) ** 2 / 2, -ln(2)), ("k3", 1 - ln(2), -1)],
)
def test_kl_term_on_the_same_normaliser(estimator, value, gradient):
    good = Sequence([1, 1.5, 0.5, 1.2], 1.0, ref_ratios=[2, 1, 1, 1])
    settings = {"aggregation": "seq-mean-token-mean", "kl": {"coefficient": 0.5, "estimator": estimator}}
    outputs, inputs = run([good, BAD, MASKED], ("ref_logprobs",), **settings)
    close(outputs.loss_sum, 7.538333 + 0.5 * value / 4)
    at_ref = 1 if estimator == "k1" else 0
    close(inputs.logprobs.grad[:2], [(-1 + 0.5 * gradient) / 4, 0.5 * at_ref / 4])
    assert outputs.denominator == 2


def test_entropy_bonus_lowers_the_loss():
    good = Sequence([1, 1.5, 0.5, 1.2], 1.0, entropy=[1, 2, 3, 4])
    bad = Sequence([1, 0.5, 20, 2], -2.0, active=[False, True, True, True], entropy=[9, 0, 0, 0])
    outputs, inputs = run([good, bad, MASKED], ("entropy",), entropy_coefficient=0.1)
    close(outputs.loss_sum, 21.62 - 0.1 * 10)
    close(inputs.entropy.grad, [-0.1] * 4 + [0] + [-0.1] * 3 + [0, 0])


# old/engine: 3 (capped at 2), 0.5, 1, 1 for GOOD; a masked 7 then 1, 1.5, 1 for BAD.
GOOD_IS = Sequence(GOOD.ratios, 1.0, engine_ratios=[3, 0.5, 1, 1])
BAD_IS = Sequence(BAD.ratios, -2.0, active=BAD.active, engine_ratios=[7, 1, 1.5, 1])


def test_token_level_importance_sampling():
    settings = {"off_policy": {"importance_weight": "token", "weight_cap": 2.0}}
    outputs, inputs = run([GOOD_IS, BAD_IS, MASKED], ("engine_logprobs",), **settings)
    # −(2·1 + 0.5·1.28 + 0.5 + 1.2) + 1.6 + 1.5·20 + 4 = −4.34 + 35.6
    close(outputs.loss_sum, 31.26)
    close(inputs.logprobs.grad, [-2, 0, -0.5, -1.2, 0, 0, 0, 4, 0, 0])
    close(outputs.sums["importance_weight"], 2 + 0.5 + 1 + 1 + 1 + 1.5 + 1)
    assert outputs.sums["mismatch_over_cap"] == 1


def test_sequence_level_importance_sampling():
    settings = {"off_policy": {"importance_weight": "sequence", "weight_cap": 1.4}}
    outputs, inputs = run([GOOD_IS, BAD_IS, MASKED], ("engine_logprobs",), **settings)
    # GOOD 3·0.5 = 1.5, capped at 1.4; BAD 1.5, capped at 1.4 (10.5 with its prompt position): 1.4·21.62
    close(outputs.loss_sum, 1.4 * 21.62)
    close(inputs.logprobs.grad, [1.4 * g for g in GRADIENT])
    assert outputs.sums["mismatch_over_cap"] == 7
    # Below the cap the product itself: 1.5.
    outputs, _ = run(
        [GOOD_IS, BAD_IS, MASKED], ("engine_logprobs",), off_policy={"importance_weight": "sequence", "weight_cap": 2.0}
    )
    close(outputs.loss_sum, 1.5 * 21.62)
    assert outputs.sums["mismatch_over_cap"] == 0


def test_importance_weights_leave_kl_and_entropy_alone():
    good = Sequence([1, 1], 1.0, engine_ratios=[2, 2], ref_ratios=[2, 2], entropy=[1, 1])
    settings = {"kl": {"coefficient": 1.0}, "entropy_coefficient": 1.0, "off_policy": {"importance_weight": "token"}}
    outputs, _ = run([good, Sequence([1], 0.0), MASKED], ("entropy", "ref_logprobs", "engine_logprobs"), **settings)
    # Policy −1·2 twice; KL 1 − ln 2 twice; entropy −1 twice and −0.5 of the third token.
    close(outputs.loss_sum, -4 + 2 * (1 - ln(2)) - 2.5)


def test_gspo():
    # s = √(1.2·0.9) = √1.08 = 1.039230, not clipped; Â = 1: loss −s and gradient −s per token.
    # s = ∛(0.5·0.8·0.9) = ∛0.36 = 0.711379, below 0.8 with Â = −2: loss 1.6 per token, no gradient. The masked
    # position's ratio of 50 must not enter it.
    free = Sequence([1.2, 0.9], 1.0)
    clipped = Sequence([50, 0.5, 0.8, 0.9], -2.0, active=[False, True, True, True])
    s = math.sqrt(1.08)
    outputs, inputs = run([free, clipped, MASKED], objective="gspo", aggregation="token-mean", **TOKEN_CLIP)
    close(outputs.loss_sum, -2 * s + 3 * 1.6)
    close(inputs.logprobs.grad, [-s, -s, 0, 0, 0, 0, 0, 0])
    assert outputs.sums["clip_fraction_low"] == 3
    close(outputs.sums["ratio_mean"], 2 * s + 3 * 0.36 ** (1 / 3))
    # approx_kl stays the token's: Σ r − 1 − ln r.
    close(outputs.sums["approx_kl"], 4.3 - 5 - ln(1.2 * 0.9 * 0.5 * 0.8 * 0.9))


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    """With seq-mean-token-mean the stop-gradient form is exactly ∇(−Â·s), s = exp(mean log-ratio)."""
    sequences = [Sequence([1.2, 0.9, 1.1], 1.5), Sequence([1.1, 0.8], -0.5), MASKED]
    _, inputs = run(sequences, objective="gspo", aggregation="seq-mean-token-mean", **TOKEN_CLIP)
    direct = inputs.logprobs.detach().nan_to_num(0.0).requires_grad_()
    difference = direct - inputs.batch.old_logprobs
    loss = -1.5 * difference[:3].mean().exp() + 0.5 * difference[3:5].mean().exp()
    (expected,) = torch.autograd.grad(loss, direct)
    torch.testing.assert_close(inputs.logprobs.grad, expected.where(inputs.mask, 0))


def test_cispo():
    # Weight clip(r, 0.8, 1.28) without gradient, times Â·log π; every active token has a gradient −weight·Â.
    # log π = −1 + ln r. GOOD: weights 1, 1.28, 0.8, 1.2. BAD: 0.8, 1.28, 1.28; the dual clip does not apply.
    outputs, inputs = run(CASE, objective="cispo", clip_low=0.2, clip_high=0.28)
    good = -(1 * -1 + 1.28 * (-1 + ln(1.5)) + 0.8 * (-1 + ln(0.5)) + 1.2 * (-1 + ln(1.2)))
    bad = 2 * (0.8 * (-1 + ln(0.5)) + 1.28 * (-1 + ln(20)) + 1.28 * (-1 + ln(2)))
    close(outputs.loss_sum, good + bad)
    close(inputs.logprobs.grad, [-1, -1.28, -0.8, -1.2, 0, 1.6, 2.56, 2.56, 0, 0])
    sums = {name: outputs.sums[name].item() for name in outputs.sums if name.startswith("clip_fraction")}
    assert sums == {"clip_fraction_high": 3, "clip_fraction_low": 2, "clip_fraction_dual": 0}


EVERYTHING = {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.1, "off_policy": {"importance_weight": "sequence"}}
EXTRAS = ("entropy", "ref_logprobs", "engine_logprobs")


@pytest.mark.parametrize("objective", ["dapo", "gspo", "cispo"])
def test_all_masked_is_zero_without_nan(objective):
    outputs, inputs = run([MASKED, Sequence([1.0], 1.0, [False])], EXTRAS, objective=objective, **EVERYTHING)
    assert outputs.loss_sum.item() == 0
    assert outputs.denominator.item() == 0
    assert inputs.logprobs.grad.tolist() == [0, 0, 0]
    assert inputs.entropy.grad.tolist() == [0, 0, 0]
    assert all(value.item() == 0 for value in (outputs.sums | outputs.maxima).values())


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_no_tokens_at_all(objective):
    """A context-parallel rank's share may be empty."""
    empty, ids = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    mask = torch.zeros(0, dtype=torch.bool)
    weights, counts = token_weights("token-mean", mask, ids, 2)
    batch = TokenBatch(empty.detach(), empty.detach(), mask, weights, counts, ids, 2)
    outputs = policy_loss(Scores(empty), batch, AlgorithmConfig(objective=objective))
    outputs.loss_sum.backward()
    assert outputs.loss_sum.item() == 0
    assert outputs.maxima["ratio_max"].item() == 0


@pytest.mark.parametrize("objective", ["dapo", "gspo", "cispo"])
def test_values_at_masked_positions_change_nothing(objective):
    """run() poisons masked positions; the clean case gives the same, bit for bit."""
    config = AlgorithmConfig(objective=objective, **EVERYTHING)
    clean = pack(CASE, config)
    expected = policy_loss(clean.scores, clean.batch, config)
    expected.loss_sum.backward()
    outputs, inputs = run(CASE, EXTRAS, objective=objective, **EVERYTHING)
    assert outputs.loss_sum == expected.loss_sum
    assert torch.equal(inputs.logprobs.grad, clean.logprobs.grad)
    assert torch.equal(inputs.entropy.grad, clean.entropy.grad)
    assert outputs.sums == expected.sums
    assert outputs.maxima == expected.maxima


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "name", ["logprobs", "old_logprobs", "advantages", "weights", "entropy", "ref_logprobs", "engine_logprobs"]
)
def test_nonfinite_values_at_active_tokens_are_counted(name, junk):
    config = AlgorithmConfig(
        kl={"coefficient": 0.1}, entropy_coefficient=0.1, off_policy={"importance_weight": "token"}
    )
    inputs = pack(CASE, config)
    broken = inputs.get(name).detach().clone()
    broken[1] = junk
    inputs.put(name, broken)
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    assert outputs.sums["nonfinite_tokens"] == 1
    if math.isnan(junk):
        assert outputs.loss_sum.isnan()


def test_engine_logprobs_that_only_feed_metrics_do_not_stop_the_run():
    config = AlgorithmConfig()
    inputs = pack(CASE, config)
    inputs.batch.engine_logprobs[1] = NAN
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    assert outputs.sums["nonfinite_tokens"] == 0
    assert outputs.loss_sum.isfinite()
    assert outputs.sums["mismatch_mean"].isnan()


def test_a_token_masked_after_weighting_leaves_the_denominator():
    """Weights were computed before a sample was masked."""
    config = AlgorithmConfig()
    inputs = pack([GOOD, Sequence([1, 1, 1], 1.0), MASKED], config)
    inputs.batch.mask = inputs.mask & (inputs.batch.sequence_ids != 1)
    assert policy_loss(inputs.scores, inputs.batch, config).denominator == 4


def test_token_losses_are_elementwise():
    """Any slice of tokens gives that slice of losses: the chunked head relies on it."""
    config = AlgorithmConfig(kl={"coefficient": 0.1}, entropy_coefficient=0.1)
    inputs, loss = pack([GOOD, BAD], config), PolicyLoss(config)

    whole = loss(inputs.scores, inputs.batch).loss_sum
    single_tokens = [slice(i, i + 1) for i in range(len(inputs.mask))]
    for parts in ([slice(None)], [slice(0, 3), slice(3, None)], single_tokens):
        total = sum(loss.sum(inputs.scores.part(part), inputs.batch.part(part)) for part in parts)
        torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("objective", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("level", ["off", "token", "sequence"])
def test_no_host_synchronisation(objective, level):
    """Meta tensors have no values: .item(), boolean indexing or an `if` on a tensor would raise."""
    config = AlgorithmConfig(
        objective=objective, kl={"coefficient": 0.1}, entropy_coefficient=0.1, off_policy={"importance_weight": level}
    )
    inputs = pack(CASE, config)
    batch = inputs.batch
    for name in ("logprobs", "entropy", *batch.tensors):
        inputs.put(name, inputs.get(name).detach().to("meta"))
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        batch.weights, batch.counts = token_weights(aggregation, batch.mask, batch.sequence_ids, batch.sequences)
        assert policy_loss(inputs.scores, inputs.batch, config).loss_sum.shape == ()


@pytest.mark.parametrize(
    "name",
    ["old_logprobs", "advantages", "mask", "weights", "counts", "sequence_ids", "entropy", "ref_logprobs",
     "engine_logprobs"],
)  # fmt: skip
def test_wrong_length_names_the_tensor(name):
    config = AlgorithmConfig()
    inputs = pack(CASE, config)
    inputs.put(name, inputs.get(name).detach()[:-1])
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \(10,\) like logprobs, found \(9,\)"):
        policy_loss(inputs.scores, inputs.batch, config)


def test_wrong_types_and_ranks_name_the_tensor():
    config = AlgorithmConfig()
    for name, change, message in [
        ("mask", lambda t: t.long(), "mask: expected torch.bool, found torch.int64"),
        ("counts", lambda t: t.float(), "counts: expected torch.int64 or torch.int32, found torch.float32"),
        ("logprobs", lambda t: t.bfloat16(), "logprobs: expected torch.float32 or torch.float64, found torch.bfloat16"),
        ("logprobs", lambda t: t[None], r"logprobs: expected shape \(10,\) like logprobs, found \(1, 10\)"),
    ]:
        inputs = pack(CASE, config)
        inputs.put(name, change(inputs.get(name)))
        with pytest.raises(ValueError, match=message):
            policy_loss(inputs.scores, inputs.batch, config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("entropy", {"entropy_coefficient": 0.1}),
        ("ref_logprobs", {"kl": {"coefficient": 0.1}}),
        ("engine_logprobs", {"off_policy": {"importance_weight": "token"}}),
    ],
)
def test_missing_inputs_name_the_setting(name, settings):
    config = AlgorithmConfig(**settings)
    with pytest.raises(ValueError, match=rf"{name}: expected a tensor because algorithm\..*, found None"):
        inputs = pack(CASE, config, extras=())
        policy_loss(inputs.scores, inputs.batch, config)


@pytest.mark.parametrize("objective", ["dapo", "cispo"])
def test_a_ratio_at_a_bound_is_not_clipped(objective):
    """Powers of two are exact: 1 − clip_low = 0.5, 1 + clip_high = 2; a dual clip at 4."""
    bounds = {"clip_low": 0.5, "clip_high": 1.0, "dual_clip": 4.0}
    old = torch.zeros(6, dtype=torch.float64)
    config = AlgorithmConfig(objective=objective, **bounds)
    inputs = pack([Sequence([1.0] * 3, 1.0), Sequence([1.0] * 3, -1.0), MASKED], config, extras=())
    inputs.batch.old_logprobs[:6] = old
    low, high, dual = ln(0.5), ln(2.0), ln(4.0)
    inputs.logprobs.data[:6] = torch.tensor([low, high, high, low, dual, low], dtype=torch.float64)
    ratios = inputs.logprobs.data[:6].exp().tolist()
    assert ratios == [0.5, 2.0, 2.0, 0.5, 4.0, 0.5]
    outputs = policy_loss(inputs.scores, inputs.batch, config)
    found = [outputs.sums[f"clip_fraction_{side}"].item() for side in ("high", "low", "dual")]
    assert found == ([0, 0, 0] if objective == "dapo" else [1, 0, 0])
    assert outputs.maxima["ratio_max"] == 4.0
