"""The process group over which this process broadcasts weights to the ranks of SGLang servers.

It stands beside the trainer's own groups and does not touch them. Every step has a timeout, and an error that a
server reports over HTTP ends the wait for the collective it will never join.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.http import wait_all

_serial = count()


class UpdateGroup:
    def __init__(self, config: WeightTransportConfig, servers: Sequence[SGLangServer]) -> None:
        self._config, self._servers = config, list(servers)
        self.members = [server.name for server in servers]
        self.name = f"megatron-dapo-weights-{next(_serial)}"
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        self._device = "cuda" if config.backend == "nccl" else "cpu"

    async def join(self) -> None:
        """All ranks of all servers and this process, which is rank 0."""
        port = _free_port(self._config.master_address)
        world = 1 + sum(server.tensor_parallel for server in self._servers)
        calls, offset = {}, 1
        for server in self._servers:
            body = {
                "master_address": self._config.master_address, "master_port": port, "rank_offset": offset,
                "world_size": world, "group_name": self.name, "backend": self._config.backend,
            }  # fmt: skip
            calls[server.name] = server.update_call("/init_weights_update_group", body, self._config.timeout)
            offset += server.tensor_parallel
        await self._together("joining the weight update group", calls, lambda: self._make(port, world))

    async def broadcast(self, bucket: Bucket, body: dict[str, Any]) -> None:
        path, timeout = "/update_weights_from_distributed", self._config.timeout
        calls = {server.name: server.update_call(path, body, timeout) for server in self._servers}
        await self._together("broadcasting weights", calls, lambda: self._send(bucket))

    async def leave(self) -> None:
        """Best effort: a server that is gone cannot leave."""
        body = {"group_name": self.name}
        calls = {s.name: s.update_call("/destroy_weights_update_group", body, 10.0) for s in self._servers}
        await wait_all(calls)
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
        self._thread.shutdown(wait=False)

    async def _together(self, doing: str, calls: dict[str, Any], ours: Any) -> None:
        """Our part in a thread, the servers' over HTTP; the first failure of either ends the wait."""
        mine = asyncio.get_running_loop().run_in_executor(self._thread, ours)
        tasks = {asyncio.ensure_future(call): name for name, call in calls.items()}
        done, pending = await asyncio.wait(
            {*tasks, mine}, timeout=self._config.timeout, return_when=asyncio.FIRST_EXCEPTION
        )
        broken = [f"{tasks.get(t, 'this process')}: {t.exception()}" for t in done if t.exception()]
        if not broken and not pending:
            return
        for task in pending:
            task.cancel()
        mine.add_done_callback(lambda future: future.cancelled() or future.exception())
        waiting = ", ".join(tasks.get(task, "this process") for task in pending)
        raise EngineError(
            f"{doing} failed: "
            + ("; ".join(broken) or f"waited {self._config.timeout:g} s for {waiting} (rollout.weights.timeout)")
        )

    def _make(self, port: int, world: int) -> None:
        timeout = timedelta(seconds=self._config.timeout)
        address = f"tcp://{self._config.master_address}:{port}"
        store, rank, size = next(dist.rendezvous(address, 0, world, timeout=timeout))
        store.set_timeout(timeout)
        # Servers build their side with the same helper; torch has no public call that leaves the default group alone.
        self._group, _ = dist.distributed_c10d._new_process_group_helper(
            size, rank, [], dist.Backend(self._config.backend), dist.PrefixStore(self.name, store),
            group_name=dist.distributed_c10d.GroupName(self.name), timeout=timeout,
        )  # fmt: skip
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def _send(self, bucket: Bucket) -> None:
        for _, tensor in bucket:
            dist.broadcast(tensor.detach().to(self._device).contiguous(), 0, group=self._group)
        if self._device == "cuda":
            torch.cuda.synchronize()


def _free_port(address: str) -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])
