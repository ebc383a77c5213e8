"""The source of a process group from which weights are broadcast: rank 0 of the group, the engine ranks follow.

The group is separate from the trainer's own groups. Its members meet at a store that the trainer's rank 0 hosts.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def host_store(address: str, port: int, timeout: float) -> dist.TCPStore:
    """Where the members of the groups meet. The servers connect to it by themselves."""
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, is_master=True, timeout=wait, wait_for_workers=False, multi_tenant=True)


class GroupSource:
    def __init__(self, name: str, backend: str, timeout: float) -> None:
        self.name, self._backend, self._timeout = name, backend, timedelta(seconds=timeout)
        self._device = "cuda" if backend == "nccl" else "cpu"
        self._group: Any = None

    def join(self, address: str, port: int, world: int) -> None:
        """Returns when all members have joined."""
        store = dist.TCPStore(address, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
        # Servers create their side with the same helper; torch has no public call that leaves the default group alone.
        self._group, _ = dist.distributed_c10d._new_process_group_helper(
            world, 0, [], dist.Backend(self._backend), dist.PrefixStore(self.name, store),
            group_name=dist.distributed_c10d.GroupName(self.name), timeout=self._timeout,
        )  # fmt: skip
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world)}

    def send(self, flat: Tensor) -> None:
        flat = flat.to(self._device)
        dist.broadcast(flat, 0, group=self._group)
        if self._device == "cuda":
            torch.cuda.current_stream(flat.device).synchronize()

    def leave(self) -> None:
        """Also ends a transfer that hangs, as far as the backend can."""
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):
                group.abort()
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
