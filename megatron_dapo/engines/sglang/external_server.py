"""A server that this process did not start (another Slurm step, another team): waited for and watched, never ended.

It has the interface of `ServerProcess`, so the supervisor treats both alike: one that is down gets no requests, and
when it replies again it gets the current weights before it serves. Our Slurm script leaves two files in the trainer's
log directory: `engine_HOST_PORT.log`, and `engine_HOST_PORT.given_up` when it will not start the server again.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.keys import Keys
from megatron_dapo.engines.sglang.server_process import log_tail


class ExternalServer:
    ours = False

    def __init__(self, url: str, config: ServerConfig, log_dir: Path) -> None:
        self.url, self._config = url, config
        self._keys = Keys.of_external_servers(config)
        parts = urlsplit(url)
        self._log = log_dir / f"engine_{parts.hostname}_{parts.port}.log"
        self.port = 0

    def client(self, generate_url: str | None = None) -> SGLangClient:
        return SGLangClient(self.url, self._config, keys=self._keys, generate_url=generate_url)

    def alive(self) -> bool:
        """Unknown here: only its replies tell."""
        return True

    def spawn(self, taken: set[int] | None = None) -> None:
        """Its launcher restarts it."""

    async def end(self, patience: float = 0.0) -> None:
        """Not ours to end."""

    def log_tail(self) -> str:
        return log_tail(self._log) if self._log.exists() else "its log is where its launcher writes it"

    async def wait_ready(self, server: SGLangClient) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            try:
                await server.connection.control("GET", "/health", None, timeout=60, tries=1)
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
