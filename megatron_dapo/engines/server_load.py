"""The load of the servers during a rollout: KV cache in use, waiting requests. SGLang reports both (`/v1/loads`). And
how they differ in speed, as the load balancer has measured.

The servers are asked every few seconds. A server that does not answer is left out: this is only for display.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_dapo.engines.protocol import Engine
from megatron_dapo.errors import EngineError

EVERY = 5.0  # seconds between two readings
PATH = "/v1/loads?include=core"
SLOW = 0.7  # of the median speed: a slower server is named


@dataclass(slots=True)
class LoadReadings:
    kv_use: list[float] = field(default_factory=list)  # share of the KV cache, mean over the servers
    queue: list[float] = field(default_factory=list)  # waiting requests of all servers
    speeds: dict[str, float] = field(default_factory=dict)  # of each server at the end, in shares of the median

    def metrics(self) -> dict[str, float]:
        """Empty if the engine reports no load, or the rollout was too short to ask."""
        found: dict[str, float] = {}
        if self.kv_use:
            found |= {
                "rollout/kv_use": fmean(self.kv_use), "rollout/kv_use_max": max(self.kv_use),
                "rollout/queue": fmean(self.queue), "rollout/queue_max": max(self.queue),
            }  # fmt: skip
        if self.speeds:
            shares = self.speeds.values()
            found |= {
                "rollout/servers": len(shares), "rollout/servers_slow": sum(share < SLOW for share in shares),
                "rollout/servers_slowest": min(shares),
            }  # fmt: skip
        return found


@asynccontextmanager
async def watch_load(engine: Engine, every: float = EVERY) -> AsyncIterator[LoadReadings]:
    """Reads the engine's load while the body runs."""
    readings = LoadReadings()
    servers = getattr(engine, "servers", [])  # the embedded engine has none
    task = asyncio.ensure_future(_watch(servers, readings, every)) if servers else None
    try:
        yield readings
    finally:
        if hasattr(engine, "speeds"):
            readings.speeds = engine.speeds()
        if task is not None:
            task.cancel()  # not awaited: that could take a cancellation of the caller for the task's own


async def _watch(servers: list[Any], readings: LoadReadings, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        replies = await asyncio.gather(*(_read(server) for server in servers))
        ranks = [rank for reply in replies for rank in reply]
        if ranks:
            readings.kv_use.append(fmean(usage for usage, _ in ranks))
            readings.queue.append(sum(waiting for _, waiting in ranks))


async def _read(server: Any) -> list[tuple[float, float]]:
    """(KV cache in use, waiting requests) of each data-parallel rank of a server; empty if it does not say."""
    try:
        reply = await server.connection.get(PATH, wait_for_server=False)
        return [(float(rank["token_usage"]), float(rank["num_waiting_reqs"])) for rank in reply["loads"]]
    except (EngineError, KeyError, TypeError, ValueError):
        return []
