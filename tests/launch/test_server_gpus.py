"""Where `megatron-dapo train` puts the servers that it starts on a machine with GPUs."""

import pytest

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.engines.sglang.server_process import sglang_command
from megatron_dapo.launch import local


def placed(monkeypatch, gpus, ranks=None, policy=None, **servers):
    """Ranks of the trainer, and the first GPU of each server."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    rollout = {"engine": "sglang", "servers": servers}
    config = parse_config({"rollout": rollout, "trainer": {"ranks": ranks}, "policy": policy or {}})
    ranks = local.local_ranks(config)
    local.place_servers(config, ranks)
    commands = [sglang_command("model", config.rollout.servers, i, 1)[0] for i in range(config.rollout.servers.count)]
    return ranks, [int(found[found.index("--base-gpu-id") + 1]) for found in commands]


def test_servers_of_their_own_gpus_come_after_the_trainers(monkeypatch):
    assert placed(monkeypatch, 8, ranks=4, count=2, tensor_parallel=2) == (4, [4, 6])
    assert placed(monkeypatch, 8, count=2) == (6, [6, 7])
    assert placed(monkeypatch, 8, count=2, policy={"tensor_parallel": 4}) == (4, [4, 5])


@pytest.mark.parametrize(
    "servers",
    [
        {"share_gpus": True},
        {"arguments": ["--mem-fraction-static", "0.4"]},
        {"arguments": ["--base-gpu-id=3"]},
        {"environment": {"CUDA_VISIBLE_DEVICES": "4,5"}},
    ],
)
def test_servers_that_share_or_are_placed_by_hand_leave_all_gpus_to_the_trainer(monkeypatch, servers):
    assert placed(monkeypatch, 8, count=2, **servers) == (8, [0, 1])


def test_a_layout_that_does_not_fit_the_gpus_is_left_to_the_check_of_the_layout(monkeypatch):
    shared = {"share_gpus": True, "policy": {"tensor_parallel": 8}}
    assert placed(monkeypatch, 4, **shared)[0] == 4 and placed(monkeypatch, 12, **shared)[0] == 12


@pytest.mark.parametrize(("gpus", "ranks"), [(1, None), (8, 7)])
def test_too_few_gpus_are_refused(monkeypatch, gpus, ranks):
    with pytest.raises(ConfigError, match=f"this machine has {gpus}: set rollout.servers.share_gpus to true"):
        placed(monkeypatch, gpus, ranks, count=2)


def test_without_a_gpu_nothing_is_placed(monkeypatch):
    assert placed(monkeypatch, 0, count=2) == (1, [0, 1])
    assert placed(monkeypatch, 1, urls=["http://127.0.0.1:30000"]) == (1, [0])
