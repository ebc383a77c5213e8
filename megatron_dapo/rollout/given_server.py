"""A server that somebody else runs (another Slurm step, another team): waited for and watched, never started or ended.

It has the face of a `ServerProcess`, so the fleet treats it alike: one that is gone gets no requests, and when it
answers again it is given the current weights before it serves.
"""

from __future__ import annotations

import asyncio
import time

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.server import SGLangServer


class GivenServer:
    def __init__(self, url: str, config: ServerConfig) -> None:
        self.url, self._config = url, config
        self.port = 0
        self.restarts = 0

    def alive(self) -> bool:
        """Only its answers can tell."""
        return True

    def spawn(self, taken: set[int] | None = None) -> None:
        """Whoever started it starts it again."""

    async def end(self, patience: float = 0.0) -> None:
        """Not ours to end."""

    def log_tail(self) -> str:
        return "its log is with whoever started it"

    async def wait_ready(self, server: SGLangServer) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            try:
                await server.connection.call("GET", "/health", None, timeout=60)
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"server {self.url} was not ready after {self._config.start_timeout:g} s "
                        f"(rollout.servers.start_timeout); the last: {error}"
                    ) from error
            await asyncio.sleep(0.5)
