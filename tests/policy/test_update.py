"""The update itself: no-ops, precision, recompute, optimizer details, and errors that every rank shares."""

import numpy as np
import pytest
import torch

from megatron_dapo.config import parse_config
from megatron_dapo.config.policy import OptimizerConfig
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.learning_rate import learning_rate
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import RankError, initialize
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.selfcheck.layout_spec import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full

SHAPE = synthetic_shape("dense")


def make_policy(place, layout="single", **changes):
    raw = selfcheck_config(LayoutSpec.parse(layout)).model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        raw[section][name] = raw[section][name] | value if isinstance(value, dict) else value
    config = parse_config(raw)
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=place))
    policy.load_hf(random_hf_weights(SHAPE))
    return policy


def weights_of(policy):
    return gather_full(policy, policy.runtime, gradient=False)


# ---- nothing to train on ----


def masked_update(place, layout):
    policy = make_policy(place, layout)
    before, batch = weights_of(policy), awkward_batch(SHAPE, 0)
    batch.loss_mask[:] = False
    metrics = policy.update(batch)
    after = weights_of(policy)
    return metrics, all(torch.equal(before[n], after[n]) for n in before), policy.updates


@pytest.mark.parametrize("layout", ["single", "pp2", "dp2do", "cp2"])
def test_an_all_masked_mini_batch_is_a_no_op_that_says_so(layout):
    for metrics, unchanged, updates in run_ranks(LayoutSpec.parse(layout).world_size, masked_update, layout):
        assert metrics["update_skipped"] == 1
        assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0
        assert all(np.isfinite(v) for v in metrics.values())
        assert unchanged
        assert updates == 0


def few_samples(place):
    policy = make_policy(place, "dp2")
    return policy.update(awkward_batch(SHAPE, 0).select([0]))


def test_more_ranks_than_samples():
    """A data-parallel rank without a sample runs a placeholder; the result is that of one process."""
    alone = run_ranks(1, lambda place: make_policy(place).update(awkward_batch(SHAPE, 0).select([0])))[0]
    for metrics in run_ranks(2, few_samples):
        assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


# ---- errors: the same one on every rank, in time ----


def bad_update(place, layout, spoil):
    policy = make_policy(place, layout)
    batch = awkward_batch(SHAPE, 0)
    if place.rank == place.world_size - 1:
        batch = spoil(batch) or batch
    try:
        policy.update(batch)
    except RankError as error:
        return str(error)
    return "no error"


def nan_old(batch):
    batch.old_logprobs[7] = np.nan


def nan_advantage(batch):
    batch.advantages[2] = np.nan


def short_mask(batch):
    batch.loss_mask = batch.loss_mask[:-1]


def empty(batch):
    return batch.select([])


def foreign_token(batch):
    batch.tokens[5] = SHAPE.vocab


def no_reference(batch):
    batch.ref_logprobs = None


def nothing_to_compare_with(batch):
    batch.old_logprobs = batch.engine_logprobs = None


def too_long(batch):
    return TrainBatch(
        np.zeros(999, np.int32), np.array([9]), np.array([990]), np.zeros(1, np.float32), np.ones(990, bool),
        engine_logprobs=np.zeros(990, np.float32),
    )  # fmt: skip


def infinite_in_masked_token(batch):
    batch.old_logprobs[~batch.loss_mask] = -np.inf


@pytest.mark.parametrize("layout", ["pp2", "dp2", "cp2"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_old, "old_logprobs is nan at response token"),
        (nan_advantage, "sample 2: its advantage is nan"),
        (short_mask, "loss_mask has"),
        (empty, "the mini-batch is empty"),
        (foreign_token, "token id 101 is outside the vocabulary of 101"),
        (no_reference, "has no ref_logprobs"),
        (nothing_to_compare_with, "neither old_logprobs nor engine_logprobs"),
        (too_long, "more than policy.micro_batch_tokens"),
    ],
)
def test_bad_input_on_one_rank_is_one_clear_error_on_all(layout, spoil, message):
    errors = run_ranks(2, bad_update, layout, spoil, timeout=60)
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 1 failed while checking a mini-batch")
    assert message in errors[0]


def test_what_is_masked_may_hold_anything():
    assert run_ranks(1, bad_update, "single", infinite_in_masked_token) == ["no error"]


def scores_with_and_without(place):
    policy, batch = make_policy(place, "single"), awkward_batch(SHAPE, 0)
    with_them = policy.log_probs(batch)
    nothing_to_compare_with(batch)
    return with_them, policy.log_probs(batch)


def test_scoring_needs_no_log_probs():
    ((logprobs, entropy), (again, entropy_again)) = run_ranks(1, scores_with_and_without)[0]
    assert np.array_equal(logprobs, again) and np.array_equal(entropy, entropy_again) and (logprobs < 0).any()


def poisoned_update(place, layout):
    policy = make_policy(place, layout)
    before = weights_of(policy)
    with torch.no_grad():
        chunk = policy.model[-1]
        if chunk.post_process:
            next(iter(chunk.decoder.parameters()))[0] = float("nan")
    try:
        policy.update(awkward_batch(SHAPE, 0))
    except NonFiniteError as error:
        after = weights_of(policy)
        changed = [n for n in before if not torch.equal(before[n], after[n]) and not torch.isnan(after[n]).any()]
        return str(error), changed, policy.updates
    return "no error", [], -1


@pytest.mark.parametrize("layout", ["single", "pp2", "tp2"])
def test_nan_from_the_model_stops_every_rank_before_the_step(layout):
    for message, changed, updates in run_ranks(LayoutSpec.parse(layout).world_size, poisoned_update, layout):
        assert "active tokens have a NaN" in message
        assert "no weight has changed" in message
        assert not changed
        assert updates == 0


def exploding_update(place):
    policy = make_policy(place)
    batch = awkward_batch(SHAPE, 0)
    batch.advantages[:] = 3e38
    try:
        policy.update(batch)
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_an_infinite_gradient_is_not_stepped():
    assert "no weight has changed" in run_ranks(1, exploding_update)[0]


# ---- precision, recompute, optimizer ----


def several_updates(place, layout, changes, count=3):
    policy = make_policy(place, layout, **changes)
    metrics = [policy.update(awkward_batch(SHAPE, seed)) for seed in range(count)]
    return metrics, weights_of(policy)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing(recompute):
    plain = run_ranks(1, several_updates, "single", {})[0]
    saved = run_ranks(1, several_updates, "single", {"policy__recompute": recompute})[0]
    for a, b in zip(plain[0], saved[0], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", ["single", "tp2sp", "dp2do"])
def test_bf16_keeps_fp32_gradients_and_main_weights(layout):
    exact = run_ranks(1, several_updates, "single", {})[0][0]
    world = LayoutSpec.parse(layout).world_size
    metrics, weights = run_ranks(world, several_updates, layout, {"policy__precision": "bf16"})[0]
    for a, b in zip(exact, metrics, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=0.03)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.05)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


def dtypes(place):
    policy = make_policy(place, "single", policy__precision="bf16")
    parameter = next(policy.model[0].parameters())
    return parameter.dtype, parameter.main_grad.dtype, policy.optimizer.param_groups[0]["params"][0].dtype


def test_bf16_dtypes():
    assert run_ranks(1, dtypes)[0] == (torch.bfloat16, torch.float32, torch.float32)


def decayed(place):
    """A huge weight decay and no learning signal: only matrices may shrink."""
    changes = {"policy__optimizer": {"weight_decay": 100.0, "lr": 1e-3}, "algorithm__entropy_coefficient": 0.0}
    policy = make_policy(place, **changes)
    before = weights_of(policy)
    batch = awkward_batch(SHAPE, 0)
    batch.advantages[:] = 0
    batch.ref_logprobs[:] = policy.log_probs(batch)[0]
    policy.update(batch)
    after = weights_of(policy)
    return {n: float(after[n].norm() / before[n].norm()) for n in before}


def test_weight_decay_spares_norms_and_biases():
    for name, shrink in run_ranks(1, decayed)[0].items():
        if "norm" in name or name.endswith("bias"):
            assert shrink == pytest.approx(1.0, abs=0.02), name
        else:
            assert shrink == pytest.approx(0.9, abs=0.02), name


def clipped(place, clip):
    policy = make_policy(place, policy__optimizer={"grad_clip": clip})
    before = weights_of(policy)
    metrics = policy.update(awkward_batch(SHAPE, 0))
    moments = [state["exp_avg"].norm() for _, state in policy.optimizer.state.items()]
    return metrics["grad_norm"], float(torch.stack(moments).norm()), before


def test_gradient_clipping_bounds_what_adam_sees():
    # Adam's first moment after one step is (1 − β1) · clipped gradient
    norm, moment, _ = run_ranks(1, clipped, 0.01)[0]
    assert norm > 0.05
    assert moment == pytest.approx(0.1 * 0.01, rel=1e-3)
    norm, moment, _ = run_ranks(1, clipped, 0.0)[0]
    assert moment == pytest.approx(0.1 * norm, rel=1e-3)


def score_then_update(place):
    policy = make_policy(place)
    batch = awkward_batch(SHAPE, 0)
    logprobs, _ = policy.log_probs(batch)
    batch.old_logprobs = logprobs
    return policy.update(batch)


def test_recomputed_log_probs_give_a_ratio_of_one():
    metrics = run_ranks(1, score_then_update)[0]
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == 0


# ---- learning rate ----


def test_learning_rate_by_hand():
    constant = OptimizerConfig(lr=1.0, warmup_steps=2)
    # 2 steps × 2 updates of warm-up: 1/4, 2/4, 3/4, 1, then constant
    assert [learning_rate(constant, u, 2, 10) for u in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=0, schedule="linear", decay_steps=4)
    assert [learning_rate(linear, u, 1, 99) for u in (0, 1, 2, 4, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    cosine = OptimizerConfig(lr=1.0, warmup_steps=0, schedule="cosine")
    assert [learning_rate(cosine, u, 1, 4) for u in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


# ---- the rank harness ----


def fail_on_one(place):
    if place.rank == 1:
        raise ValueError("the reason")
    import time

    time.sleep(60)


def test_a_failing_rank_ends_the_others_with_its_reason():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: .*the reason"):
        run_ranks(2, fail_on_one, grace=0.5)


def test_a_hanging_rank_is_ended_at_the_timeout():
    with pytest.raises(RankError, match="did not finish within 1 s"):
        run_ranks(1, fail_on_one, timeout=1)
