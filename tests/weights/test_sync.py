"""The trainer's side of weight sync: from any layout, the buckets on rank 0 are exactly the HF tensors."""

import pytest
import torch

from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import random_hf_weights, synthetic_shape
from megatron_dapo.sync import gather
from megatron_dapo.weights.tensor_spec import flat_size


def synced(place, layout, model, bucket_bytes, rounds):
    config = selfcheck_config(LayoutSpec.parse(layout))
    runtime = initialize(config.policy, rendezvous=place)
    policy = Policy(config, synthetic_shape(model), runtime)
    weights = policy.weight_buckets(bucket_bytes)
    found = []
    for seed in range(rounds):
        policy.load_hf(random_hf_weights(policy.shape, seed))
        found.append([[(name, tensor.clone()) for name, tensor in bucket] for bucket in weights.buckets()])
    return found, sum(flat_size(plan.specs) for plan in weights.plans)


@pytest.mark.parametrize(
    ("layout", "model"),
    [("single", "dense"), ("tp2sp", "dense"), ("pp2", "tied"), ("pp2vpp2", "tied"), ("dp2do", "tied"),
     ("tp2pp2", "dense"), ("ep2", "moe"), ("ep2tp2sp", "moe-shared"), ("cp2", "dense"), ("tp2sp", "hybrid")],
)  # fmt: skip
def test_buckets_are_the_hf_tensors_bit_for_bit(layout, model):
    limit = 20_000
    results = run_ranks(LayoutSpec.parse(layout).world_size, synced, layout, model, limit, 2)
    rounds, total = results[0]
    for seed, buckets in enumerate(rounds):
        expected = random_hf_weights(synthetic_shape(model), seed)
        names = [name for bucket in buckets for name, _ in bucket]
        assert sorted(names) == sorted(expected)  # each once
        for bucket in buckets:
            for name, tensor in bucket:
                assert torch.equal(tensor, expected[name]), name
        sizes = [sum(t.nbytes for _, t in bucket) for bucket in buckets]
        assert len(buckets) > 3
        assert all(
            size <= limit or len({n.rsplit(".", 2)[0] for n, _ in b}) == 1
            for size, b in zip(sizes, buckets, strict=True)
        )
        assert sum(sizes) == total
    for rounds, _ in results[1:]:
        assert all(bucket == [] for buckets in rounds for bucket in buckets)


def tensors_exchanged(place, layout, model):
    """What this rank sends and receives in one update."""
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=place))
    weights, exchange, found = policy.weight_buckets(), gather.dist.batch_isend_irecv, []
    gather.dist.batch_isend_irecv = lambda operations: found.extend(operations) or exchange(operations)
    list(weights.buckets())
    return len(found)


def test_tensors_that_are_not_split_stay_on_their_rank():
    """Split in each of four layers: QKV's weight and bias, projection, both of the MLP; then embedding and output.
    Not split: nine norms."""
    assert run_ranks(2, tensors_exchanged, "tp2", "dense") == [4 * 5 + 2] * 2


def test_a_shard_that_no_rank_holds_is_an_error(monkeypatch):
    with pytest.raises(Exception, match="cannot be assembled"):
        run_ranks(1, without_one_parameter)


def without_one_parameter(place):
    config = selfcheck_config(LayoutSpec.parse("single"))
    policy = Policy(config, synthetic_shape("dense"), initialize(config.policy, rendezvous=place))
    real = gather.live_mappings
    gather.live_mappings = lambda *args: list(real(*args))[:-1]
    policy.weight_buckets()


def owned(rendezvous, layout, model, senders):
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=rendezvous))
    weights = policy.weight_buckets(20_000, senders=senders)
    found = []
    for seed in range(2):
        policy.load_hf(random_hf_weights(policy.shape, seed))
        found.append({name: tensor.clone() for bucket in weights.buckets() for name, tensor in bucket})
    return found, [(plan.owner, [spec.name for spec in plan.specs]) for plan in weights.plans]


@pytest.mark.parametrize(
    ("layout", "model", "senders", "owners"), [("pp2", "tied", "stage", {0, 1}), ("ep2", "moe", "expert_group", {0, 1})]
)
def test_several_senders_own_every_tensor_once(layout, model, senders, owners):
    """Bit for bit, in the newest version, and all ranks agree on the order of the buckets."""
    ranks = run_ranks(2, owned, layout, model, senders)
    assert ranks[0][1] == ranks[1][1] and {owner for owner, _ in ranks[0][1]} == owners
    for seed in range(2):
        expected = random_hf_weights(synthetic_shape(model), seed)
        for rank, (found, plans) in enumerate(ranks):
            assert set(found[seed]) == {name for owner, names in plans if owner == rank for name in names}
        assert sum(len(found[seed]) for found, _ in ranks) == len(expected)
        for found, _ in ranks:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found[seed].items())
