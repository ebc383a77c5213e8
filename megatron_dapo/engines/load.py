"""Opens an engine, and watches it during a rollout: the times of its requests, the KV cache in use, requests that wait.

SGLang reports its load (`/v1/loads`). The servers are asked every few seconds. A server that does not answer is left
out: this is only for display.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, Engine, SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.types import Tokens

EVERY = 5.0  # seconds between two readings
PATH = "/v1/loads?include=core"


@dataclass(slots=True)
class LoadReadings:
    kv_use: list[float] = field(default_factory=list)  # share of the KV cache, mean over the servers
    queue: list[float] = field(default_factory=list)  # waiting requests of all servers

    def metrics(self) -> dict[str, float]:
        """Empty if the engine reports no load, or the rollout was too short to ask."""
        if not self.kv_use:
            return {}
        return {
            "rollout/kv_use": fmean(self.kv_use), "rollout/kv_use_max": max(self.kv_use),
            "rollout/queue": fmean(self.queue), "rollout/queue_max": max(self.queue),
        }  # fmt: skip


@asynccontextmanager
async def watched_load(engine: Engine, every: float = EVERY) -> AsyncIterator[LoadReadings]:
    """Reads the engine's load while the body runs."""
    readings = LoadReadings()
    servers = getattr(engine, "servers", [])  # the embedded engine has none
    task = asyncio.ensure_future(_watch(servers, readings, every)) if servers else None
    try:
        yield readings
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


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


# server, request id, start (time.monotonic()), tokens
OnRequest = Callable[[str, str, float, int], None]


class _TimedEngine:
    """Reports when each request ran and on which server, for the timeline of a step."""

    def __init__(self, engine: Engine, on_request: OnRequest) -> None:
        self._engine = engine
        self._on_request = on_request

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        started = time.monotonic()
        completion = await self._engine.generate(request_id, prompt, params)
        self._on_request(completion.server, request_id, started, len(completion.tokens))
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def timed(engine: Engine, on_request: OnRequest | None) -> Engine:
    """The engine, with every finished request reported. Requests that fail are not."""
    return engine if on_request is None else cast(Engine, _TimedEngine(engine, on_request))


async def open_engine(config: RolloutConfig, model: str, log_dir: str | Path) -> Engine:
    """The engine that the configuration names, ready to serve; `engine.close()` ends everything it started. `model`:
    the HF directory. `log_dir`: for the logs of servers that are started."""
    if config.engine == "embedded":
        from megatron_dapo.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.from_directory(model, config.embedded, pause_mode=config.weights.pause_mode)
    from megatron_dapo.engines.sglang.fleet import Fleet

    return await Fleet(config, config.servers.model or model, log_dir).start()
