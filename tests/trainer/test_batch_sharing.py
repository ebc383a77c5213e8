"""The batch of a step: every rank gets what it trains on, receives little else, and computes the same numbers."""

import signal

import numpy as np
import pytest
from forked import at_point, records, run, run_in_ranks, send_signal
from tiny_run import raw_config

from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.schedule import shares_of_ranks
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_experts, random_hf_weights, synthetic_shape
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.signals import StopSignal
from megatron_dapo.trainer.train_step import share_batch

SHAPE = synthetic_shape("dense")
LOG_PROBS = ("old_logprobs", "engine_logprobs", "ref_logprobs")


def collectives(runtime):
    with StopSignal() as stop:
        return Collectives(runtime, stop)


def whole_batch():
    batch = awkward_batch(SHAPE, 0)
    batch.routed_experts = random_experts(synthetic_shape("moe"), batch, seed=0)
    batch.routed_experts[1] = None
    batch.routed_experts[5] = batch.routed_experts[5].astype(np.uint16)
    half = batch.samples // 2
    return batch, [list(range(half)), list(range(half, batch.samples))]


def shared(rendezvous, layout):
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(SHAPE))
    (expected, mini), sharing = whole_batch(), collectives(policy.runtime)
    own = (expected, mini) if rendezvous.rank == 0 else (None, None)
    found, indices = share_batch(sharing, *own, policy.step.shares)
    assert indices == mini
    for name in ("prompt_lengths", "response_lengths", "advantages", "loss_mask"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
    mine = policy.step.shares(expected.lengths, mini)[policy.runtime.groups.dp.rank()]
    others = sorted(set(range(expected.samples)) - set(mine))
    for name in ("tokens", *LOG_PROBS):
        if getattr(expected, name) is None:
            assert getattr(found, name) is None
            continue
        assert np.array_equal(getattr(found.select(mine), name), getattr(expected.select(mine), name)), name
        if rendezvous.rank != 0:
            assert not getattr(found.select(others), name).any()
    for sample, experts in enumerate(expected.routed_experts):
        if sample in mine and experts is not None:
            assert np.array_equal(found.routed_experts[sample], experts)
        elif rendezvous.rank != 0:
            assert found.routed_experts[sample] is None
    scores = policy.log_probs(found, mini)[0], policy.log_probs(expected, mini)[0]
    assert scores[0].tobytes() == scores[1].tobytes()
    metrics = [policy.gradients(batch.select(mini[0])) for batch in (found, expected)]
    assert metrics[0] == metrics[1]
    return sharing.received_bytes, sum(len(part) for part in (mine, others)), len(mine) / expected.samples


@pytest.mark.parametrize(("layout", "ranks"), [("dp2", 2), ("tp2", 4), ("pp2", 4), ("cp2", 4), ("single", 3)])
def test_every_rank_gets_its_samples_and_computes_the_same(layout, ranks):
    """`ranks` divided by the layout is the number of data-parallel ranks."""
    found = run_ranks(ranks, shared, layout)
    assert found[0][0] == 0  # rank 0 has the batch
    assert all(samples == found[0][1] for _, samples, _ in found)


def receive(rendezvous, everything):
    """Bytes that this rank receives of a batch with long responses."""
    config = selfcheck_config(LayoutSpec.parse("single"))
    runtime = initialize(config.policy, rendezvous=rendezvous)
    sharing, (batch, mini) = collectives(runtime), whole_batch()
    batch = type(batch).from_samples(long_samples(), np.zeros(64, np.float32), np.ones(64, bool))
    mini = [list(range(32)), list(range(32, 64))]
    own = (batch, mini) if rendezvous.rank == 0 else (None, None)

    def shares(lengths, mini_batches):
        if everything:
            return [list(range(len(lengths)))] * rendezvous.world_size
        return shares_of_ranks(lengths, rendezvous.world_size, mini_batches)

    share_batch(sharing, *own, shares)
    return sharing.received_bytes


def long_samples():
    from megatron_dapo.types import FinishReason, Sample, as_logprobs, as_tokens

    lengths = np.random.default_rng(0).integers(200, 4000, size=64)
    return [
        Sample(f"p{i}", 0, as_tokens(range(50)), as_tokens(range(n)), as_logprobs([-1.0] * n), FinishReason.STOP)
        for i, n in enumerate(lengths)
    ]


def test_a_rank_receives_its_share_and_not_the_whole_batch():
    whole, scattered = (max(run_ranks(4, receive, everything)[1:]) for everything in (True, False))
    assert scattered < 0.3 * whole  # a quarter, and the masks and lengths
    tokens = sum(50 + sample.length for sample in long_samples())
    assert whole > 4 * tokens


# ---- whole runs ----


def test_a_run_on_two_data_parallel_ranks_is_that_of_one(tmp_path):
    """Also when it begins in the middle of a step that one rank has saved. The gate compares the log-probs."""
    folders = [tmp_path / name for name in ("one", "two", "resumed")]
    configs = [raw_config(tmp_path / "model", folder, trainer__steps=2) for folder in folders]
    assert run(configs[0]) == 0
    assert run_in_ranks(configs[1]) == [0, 0]
    assert run(configs[2], at_point("loop/before_update", 1, send_signal(signal.SIGTERM))) == 75
    assert (folders[2] / "checkpoints" / "step_0+1").is_dir()
    assert run_in_ranks(configs[2]) == [0, 0]
    assert "trainer and engine agree: mean |gap|" in (folders[1] / "logs" / "trainer.log").read_text()
    expected = records(folders[0])
    for found in (records(folders[1]), records(folders[2])):
        assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
        for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
            for name in ("reward/mean", "rollout/length_mean", "train/tokens"):
                assert ours[name] == theirs[name]
            for name in ("train/loss", "train/grad_norm", "train/mismatch_mean"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
