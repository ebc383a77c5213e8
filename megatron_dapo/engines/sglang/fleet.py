"""The servers of a run: started together, supervised, and ended together.

`close` ends what was started here and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import SERVERS_PER_PROCESS, WITH_ROUTED_EXPERTS, ClientProcess
from megatron_dapo.engines.sglang.engine import SGLangEngine, Supervision
from megatron_dapo.engines.sglang.http import Connection, ServerFailure, failures, wait_all
from megatron_dapo.engines.sglang.keys import Keys
from megatron_dapo.engines.sglang.server_process import CommandMaker, ExternalServer, ServerProcess, sglang_command
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.engines.sglang.supervisor import POLL, Supervisor
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.snapshot import remove_dead_snapshots


class Fleet(Supervision):
    """Passes what the engine reports to the supervisor of the server."""

    def __init__(
        self,
        config: RolloutConfig,
        model: str,
        log_dir: str | Path,
        *,
        make_command: CommandMaker = sglang_command,
        client_processes: bool = True,
    ) -> None:
        """`client_processes`: generate requests are sent by processes of their own, not by this one."""
        self._config = config
        self._model = model
        self._use_client_processes = client_processes
        self.processes = self._processes(Path(log_dir), make_command)
        self.client_processes: list[ClientProcess] = []
        self.supervisors: dict[str, Supervisor] = {}  # by the server's name
        self._servers: list[SGLangClient] = []

    def _processes(self, log_dir: Path, make_command: CommandMaker) -> Sequence[ServerProcess | ExternalServer]:
        servers = self._config.servers
        if servers.urls:
            return [ExternalServer(url, servers, log_dir) for url in servers.urls]
        keys = Keys.of_started_servers(servers)
        return [
            ServerProcess(self._model, servers, index, log_dir, make_command, keys=keys)
            for index in range(servers.count)
        ]

    async def start(self, version: int = 0) -> SGLangEngine:
        """All servers up and serving; or the first error, with nothing left running. A process that already runs is
        taken over."""
        if not Path(self._model).is_dir():
            raise EngineError(f"cannot start servers: the model directory {self._model} does not exist (policy.model)")
        await asyncio.to_thread(remove_dead_snapshots, Path(self._config.weights.directory))
        try:
            taken: set[int] = set()
            for process in self.processes:
                if not process.alive():
                    process.spawn(taken)
                taken.add(process.port)
            router = self._config.servers.router_url
            self._servers = [process.client(router) for process in self.processes]
            if self._use_client_processes:
                await self._start_client_processes()  # they start while the servers do
            pairs = list(zip(self.processes, self._servers, strict=True))
            results = await wait_all({server.name: process.wait_ready(server) for process, server in pairs})
            engine = SGLangEngine(self._servers, self._config, model=self._model, version=version)
            for error in failures(results).values():
                raise error
            for client in self.client_processes:
                await client.ready()
            for server in self._servers:
                await engine.admit(server)
            if router:
                await self._wait_for_router(router)
        except BaseException:
            await self.close()
            raise
        engine.patience = self._config.servers.start_timeout
        engine.supervision = self
        self.supervisors = {
            server.name: Supervisor(process, server, engine, self._config.servers) for process, server in pairs
        }
        return engine

    async def _start_client_processes(self) -> None:
        share = WITH_ROUTED_EXPERTS if self._config.servers.returns_experts else SERVERS_PER_PROCESS
        for index, server in enumerate(self._servers):
            if index % share == 0:
                self.client_processes.append(ClientProcess())
                await self.client_processes[-1].start()
            server.process = self.client_processes[-1]

    async def _wait_for_router(self, url: str) -> None:
        """sglang-router distributes the generate requests. It refuses them until it counts all servers as healthy."""
        config = self._config.servers
        router = Connection(url, api_key=Keys.of_external_servers(config).api, timeout=config.control_timeout)
        deadline, wanted = time.monotonic() + config.start_timeout, len(config.urls)
        try:
            while True:
                try:
                    known = _healthy(await router.get("/readiness", tries=1), wanted)
                    if known >= wanted:
                        return
                    last = f"it knows {known} of {wanted} servers"
                except ServerFailure as error:
                    last = str(error)
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the router {router.url} was not ready after {config.start_timeout:g} s "
                        f"(rollout.servers.start_timeout); the last: {last}"
                    )
                await asyncio.sleep(0.5)
        finally:
            await router.close()

    # ---- what the engine reports ----

    def check(self, server: SGLangClient) -> None:
        self.supervisors[server.name].check(suspect=True)

    def recover(self, server: SGLangClient, cause: BaseException) -> None:
        self.supervisors[server.name].recover(cause)

    async def recovered(self) -> None:
        for supervisor in self.supervisors.values():
            supervisor.check(suspect=False)  # a process that died while nothing was sent to it
        await asyncio.sleep(POLL)
        while self._recovering() and all(server.state.down for server in self._servers):
            await asyncio.sleep(POLL)

    def _recovering(self) -> bool:
        return any(server.state.phase is Phase.RECOVERING for server in self._servers)

    async def end(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        ended = await asyncio.gather(*(self.supervisors[server.name].end_process() for server in servers))
        return [server for server, done in zip(servers, ended, strict=True) if not done]

    async def stop(self) -> None:
        await wait_all({name: supervisor.stop() for name, supervisor in self.supervisors.items()})

    async def close(self) -> None:
        await self.stop()
        await wait_all({server.name: server.close() for server in self._servers})
        await wait_all({str(index): client.close() for index, client in enumerate(self.client_processes)})
        await wait_all({str(index): process.end() for index, process in enumerate(self.processes)})


def _healthy(reply: Any, wanted: int) -> int:
    """A router that reports no number is taken to know all."""
    return int(reply.get("healthy_workers", wanted)) if isinstance(reply, dict) else wanted
