"""State that leaves the device and comes back: the policy goes on as if it had never been away."""

import pytest
import torch

from megatron_dapo.config import parse_config
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.offload import Parking
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import initialize
from megatron_dapo.selfcheck import layouts as selfcheck
from megatron_dapo.selfcheck.layouts import LayoutSpec
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape

CPU = torch.device("cpu")


def test_views_are_whole_again():
    whole = torch.arange(12.0)
    view, parking = whole[3:7], Parking(CPU)
    assert parking.park([view, whole]) == 48
    assert whole.untyped_storage().nbytes() == 0
    assert parking.park([whole]) == 0  # already away
    assert parking.bring_back() == 48
    assert view.tolist() == [3, 4, 5, 6] and whole.sum() == 66
    view += 1
    assert whole[3] == 4
    assert parking.bring_back() == 0


def test_the_second_time_brings_back_the_new_values():
    tensor, parking = torch.zeros(5), Parking(CPU)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        parking.park([tensor])
        parking.bring_back()
        assert tensor.tolist() == [value] * 5


def test_what_need_not_be_kept_has_its_size_again():
    tensor, parking = torch.ones(5), Parking(CPU)
    assert parking.park([tensor], keep=False) == 20
    assert parking.bring_back() == 20
    assert tensor.zero_().sum() == 0 and tensor.numel() == 5


def updates(place, layout, kind, precision, away):
    shape = synthetic_shape(kind)
    raw = selfcheck.check_config(LayoutSpec.parse(layout)).model_dump(mode="json")
    raw["policy"]["precision"] = precision
    config = parse_config(raw)
    policy = Policy(config, shape, initialize(config.policy, rendezvous=place))
    policy.load_hf(random_hf_weights(shape))
    metrics = []
    for turn in range(3):
        if away:
            away_bytes = policy.park_training_state()
            weights = [p.untyped_storage().nbytes() for p in policy._parameters()]
            assert away_bytes > 0 and all(weights)
            assert policy.park_weights() > 0
            assert not any(p.untyped_storage().nbytes() for p in policy._parameters())
            assert policy.bring_back() > away_bytes
        metrics.append({n: v for n, v in policy.update(awkward_batch(shape, turn)).items() if "seconds" not in n})
    return metrics, [p.detach().clone() for p in policy._parameters()]


@pytest.mark.parametrize(
    ("layout", "kind", "precision"),
    [("single", "dense", "bf16"), ("dp2do", "dense", "fp32"), ("tp2", "dense", "bf16"), ("ep2", "moe", "fp32")],
)
def test_updates_are_the_same_with_and_without_leaving(layout, kind, precision):
    ranks = LayoutSpec.parse(layout).world_size
    stayed = run_ranks(ranks, updates, layout, kind, precision, False)
    left = run_ranks(ranks, updates, layout, kind, precision, True)
    for (metrics, weights), (metrics_left, weights_left) in zip(stayed, left, strict=True):
        assert metrics == metrics_left
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_left, strict=True))
