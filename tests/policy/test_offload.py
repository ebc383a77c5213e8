"""Offloading and onloading: tensors have their contents again, and updates are the same as without."""

import pytest
import torch
from long_lists import some

from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Offloader, Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape

CPU = torch.device("cpu")


def test_onload_restores_views():
    whole = torch.arange(12.0)
    view, offloader = whole[3:7], Offloader(CPU)
    assert offloader.offload([view, whole]) == 48
    assert whole.untyped_storage().nbytes() == 0
    assert offloader.offload([whole]) == 0  # offloaded already
    assert offloader.onload() == 48
    assert view.tolist() == [3, 4, 5, 6] and whole.sum() == 66
    view += 1
    assert whole[3] == 4
    assert offloader.onload() == 0


def test_each_onload_restores_the_latest_values():
    tensor, offloader = torch.zeros(5), Offloader(CPU)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        offloader.offload([tensor])
        offloader.onload()
        assert tensor.tolist() == [value] * 5


def test_without_keep_only_the_size_is_restored():
    tensor, offloader = torch.ones(5), Offloader(CPU)
    assert offloader.offload([tensor], keep=False) == 20
    assert offloader.onload() == 20
    assert tensor.zero_().sum() == 0 and tensor.numel() == 5


def without_and_with(rendezvous, layout, kind, precision):
    config = selfcheck_config(LayoutSpec.parse(layout), policy={"precision": precision})
    runtime = initialize(config.policy, rendezvous=rendezvous)
    return [updates(Policy(config, synthetic_shape(kind), runtime), offload) for offload in (False, True)]


def updates(policy, offload):
    policy.load_hf(random_hf_weights(policy.shape))
    metrics = []
    for seed in range(2):
        if offload:
            freed = policy.offload_training_state()
            weights = [p.untyped_storage().nbytes() for p in policy._parameters()]
            assert freed > 0 and all(weights)
            assert policy.offload_weights() > 0
            assert not any(p.untyped_storage().nbytes() for p in policy._parameters())
            assert policy.onload() > freed
        metrics.append(
            {n: v for n, v in policy.update(awkward_batch(policy.shape, seed)).items() if "seconds" not in n}
        )
    return metrics, [p.detach().clone() for p in policy._parameters()]


@pytest.mark.parametrize(
    ("layout", "kind", "precision"),
    some([("single", "dense", "bf16"), ("dp2do", "dense", "bf16"), ("tp2", "dense", "bf16"), ("ep2", "moe", "fp32")],
         ("dp2do", "dense", "bf16"), ("ep2", "moe", "fp32")),
)  # fmt: skip
def test_updates_are_the_same_with_and_without_offloading(layout, kind, precision):
    ranks = LayoutSpec.parse(layout).world_size
    for (metrics, weights), (other_metrics, other_weights) in run_ranks(
        ranks, without_and_with, layout, kind, precision
    ):
        assert metrics == other_metrics
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
