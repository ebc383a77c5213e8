"""One step without a model: what other ranks get, where old and reference log-probs come from, and what is saved."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_turns import groups_of_turns

from megatron_dapo.config import parse_config
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer import train_step
from megatron_dapo.trainer.advantages import mini_batches
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.train_step import TrainStep, Updates
from megatron_dapo.types import StepBatch, WeightSpan

CONFIG = parse_config({"trainer": {"prompts_per_step": 2, "mini_batch_prompts": 1}})


def shared(rendezvous, is_moe):
    """What the second of two data-parallel ranks gets: samples 1, 3 and 5."""
    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=2)
    alone = [dist.new_group([rank]) for rank in range(2)][rendezvous.rank]
    groups = SimpleNamespace(dp=dist.group.WORLD, cp=alone, mp=alone)
    runtime = Runtime(torch.device("cpu"), groups, rendezvous.rank, 2)
    collectives = Collectives(runtime, SimpleNamespace(number=0))
    policy = SimpleNamespace(
        step=SimpleNamespace(shares=lambda lengths, mini: [[0, 2, 4], [1, 3, 5]]), shape=SimpleNamespace(is_moe=is_moe)
    )
    source = StepBatch(0, groups_of_turns()) if rendezvous.rank == 0 else None
    step = TrainStep.share(source, CONFIG, collectives, policy)
    batch = step.batch
    return batch.engine_logprobs, batch.select([1, 3, 5]).engine_logprobs, batch.tokens, batch.rollouts, batch.loss_mask


@pytest.mark.parametrize("is_moe", [False, True])
def test_every_rank_of_a_model_with_experts_has_all_log_probs(is_moe):
    """The load-balancing loss needs the denominator of the whole mini-batch, and masks depend on log-probs."""
    (all_logprobs, mine, tokens, rollouts, mask), found = run_ranks(2, shared, is_moe)
    assert np.array_equal(found[1], mine)
    assert np.array_equal(found[0], all_logprobs) == is_moe
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
        return False  # the batch is from older weights: the gate does not compare


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
        return TrainStep(SimpleNamespace(old_logprobs=None, ref_logprobs=None), [[0], [1]], source=source)

    monkeypatch.setattr(train_step.TrainStep, "share", share)
    step = share(StepBatch(3, groups_of_turns()), None, None, None)
    step.batch.old_logprobs, step.batch.ref_logprobs = np.array([1.0]), np.array([2.0])
    step.updates_done, step.rollout_metrics = 1, {"reward/mean": 0.5}
    step.update_metrics.add({"loss": 3.0})
    again = TrainStep.restore(step.to_state(), CONFIG, None, None)
    assert (again.batch.old_logprobs, again.batch.ref_logprobs) == (1.0, 2.0)
    assert again.updates_done == 1 and not again.complete
    assert again.rollout_metrics == {"reward/mean": 0.5} and again.update_metrics.result() == {"loss": 3.0}
    assert [s.length for s in again.source.samples] == [6, 3, 2, 1, 8, 4]


def test_a_step_is_sampled_by_a_version_only_if_every_token_is():
    source = StepBatch(0, groups_of_turns())
    for sample in source.samples:
        sample.weight_spans = [WeightSpan(4, 0, sample.length)]
    step = TrainStep(SimpleNamespace(), [], source=source)
    assert step.sampled_by(4) and not step.sampled_by(5)
    source.samples[-1].weight_spans = [WeightSpan(3, 0, 2), WeightSpan(4, 2, 4)]
    assert not step.sampled_by(4)
