"""One step without a model: what other ranks get, where old and reference log-probs come from, and what is saved."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_turns import groups_of_turns

from megatron_dapo.config import parse_config
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.step import UpdateRefused
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer import train_step
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.train_step import TrainStep, Updates
from megatron_dapo.types import (
    FinishReason,
    Grade,
    Group,
    Prompt,
    Sample,
    StepBatch,
    WeightSpan,
    as_logprobs,
    as_tokens,
)

TWO_PROMPTS = {"trainer": {"prompts_per_step": 2, "mini_batch_prompts": 1}}
CONFIG = parse_config(TWO_PROMPTS)


def shared(rendezvous, config):
    """What the second of two data-parallel ranks gets: samples 1, 3 and 5."""
    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=2)
    alone = [dist.new_group([rank]) for rank in range(2)][rendezvous.rank]
    groups = SimpleNamespace(dp=dist.group.WORLD, cp=alone, mp=alone)
    runtime = Runtime(torch.device("cpu"), groups, rendezvous.rank, 2)
    collectives = Collectives(runtime, SimpleNamespace(number=0))
    policy = SimpleNamespace(step=SimpleNamespace(shares=lambda lengths, mini: [[0, 2, 4], [1, 3, 5]]))
    source = StepBatch(0, groups_of_turns()) if rendezvous.rank == 0 else None
    step = TrainStep.share(source, parse_config(config), collectives, policy)
    batch = step.batch
    return batch.engine_logprobs, batch.select([1, 3, 5]).engine_logprobs, batch.tokens, batch.rollouts, batch.loss_mask


MASKS = {"off_policy": {"geometric_mask": [0.5, 2]}}
BALANCE = {"policy": {"moe_aux_loss_coefficient": 0.1}}
FUNCTION = {"rollout": {"generate": "python:module.function"}}


@pytest.mark.parametrize(
    "algorithm, more, everywhere",
    [
        (MASKS, {}, False),
        (MASKS | {"aggregation": "seq-mean-token-mean"}, {}, False),
        (MASKS | {"aggregation": "seq-mean-token-mean"}, FUNCTION, True),
        (MASKS, FUNCTION, False),
        ({"aggregation": "seq-mean-token-mean"}, FUNCTION, False),
        ({}, BALANCE, False),
        (MASKS, BALANCE, True),
        (MASKS | {"positive_coefficient": 0.1}, {}, True),
        ({"off_policy": {"importance_weight": "token", "normalize_weights": True}}, {}, True),
    ],
)
def test_every_rank_has_all_log_probs_where_a_count_depends_on_them(algorithm, more, everywhere):
    """The load-balancing loss and the positive term need the denominator of the whole mini-batch, without the sequences
    that masks exclude; a mean over rollouts needs to know which of their samples are excluded."""
    config = TWO_PROMPTS | {"algorithm": algorithm, "policy": {"moe_aux_loss_coefficient": 0.0}} | more
    (all_logprobs, mine, tokens, rollouts, mask), found = run_ranks(2, shared, config)
    assert np.array_equal(found[1], mine)
    assert np.array_equal(found[0], all_logprobs) == everywhere
    assert not np.array_equal(found[2], tokens)  # tokens go only where they are trained
    assert rollouts.tolist() == found[3].tolist() == [0, 1, 1, 2, 3, 4]
    assert np.array_equal(found[4], mask)


def test_mini_batches_are_whole_groups_and_the_last_may_be_smaller():
    a, b = groups_of_turns()
    batch = StepBatch(0, [a, b, a])
    config = parse_config({"trainer": {"prompts_per_step": 4, "mini_batch_prompts": 2}})
    assert mini_batches(batch, config) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


class FakePolicy:
    """Scores: 1 under the policy, 2 under the reference."""

    runtime = SimpleNamespace(rank=0)

    def __init__(self, reference):
        self.needs = SimpleNamespace(reference=reference)

    def old_log_probs(self, batch, mini_batches):
        return np.full(6, 1.0)

    def reference_log_probs(self, batch, mini_batches):
        return np.full(6, 2.0)


class FakeCollectives:
    def agree(self, fact):
        return False  # the batch is from older weights

    @contextlib.contextmanager
    def on_driver(self, doing):
        yield False  # another rank: the gate compares on rank 0


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("old", ["engine", "recompute"])
def test_old_log_probs_are_recomputed_only_where_the_ratio_needs_them(old, reference, gate):
    """The gate scores the first batch as well, but with old_logprobs: engine the ratio compares with the engine's."""
    config = parse_config({"trainer": {"old_logprobs": old, "gate": {"enabled": gate}}})
    updates = Updates(config, FakePolicy(reference), FakeCollectives())
    batch = SimpleNamespace(old_logprobs=None, ref_logprobs=None)
    updates.prepare(TrainStep(batch, [[0]], source=StepBatch(0, [])), version=0)
    assert (batch.old_logprobs is not None) == (old == "recompute")
    assert (batch.ref_logprobs is not None) == reference
    assert updates.gate_passed


def test_a_resumed_step_has_its_log_probs_and_its_place(monkeypatch):
    def share(source, config, collectives, policy):
        return TrainStep(SimpleNamespace(old_logprobs=None, ref_logprobs=None, values=None), [[0], [1]], source=source)

    def collect_experts(batch, mini_batches):
        assert batch is step.batch and mini_batches == [[1]]  # the updates that are left
        return {1: np.array([[3]], np.uint8)}

    monkeypatch.setattr(train_step.TrainStep, "share", share)
    step = share(StepBatch(3, groups_of_turns()), None, None, None)
    step.batch.old_logprobs, step.batch.ref_logprobs = np.array([1.0]), np.array([2.0])
    step.updates_done, step.rollout_metrics = 1, {"reward/mean": 0.5}
    step.update_metrics.add({"loss": 3.0})
    state = step.to_state(SimpleNamespace(collect_experts=collect_experts))
    again = TrainStep.restore(state, CONFIG, None, None)
    assert (again.batch.old_logprobs, again.batch.ref_logprobs) == (1.0, 2.0)
    assert again.updates_done == 1 and not again.complete
    assert again.rollout_metrics == {"reward/mean": 0.5} and again.update_metrics.result() == {"loss": 3.0}
    assert [s.length for s in again.source.samples] == [6, 3, 2, 1, 8, 4]
    assert [s.routed_experts for s in again.source.samples] == [None, 3, None, None, None, None]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("nothing_changed", ["refused", "masked"])
def test_updates_are_first_until_one_has_changed_the_weights(nothing_changed, resumed, monkeypatch, tmp_path):
    """They measure the mismatch with the engine and are limited by it, also after a resume within the step."""

    def share(source, config, collectives, policy):
        batch = SimpleNamespace(old_logprobs=None, ref_logprobs=None, values=None, select=lambda samples: None)
        return TrainStep(batch, [[0], [1], [2], [3]], source=source)

    def update(batch, first, max_mismatch, record):
        found.append((first, max_mismatch is not None))
        if len(found) <= 2 and nothing_changed == "refused":
            raise UpdateRefused("planted")
        return {"update_skipped": float(len(found) <= 2)}

    monkeypatch.setattr(train_step.TrainStep, "share", share)
    found, step = [], share(StepBatch(3, groups_of_turns()), None, None, None)
    config = parse_config({"trainer": {"old_logprobs": "engine", "run_dir": str(tmp_path)}})
    policy = SimpleNamespace(update=update, runtime=FakePolicy.runtime, needs=SimpleNamespace(reference=False))
    policy.collect_experts = lambda batch, mini_batches: {}
    for _ in range(4):
        step = TrainStep.restore(step.to_state(policy), CONFIG, None, policy) if resumed else step
        Updates(config, policy, FakeCollectives()).make_one(step, 3)
    assert found == [(True, True)] * 3 + [(False, False)]


def test_a_step_is_sampled_by_a_version_only_if_every_token_is():
    source = StepBatch(0, groups_of_turns())
    for sample in source.samples:
        sample.weight_spans = [WeightSpan(4, 0, sample.length)]
    step = TrainStep(SimpleNamespace(), [], source=source)
    assert step.sampled_by(4) and not step.sampled_by(5)
    source.samples[-1].weight_spans = [WeightSpan(3, 0, 2), WeightSpan(4, 2, 4)]
    assert not step.sampled_by(4)


# ---- metrics of the batch, at their boundaries ----


def graded(correct, length, score=None, finish=FinishReason.STOP, parts=None):
    score = {True: 1.0, False: -1.0, None: 0.0}[correct] if score is None else score
    return Sample(
        "p", 0, as_tokens([1]), as_tokens(range(length)), as_logprobs([-1.0] * length), finish,
        grade=Grade(correct, score, parts=parts or {}),
    )  # fmt: skip


def metrics_of(*groups, **algorithm):
    found = [Group(Prompt(str(i), "", as_tokens([1])), list(group)) for i, group in enumerate(groups)]
    for group in found:
        for index, sample in enumerate(group.samples):
            sample.index = index
    return shape_batch(StepBatch(0, found), parse_config({"algorithm": algorithm}))[1]


def test_a_group_without_any_advantage_has_no_signal():
    """An advantage of 1e-7 is rounding, one of 0.1 is not; a masked one is no signal either."""
    overlong = {"filter": True}
    tiny = (graded(True, 1, 1.0), graded(False, 1, 1.0 + 1e-13))
    masked = (graded(True, 1, finish=FinishReason.LENGTH), graded(False, 1, finish=FinishReason.LENGTH))
    found = metrics_of((graded(True, 1), graded(False, 1)), tiny, masked, overlong=overlong)
    assert found["reward/zero_advantage_share"] == pytest.approx(2 / 3)


def test_shares_and_means_of_wrong_and_truncated_responses():
    pair = graded(True, 2), graded(False, 8, finish=FinishReason.LENGTH)
    found = metrics_of(pair, (graded(True, 3), graded(None, 5), graded(False, 4)))
    assert found["reward/truncated_advantage_share"] == pytest.approx(1 / 4)  # of |Â|, not of the samples
    assert found["rollout/length_wrong"] == 6.0  # an ungraded response is not wrong
    assert found["reward/ungraded_share"] == pytest.approx(1 / 5)


def test_a_response_at_the_quartile_is_long():
    """Lengths 1, 2, 3, 4: the upper quartile is 3.25; with 1, 2, 4, 4 it is 4, and both of 4 are long."""
    for lengths, long in (((1, 2, 3, 4), [4]), ((1, 2, 4, 4), [4, 4]), ((5, 5, 5, 5), [5] * 4)):
        samples = [graded(index % 2 == 0, length) for index, length in enumerate(lengths)]
        found = metrics_of(samples, aggregation="seq-mean-token-mean")
        assert found["rollout/long_token_weight"] == pytest.approx((len(long) / sum(long)) / (4 / sum(lengths)))


def test_the_mean_of_a_grader_is_over_what_it_graded():
    samples = [graded(True, 1, parts={"a": 1.0, "b": None}), graded(False, 1, parts={"a": 0.0, "b": 0.5})]
    found = metrics_of(samples)
    assert found["reward/grader/a"] == 0.5 and found["reward/grader/b"] == 0.5
    assert found["reward/grader/b/ungraded_share"] == 0.5
