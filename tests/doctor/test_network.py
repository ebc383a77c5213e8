"""Which nodes the network check calls slow. tests/launch/test_kinds_of_cluster.py runs the measurement itself."""

import itertools
import json

import pytest

from megatron_dapo.doctor.network import NodeSpeed, main, pairings, slow_nodes, table


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_every_node_has_several_partners_and_one_at_a_time(nodes):
    rounds = pairings(nodes)
    for pairs in rounds:
        members = list(itertools.chain(*pairs))
        assert len(members) == len(set(members))
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    partners = [sum(node in pair for pair in pairs) for node in range(nodes)]
    assert min(partners) >= min(nodes - 1, 3 if nodes != 3 else 2) and max(partners) <= 4


def measured(bandwidth, nodes=8, slow=()):
    """Speeds of nodes that all have this bandwidth; a pair is as fast as its slower node."""
    own = [bandwidth / 10 if node in slow else bandwidth for node in range(nodes)]
    speeds = [NodeSpeed(f"n{node}", inside=300.0) for node in range(nodes)]
    for a, b in itertools.chain(*pairings(nodes)):
        speeds[a].pairs[f"n{b}"] = speeds[b].pairs[f"n{a}"] = min(own[a], own[b])
    return speeds


@pytest.mark.parametrize("slow", [(), (0,), (7,), (2, 5)])
def test_slow_nodes_are_named_and_their_partners_are_not(slow):
    speeds = measured(40.0, slow=slow)
    assert slow_nodes(speeds, 0.5) == [f"n{node}" for node in slow]
    assert table(speeds, slow_nodes(speeds, 0.5)).count("slow") == len(slow)


def test_a_third_node_tells_which_of_two_is_slow():
    assert slow_nodes(measured(40.0, nodes=3, slow=(1,)), 0.5) == ["n1"]
    assert slow_nodes(measured(40.0, nodes=2, slow=(1,)), 0.5) == []
    assert slow_nodes(measured(40.0, nodes=2, slow=(1,)), 0.5, minimum=20.0) == ["n0", "n1"]


def test_a_minimum_finds_a_network_that_is_slow_everywhere():
    speeds = measured(1.2)
    assert slow_nodes(speeds, 0.5) == [] and len(slow_nodes(speeds, 0.5, minimum=20.0)) == 8


def test_a_node_that_is_slow_inside_is_named():
    speeds = measured(40.0)
    speeds[3].inside = 100.0
    assert slow_nodes(speeds, 0.5) == ["n3"]
    assert slow_nodes([NodeSpeed("n0", inside=200.0)], 0.5) == []


def test_a_node_has_the_name_that_slurm_gives_it(tmp_path, monkeypatch):
    """The batch script looks for it among Slurm's nodes; a host may be called n3.cluster.example.org."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0,
                        "TORCH_NCCL_BLOCKING_WAIT": 1}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert main([str(tmp_path)]) == 0
    assert [speed["node"] for speed in json.loads((tmp_path / "network.json").read_text())] == ["n3"]
