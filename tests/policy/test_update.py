"""The update itself: skipped updates, precision, recompute, optimizer details, and errors that every rank shares."""

import time

import numpy as np
import pytest
import torch
from joined_ranks import RankJobs
from long_lists import some

from megatron_dapo.config import parse_config
from megatron_dapo.config.policy import OptimizerConfig
from megatron_dapo.errors import RankError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import NonFiniteError, learning_rate
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full

SHAPE = synthetic_shape("dense")
jobs = RankJobs()


def in_layout(layout, function, *args):
    return jobs.add(LayoutSpec.parse(layout).world_size, function, *args)


def make_policy(rendezvous, layout="single", **changes):
    raw = selfcheck_config(LayoutSpec.parse(layout)).model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        raw[section][name] = raw[section][name] | value if isinstance(value, dict) else value
    config = parse_config(raw)
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(SHAPE))
    return policy


def weights_of(policy):
    return gather_full(policy, policy.runtime, gradient=False)


# ---- nothing to train on ----


def masked_update(rendezvous, layout):
    policy = make_policy(rendezvous, layout)
    before, batch = weights_of(policy), awkward_batch(SHAPE, 0)
    batch.loss_mask[:] = False
    metrics = policy.update(batch)
    after = weights_of(policy)
    return metrics, all(torch.equal(before[n], after[n]) for n in before), policy.updates


MASKED_IN = some(["single", "pp2", "dp2do", "cp2"], "pp2", "dp2do")
masked = {layout: in_layout(layout, masked_update, layout) for layout in MASKED_IN}


@pytest.mark.parametrize("layout", MASKED_IN)
def test_an_all_masked_mini_batch_is_skipped_and_reported(layout):
    for metrics, unchanged, updates in masked[layout].results():
        assert metrics["update_skipped"] == 1
        assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0
        assert all(np.isfinite(v) for v in metrics.values())
        assert unchanged
        assert updates == 0


def one_sample(rendezvous, layout):
    return make_policy(rendezvous, layout).update(awkward_batch(SHAPE, 0).select([0]))


one_on_one_rank, one_on_two_ranks = in_layout("single", one_sample, "single"), in_layout("dp2", one_sample, "dp2")


def test_more_ranks_than_samples():
    """A data-parallel rank without a sample runs a placeholder; the result is that of one process."""
    alone = one_on_one_rank.results()[0]
    for metrics in one_on_two_ranks.results():
        assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


# ---- errors: the same one on every rank, in time ----


def bad_updates(rendezvous, layout, spoilers):
    """The error of each update; only the last rank's mini-batch is spoiled."""
    policy = make_policy(rendezvous, layout)
    return [bad_update(policy, rendezvous, spoil) for spoil in spoilers]


def bad_update(policy, rendezvous, spoil):
    batch = awkward_batch(SHAPE, 0)
    if rendezvous.rank == rendezvous.world_size - 1:
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


def no_engine(batch):
    batch.engine_logprobs = None


def nothing_to_compare_with(batch):
    batch.old_logprobs = batch.engine_logprobs = None


def too_long(batch):
    return TrainBatch(
        np.zeros(999, np.int32), np.array([9]), np.array([990]), np.zeros(1, np.float32), np.ones(990, bool),
        engine_logprobs=np.zeros(990, np.float32),
    )  # fmt: skip


def infinite_in_masked_token(batch):
    batch.old_logprobs[~batch.loss_mask] = -np.inf


BAD_IN = some(["pp2", "dp2", "cp2"], "pp2", "cp2")
SPOILED = {
    nan_old: "old_logprobs is nan at response token",
    nan_advantage: "sample 2: its advantage is nan",
    short_mask: "loss_mask has",
    empty: "the mini-batch is empty",
    foreign_token: "token id 101 is outside the vocabulary of 101",
    no_reference: "has no ref_logprobs",
    no_engine: "has no engine_logprobs",
    nothing_to_compare_with: "neither old_logprobs nor engine_logprobs",
    too_long: "more than policy.micro_batch_tokens",
}
bad = {layout: in_layout(layout, bad_updates, layout, list(SPOILED)) for layout in BAD_IN}


@pytest.mark.parametrize("layout", BAD_IN)
@pytest.mark.parametrize("spoil", SPOILED)
def test_bad_input_on_one_rank_is_one_clear_error_on_all(layout, spoil):
    errors = [per_rank[list(SPOILED).index(spoil)] for per_rank in bad[layout].results()]
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 1 failed while checking a mini-batch")
    assert SPOILED[spoil] in errors[0]


harmless = in_layout("single", bad_updates, "single", [infinite_in_masked_token])


def test_masked_tokens_may_hold_anything():
    assert harmless.results() == [["no error"]]


def scores_with_and_without(rendezvous):
    policy, batch = make_policy(rendezvous, "single"), awkward_batch(SHAPE, 0)
    with_them = policy.log_probs(batch)
    nothing_to_compare_with(batch)
    return with_them, policy.log_probs(batch)


scored_twice = in_layout("single", scores_with_and_without)


def test_scoring_needs_no_log_probs():
    ((logprobs, entropy), (again, entropy_again)) = scored_twice.results()[0]
    assert np.array_equal(logprobs, again) and np.array_equal(entropy, entropy_again) and (logprobs < 0).any()


def poisoned_update(rendezvous, layout):
    policy = make_policy(rendezvous, layout)
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


POISONED_IN = some(["single", "pp2", "tp2"], "pp2", "tp2")
poisoned = {layout: in_layout(layout, poisoned_update, layout) for layout in POISONED_IN}


@pytest.mark.parametrize("layout", POISONED_IN)
def test_nan_from_the_model_stops_every_rank_before_the_step(layout):
    for message, changed, updates in poisoned[layout].results():
        assert "active tokens have a NaN" in message
        assert "no weight has changed" in message
        assert not changed
        assert updates == 0


def exploding_update(rendezvous):
    policy = make_policy(rendezvous)
    batch = awkward_batch(SHAPE, 0)
    batch.advantages[:] = 3e38
    try:
        policy.update(batch)
    except NonFiniteError as error:
        return str(error)
    return "no error"


exploded = in_layout("single", exploding_update)


def test_an_infinite_gradient_is_not_stepped():
    assert "no weight has changed" in exploded.results()[0]


# ---- precision, recompute, optimizer ----


def several_updates(rendezvous, layout, changes, count=3):
    policy = make_policy(rendezvous, layout, **changes)
    metrics = [policy.update(awkward_batch(SHAPE, seed)) for seed in range(count)]
    return metrics, weights_of(policy)


plain = in_layout("single", several_updates, "single", {})
RECOMPUTE = ["selective", "full"]
recomputed = {kind: in_layout("single", several_updates, "single", {"policy__recompute": kind}) for kind in RECOMPUTE}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recompute_changes_nothing(recompute):
    for a, b in zip(plain.results()[0][0], recomputed[recompute].results()[0][0], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


BF16_IN = some(["single", "tp2sp", "dp2do"], "tp2sp", "dp2do")
in_bf16 = {layout: in_layout(layout, several_updates, layout, {"policy__precision": "bf16"}) for layout in BF16_IN}


@pytest.mark.parametrize("layout", BF16_IN)
def test_bf16_keeps_fp32_gradients_and_main_weights(layout):
    exact = plain.results()[0][0]
    metrics, weights = in_bf16[layout].results()[0]
    for a, b in zip(exact, metrics, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=0.03)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.05)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


def dtypes(rendezvous):
    policy = make_policy(rendezvous, "single", policy__precision="bf16")
    parameter = next(policy.model[0].parameters())
    return parameter.dtype, parameter.main_grad.dtype, policy.optimizer.param_groups[0]["params"][0].dtype


found_dtypes = in_layout("single", dtypes)


def test_bf16_dtypes():
    assert found_dtypes.results()[0] == (torch.bfloat16, torch.float32, torch.float32)


def decayed(rendezvous):
    """A huge weight decay and no learning signal: only matrices may shrink."""
    changes = {"policy__optimizer": {"weight_decay": 100.0, "lr": 1e-3}, "algorithm__entropy_coefficient": 0.0}
    policy = make_policy(rendezvous, **changes)
    before = weights_of(policy)
    batch = awkward_batch(SHAPE, 0)
    batch.advantages[:] = 0
    batch.ref_logprobs[:] = policy.log_probs(batch)[0]
    policy.update(batch)
    after = weights_of(policy)
    return {n: float(after[n].norm() / before[n].norm()) for n in before}


shrunk = in_layout("single", decayed)


def test_weight_decay_spares_norms_and_biases():
    for name, shrink in shrunk.results()[0].items():
        if "norm" in name or name.endswith("bias"):
            assert shrink == pytest.approx(1.0, abs=0.02), name
        else:
            assert shrink == pytest.approx(0.9, abs=0.02), name


def clipped(rendezvous, clip):
    policy = make_policy(rendezvous, policy__optimizer={"grad_clip": clip})
    metrics = policy.update(awkward_batch(SHAPE, 0))
    moments = [state["exp_avg"].norm() for _, state in policy.optimizer.state.items()]
    return metrics["grad_norm"], float(torch.stack(moments).norm())


with_clipping, without_clipping = in_layout("single", clipped, 0.01), in_layout("single", clipped, 0.0)


def test_gradient_clipping_bounds_what_adam_sees():
    # Adam's first moment after one step is (1 − β1) · clipped gradient
    norm, moment = with_clipping.results()[0]
    assert norm > 0.05
    assert moment == pytest.approx(0.1 * 0.01, rel=1e-3)
    norm, moment = without_clipping.results()[0]
    assert moment == pytest.approx(0.1 * norm, rel=1e-3)


def score_then_update(rendezvous):
    policy = make_policy(rendezvous)
    batch = awkward_batch(SHAPE, 0)
    logprobs, _ = policy.log_probs(batch)
    batch.old_logprobs = logprobs
    return policy.update(batch)


on_policy = in_layout("single", score_then_update)


def test_recomputed_log_probs_give_a_ratio_of_one():
    metrics = on_policy.results()[0]
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


def fail_on_one(rendezvous):
    if rendezvous.rank == 1:
        raise ValueError("the reason")
    time.sleep(60)


def test_a_failing_rank_ends_the_others_with_its_reason():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: .*the reason"):
        run_ranks(2, fail_on_one, grace=0.5)


def test_a_hanging_rank_is_ended_at_the_timeout():
    with pytest.raises(RankError, match="did not finish within 1 s"):
        run_ranks(1, fail_on_one, timeout=1)
