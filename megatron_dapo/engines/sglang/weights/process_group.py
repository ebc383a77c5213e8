"""The process group over which this process broadcasts weights to the ranks of SGLang servers.

It is separate from the trainer's own groups. Every step has a timeout, and an error that a server reports over HTTP
ends the wait for a collective that the server will never join. Members are identified by URL and incarnation: a
restarted server has the same URL but is in no group.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.http import wait_all

_serial = count()


def members_of(servers: Sequence[SGLangClient]) -> list[tuple[str, int]]:
    return [(server.name, server.incarnation) for server in servers]


class WeightProcessGroup:
    def __init__(self, config: WeightTransportConfig, servers: Sequence[SGLangClient]) -> None:
        self._config, self._servers = config, list(servers)
        self.members = members_of(servers)
        self.name = f"megatron-dapo-weights-{next(_serial)}"
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        self._device = "cuda" if config.backend == "nccl" else "cpu"

    async def join(self) -> None:
        """Joins all ranks of all servers and this process, which is rank 0."""
        port = _free_port(self._config.master_address)
        world = 1 + sum(server.tensor_parallel for server in self._servers)
        calls, offset = {}, 1
        for server in self._servers:
            body = {
                "master_address": self._config.master_address, "master_port": port, "rank_offset": offset,
                "world_size": world, "group_name": self.name, "backend": self._config.backend,
            }  # fmt: skip
            calls[server.name] = server.join_group(body, self._config.timeout)
            offset += server.tensor_parallel
        await self._both_sides("joining the weight process group", calls, lambda: self._create(port, world))

    async def broadcast(self, bucket: Bucket, body: dict[str, Any], label: str) -> None:
        """`label`: the servers' version label once they have the bucket."""
        calls = {s.name: s.receive_broadcast(body, label, self._config.timeout) for s in self._servers}
        await self._both_sides("broadcasting weights", calls, lambda: self._send(bucket))

    async def leave(self) -> None:
        """Best effort: a server that is down cannot leave."""
        # A server that restarted was never in this group, and one that left is not asked again.
        still = [s for s, member in zip(self._servers, self.members, strict=True) if (s.name, s.incarnation) == member]
        await wait_all({server.name: server.leave_group(self.name) for server in still})
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
        self._thread.shutdown(wait=False)

    async def _both_sides(self, doing: str, calls: Mapping[str, Awaitable[None]], ours: Callable[[], None]) -> None:
        """Runs our side in a thread and the servers' over HTTP; the first failure of either ends the wait."""
        mine = asyncio.get_running_loop().run_in_executor(self._thread, ours)
        tasks: dict[asyncio.Future[None], str] = {asyncio.ensure_future(call): name for name, call in calls.items()}
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

    def _create(self, port: int, world: int) -> None:
        timeout = timedelta(seconds=self._config.timeout)
        address = f"tcp://{self._config.master_address}:{port}"
        store, rank, size = next(dist.rendezvous(address, 0, world, timeout=timeout))
        store.set_timeout(timeout)
        # Servers create their side with the same helper; torch has no public call that leaves the default group alone.
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
