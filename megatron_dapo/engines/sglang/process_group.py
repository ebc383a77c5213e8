"""The process groups over which the trainer broadcasts weights to the ranks of SGLang servers, one for each sender.

They are separate from the trainer's own groups. Every step has a timeout, and an error that a server reports over HTTP,
or a sender to rank 0, ends the wait for a collective that will never happen. Members are identified by URL and
incarnation: a restarted server has the same URL but is in no group.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.http import wait_all
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.remote_sender import POLL, GroupSource, SenderLink, host_store


def members_of(servers: Sequence[SGLangClient]) -> list[tuple[str, int]]:
    return [(server.name, server.incarnation) for server in servers]


class WeightProcessGroups:
    """All servers are in every group. Buckets are sent one at a time, whichever sender has them, so all servers see
    them in the same order and no two broadcasts wait for each other."""

    def __init__(
        self, config: WeightTransportConfig, servers: Sequence[SGLangClient], senders: Sequence[int] = (0,)
    ) -> None:
        self._config = config
        self._servers = list(servers)
        self.members = members_of(servers)
        self.senders = list(senders)
        # A server may still have the groups of a trainer that was killed, so a name is never used twice.
        serial = secrets.token_hex(6)
        self.names = {rank: f"megatron-dapo-weights-{serial}-{rank}" for rank in senders}
        self._source: GroupSource | None = None
        self._store: dist.TCPStore | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")

    async def join(self, link: SenderLink | None = None) -> None:
        """Joins all ranks of all servers and the sender, for each sender."""
        config, address = self._config, self._config.master_address
        world = 1 + sum(server.tensor_parallel for server in self._servers)
        self._store = host_store(address, config.timeout)
        port = self._store.port
        if link is not None:
            link.post_plan(
                {
                    "action": "join", "address": address, "port": port, "world": world, "backend": config.backend,
                    "timeout": config.timeout, "checksums": config.proof == "checksum",
                    "names": {str(rank): name for rank, name in self.names.items()},
                }
            )  # fmt: skip
        for rank, name in self.names.items():
            calls, offset = {}, 1
            for server in self._servers:
                body = {
                    "master_address": address, "master_port": port, "rank_offset": offset, "world_size": world,
                    "group_name": name, "backend": config.backend,
                }  # fmt: skip
                calls[server.name] = server.join_group(body, config.timeout)
                offset += server.tensor_parallel
            if rank == 0:
                self._source = GroupSource(name, config.backend, config.timeout)
                ours = partial(self._source.join, address, port, world)
            else:
                assert link is not None
                ours = partial(link.wait_joined, rank)
            await self._both_sides("joining the weight process group", calls, ours, link)

    async def broadcast(
        self, flat: Tensor | None, body: dict[str, Any], label: str, link: SenderLink | None = None
    ) -> None:
        """`flat` None: another rank sends. `label`: the servers' version label once they have the bucket."""
        calls = {s.name: s.receive_broadcast(body, label, self._config.timeout) for s in self._servers}
        ours: Callable[[], None] | None = None
        if flat is not None:
            assert self._source is not None
            ours = partial(self._source.send, flat)
        await self._both_sides("broadcasting weights", calls, ours, link)

    async def leave(self) -> None:
        """Best effort: a server that is down cannot leave."""
        # A server that restarted was never in these groups, and one that left is not asked again.
        still = [s for s, member in zip(self._servers, self.members, strict=True) if (s.name, s.incarnation) == member]
        for name in self.names.values():
            await wait_all({server.name: server.leave_group(name) for server in still})
        if self._source is not None:
            self._source.leave()
        self._source = self._store = None
        self._thread.shutdown(wait=False)

    async def _both_sides(
        self,
        doing: str,
        calls: Mapping[str, Awaitable[None]],
        ours: Callable[[], None] | None,
        link: SenderLink | None,
    ) -> None:
        """Runs our side in a thread and the servers' over HTTP; the first failure of either ends the wait."""
        mine = asyncio.get_running_loop().run_in_executor(self._thread, ours or (lambda: None))
        mine.add_done_callback(lambda future: future.cancelled() or future.exception())
        tasks: dict[asyncio.Future[None], str] = {asyncio.ensure_future(call): name for name, call in calls.items()}
        waiting, elsewhere = {*tasks, mine}, ""
        deadline = asyncio.get_running_loop().time() + self._config.timeout
        try:
            while not elsewhere:
                left = deadline - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(
                    waiting, timeout=min(left, POLL) if link else left, return_when=asyncio.FIRST_EXCEPTION
                )
                if not waiting or any(task.exception() for task in done) or left <= POLL:
                    break
                elsewhere = await asyncio.to_thread(link.error) if link else ""
        finally:  # also when this is cancelled
            for task in waiting:
                task.cancel()
        broken = [f"{tasks.get(t, 'this process')}: {t.exception()}" for t in {*tasks, mine} - waiting if t.exception()]
        if elsewhere:
            broken.append(elsewhere)
        if waiting and not broken:
            names = ", ".join(tasks.get(task, "this process") for task in waiting)
            broken = [f"waited {self._config.timeout:g} s for {names} (rollout.weights.timeout)"]
        if broken:
            raise EngineError(f"{doing} failed: {'; '.join(broken)}")
