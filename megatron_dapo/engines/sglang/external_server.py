"""A server that somebody else runs (another Slurm step, another team): waited for and watched, never started or ended.

It has the face of a `ServerProcess`, so the fleet treats it alike: one that is gone gets no requests, and when it
answers again it is given the current weights before it serves. Our Slurm script leaves two files where the trainer
writes its logs: `engine_HOST_PORT.log`, and `engine_HOST_PORT.given_up` when it will not start the server again.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.server_process import end_of


class GivenServer:
    def __init__(self, url: str, config: ServerConfig, log_dir: Path) -> None:
        self.url, self._config = url, config
        where = urlsplit(url)
        self._log = log_dir / f"engine_{where.hostname}_{where.port}.log"
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
        return end_of(self._log) if self._log.exists() else "its log is with whoever started it"

    async def wait_ready(self, server: SGLangServer) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            try:
                await server.connection.call("GET", "/health", None, timeout=60)
                return
            except EngineError as error:
                if self._log.with_suffix(".given_up").exists():
                    raise EngineError(f"server {self.url} will not be started again; {self.log_tail()}") from error
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"server {self.url} was not ready after {self._config.start_timeout:g} s "
                        f"(rollout.servers.start_timeout); the last: {error}; {self.log_tail()}"
                    ) from error
            await asyncio.sleep(0.5)
