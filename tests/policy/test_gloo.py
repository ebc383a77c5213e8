"""All gloo groups of a process share a device; torch still recognises them, and a forked rank has its own."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.policy.megatron import patches
from megatron_dapo.processes.fork_ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the groups are NCCL's")
GROUPS = 8


def threads():
    return len(os.listdir("/proc/self/task"))


def sums_and_threads(rendezvous):
    patches.share_devices()
    patches.share_devices()
    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=2)
    before, groups = threads(), [dist.new_group([0, 1]) for _ in range(GROUPS)]
    sums = []
    for group in groups:
        value = torch.tensor([rendezvous.rank + 1.0])
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums, threads() - before, [dist.get_backend(group) for group in groups], len(patches._devices)


def test_groups_share_one_device():
    for sums, added, backends, devices in run_ranks(2, sums_and_threads):
        assert sums == [3.0] * GROUPS and backends == ["gloo"] * GROUPS and devices == 1
        assert added == 2 * GROUPS, "two threads for the work of each group, none for its sockets"


def test_a_device_belongs_to_one_process_and_one_choice_of_interfaces(monkeypatch):
    class Original:
        create_device, create_default_device = staticmethod(lambda interface: interface), staticmethod(object)

    monkeypatch.setattr(patches, "_devices", {})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert patches._devices_of_this_process(Original) == ["lo", "eth0"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    first = patches._devices_of_this_process(Original)
    assert patches._devices_of_this_process(Original) is first
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert patches._devices_of_this_process(Original) is not first
