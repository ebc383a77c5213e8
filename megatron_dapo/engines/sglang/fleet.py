"""The servers of a run: brought up together, watched, and brought back when one dies.

A watched server is looked at without generating anything, at regular times and whenever a request failed. One that died
or hangs is ended, started again, given the current weights, and serves only then; one that somebody else runs
(`servers.urls`) is waited for instead. `stop` ends what was started here and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.engines.sglang.external_server import GivenServer
from megatron_dapo.engines.sglang.http import failures, wait_all
from megatron_dapo.engines.sglang.server_process import CommandMaker, ServerProcess, sglang_command

log = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3  # in a row; then the server counts as hanging


class Fleet:
    def __init__(
        self, config: RolloutConfig, model: str, log_dir: str | Path, *, make_command: CommandMaker = sglang_command
    ) -> None:
        self._config, self._model = config, model
        self.processes: Sequence[ServerProcess | GivenServer] = [
            GivenServer(url, config.servers, Path(log_dir)) for url in config.servers.urls
        ] or [
            ServerProcess(model, config.servers, index, Path(log_dir), make_command)
            for index in range(config.servers.count)
        ]
        self.engine: SGLangEngine | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._servers: list[SGLangServer] = []
        self._look_now: dict[str, asyncio.Event] = {}
        self._down: set[str] = set()  # names of servers that died and do not answer yet

    async def start(self, version: int = 0) -> SGLangEngine:
        """All servers up and answering, or none left behind and the first one's error. A process that already runs
        is taken over as it is."""
        if not Path(self._model).is_dir():
            raise EngineError(f"cannot start servers: the model directory {self._model} does not exist (policy.model)")
        try:
            taken: set[int] = set()
            for process in self.processes:
                if not process.alive():
                    process.spawn(taken)
                taken.add(process.port)
            router = self._config.servers.router_url
            servers = self._servers = [
                SGLangServer(process.url, self._config.servers, generate_url=router) for process in self.processes
            ]
            pairs = list(zip(self.processes, servers, strict=True))
            results = await wait_all({s.name: process.wait_ready(s) for process, s in pairs})
            self.engine = SGLangEngine(servers, self._config, model=self._model, version=version)
            for error in failures(results).values():
                raise error
            for server in servers:
                await self.engine.admit(server)
        except BaseException:
            await self.stop()
            raise
        self.engine.patience = self._config.servers.start_timeout
        self.engine.on_close = self.stop
        self._look_now = {server.name: asyncio.Event() for server in servers}
        self.engine.all_up = self._all_up
        self.engine.on_failure = lambda server: self._look_now[server.name].set()
        self._watchers = [asyncio.ensure_future(self._watch(process, server)) for process, server in pairs]
        return self.engine

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        self._watchers = []
        await wait_all({server.name: server.close() for server in self._servers})
        await wait_all({str(index): process.end() for index, process in enumerate(self.processes)})

    async def _watch(self, process: ServerProcess | GivenServer, server: SGLangServer) -> None:
        missed, look_now = 0, self._look_now[server.name]
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(look_now.wait(), self._config.servers.heartbeat)
            asked = look_now.is_set()
            look_now.clear()
            try:
                if process.alive():
                    await server.connection.get("/model_info", timeout=self._config.servers.control_timeout)
                    missed = 0
                    continue
                cause = "it ended"
            except EngineError as error:
                missed += MISSED_HEARTBEATS if _nobody_listens(error) else 0 if asked else 1
                cause = str(error)
            if process.alive() and missed < MISSED_HEARTBEATS:
                continue
            missed = 0
            if not await self._bring_back(process, server, cause):
                return

    async def _bring_back(self, process: ServerProcess | GivenServer, server: SGLangServer, cause: str) -> bool:
        """False when it is given up; `trouble` then says why, and requests go to the other servers."""
        assert self.engine is not None
        server.serves, server.trouble = None, f"{cause}; {process.log_tail()}"
        log.warning("server %s is down (%s)", server.name, cause)
        try:
            return await self._start_again(process, server)
        finally:
            self._down.discard(server.name)

    async def _all_up(self) -> None:
        """Until servers that died while the trainer had their GPUs answer again, or are given up."""
        for server in self._servers:
            self._look_now[server.name].set()
        await asyncio.sleep(0.05)
        while self._down:
            await asyncio.sleep(0.05)

    async def _start_again(self, process: ServerProcess | GivenServer, server: SGLangServer) -> bool:
        assert self.engine is not None
        while process.restarts < self._config.servers.restarts:
            process.restarts += 1
            self._down.add(server.name)
            while self.engine.resting:  # a new server would take memory that the trainer is using
                await asyncio.sleep(0.5)
            try:
                await process.end(patience=2.0)
                process.spawn()
                server.forget_memory()
                await process.wait_ready(server)
                self._down.discard(server.name)
                await self.engine.admit(server)
                log.warning("server %s is back (restart %d)", server.name, process.restarts)
                return True
            except EngineError as error:
                server.trouble = str(error)
                with contextlib.suppress(EngineError):
                    await process.end(patience=2.0)
        server.trouble += f"; given up after {process.restarts} restarts (rollout.servers.restarts)"
        log.error("server %s: %s", server.name, server.trouble)
        return False


def _nobody_listens(error: EngineError) -> bool:
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectorError) and isinstance(cause.os_error, ConnectionRefusedError)
