"""The servers of a run: brought in together, supervised, and ended together. External ones may come and go during the
run (membership.py); a fixed list is a membership that never changes.

`close` ends what was started here and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.server_load import SLOW
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import SERVERS_PER_PROCESS, WITH_ROUTED_EXPERTS, ClientProcess
from megatron_dapo.engines.sglang.engine import SGLangEngine, Supervision
from megatron_dapo.engines.sglang.http import Connection, ServerFailure, wait_all
from megatron_dapo.engines.sglang.keys import Keys
from megatron_dapo.engines.sglang.membership import Membership
from megatron_dapo.engines.sglang.server_process import CommandMaker, ExternalServer, ServerProcess, sglang_command
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.engines.sglang.supervisor import POLL, Supervisor
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.snapshot import remove_dead_snapshots

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0


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
        self._log_dir = Path(log_dir)
        self._use_client_processes = client_processes
        servers = config.servers
        key = Keys.of_external_servers(servers).api if servers.urls else None
        self.membership = Membership(servers.urls, key, self.status)
        self.processes = [self._external(url) for url in self.membership.fixed]
        if not servers.urls:
            keys = Keys.of_started_servers(servers)
            self.processes = [
                ServerProcess(model, servers, index, self._log_dir, make_command, keys=keys)
                for index in range(servers.count)
            ]
        self.client_processes: list[ClientProcess] = []
        self.supervisors: dict[str, Supervisor] = {}  # by name
        self._servers: dict[str, SGLangClient] = {}  # by name
        self._engine: SGLangEngine | None = None
        self._watching: asyncio.Task[None] | None = None
        self._slow: set[str] = set()

    def _external(self, url: str) -> ServerProcess | ExternalServer:
        return ExternalServer(url, self._config.servers, self._log_dir)

    async def start(self, version: int = 0) -> SGLangEngine:
        """All servers up and serving; or the first error, with nothing left running. A process that already runs is
        taken over. Of servers that come and go, one must serve; the others join later."""
        if not Path(self._model).is_dir():
            raise EngineError(f"cannot start servers: the model directory {self._model} does not exist (policy.model)")
        await asyncio.to_thread(remove_dead_snapshots, Path(self._config.weights.directory))
        engine = self._engine = SGLangEngine([], self._config, model=self._model, version=version)
        engine.patience = self._config.servers.start_timeout
        engine.supervision = self
        try:
            taken: set[int] = set()
            for process in self.processes:
                if not process.alive():
                    process.spawn(taken)
                taken.add(process.port)
            for process in self.processes:
                await self._join(process)
            await self.membership.open()
            await asyncio.gather(*(supervisor.joined for supervisor in self.supervisors.values()))  # or the first error
            if self.membership.changes:
                self._watching = asyncio.ensure_future(self._watch())
                await self._until_one_serves()
            for client in self.client_processes:
                await client.ready()
            if self._config.servers.router_url:
                await self._wait_for_router(self._config.servers.router_url)
        except BaseException:
            await self.close()
            raise
        self._watching = self._watching or asyncio.ensure_future(self._watch())
        return engine

    async def _join(self, process: ServerProcess | ExternalServer) -> None:
        assert self._engine is not None
        server = process.client(self._config.servers.router_url)
        if not process.ours:
            server.owner = self._owner
        await self._give_client_process(server)
        self._servers[server.name] = server
        self._engine.add(server)
        self.supervisors[server.name] = Supervisor(process, server, self._engine)

    @property
    def _owner(self) -> str:
        """Of leases: a run that is resumed in the same directory is the same run."""
        log_dir = self._log_dir.absolute()
        run_dir = next((path.parent for path in (log_dir, *log_dir.parents) if path.name == "logs"), log_dir)
        return hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()

    async def _leave(self, url: str) -> None:
        assert self._engine is not None
        server = self._servers.pop(url)
        await self.supervisors.pop(url).stop()
        await wait_all({url: server.end_lease()})
        self.processes = [process for process in self.processes if process.url != url]
        await self._engine.remove(server)

    async def _give_client_process(self, server: SGLangClient) -> None:
        """It is ready later: it starts while the server does."""
        if not self._use_client_processes:
            return
        share = WITH_ROUTED_EXPERTS if self._config.servers.demands.returns_experts else SERVERS_PER_PROCESS
        used = Counter(id(other.process) for other in self._servers.values())
        free = next((client for client in self.client_processes if used[id(client)] < share), None)
        if free is None:
            free = ClientProcess()
            self.client_processes.append(free)
            await free.start()
        server.process = free

    # ---- servers that come, go and differ ----

    async def _watch(self) -> None:
        """Follows the membership, moves requests away from slow servers, and names them."""
        assert self._engine is not None
        while True:
            if self.membership.changes:
                try:
                    await self._follow(await self.membership.current())
                except EngineError as error:  # tried again
                    log.warning("the servers cannot be changed: %s", error)
            self._engine.rebalance()
            self._name_slow()
            await asyncio.sleep(WATCH_SECONDS)

    async def _follow(self, wanted: Sequence[str]) -> None:
        for url in [url for url in wanted if url not in self._servers]:
            log.warning("server %s joins", url)
            process = self._external(url)
            await self._join(process)
            self.processes = [*self.processes, process]
        gone = [url for url in self._servers if url not in wanted]
        for url in gone:
            log.warning("server %s leaves", url)
        await wait_all({url: self._leave(url) for url in gone})

    def _name_slow(self) -> None:
        assert self._engine is not None
        slow = {name: share for name, share in self._engine.speeds().items() if share < SLOW}
        for name in slow.keys() - self._slow:
            log.warning("server %s is slow: %.0f %% of the median server's speed", name, 100 * slow[name])
        for name in self._slow - slow.keys():
            log.warning("server %s is no longer slow", name)
        self._slow = set(slow)

    async def _until_one_serves(self) -> None:
        deadline = time.monotonic() + self._config.servers.start_timeout
        while not any(server.state.phase is Phase.SERVING for server in self._servers.values()):
            if time.monotonic() > deadline:
                found = [f"{name}: {server.state.why}" for name, server in self._servers.items()]
                causes = "; ".join([*found, *self.membership.unread.values()])
                raise EngineError(
                    f"no server was ready after {self._config.servers.start_timeout:g} s "
                    f"(rollout.servers.start_timeout): {causes or 'rollout.servers.urls names none'}"
                )
            await asyncio.sleep(POLL)

    def status(self) -> list[dict[str, Any]]:
        speeds = self._engine.speeds() if self._engine is not None else {}
        return [
            {"url": name, "state": server.state.phase.name.lower(), "version": server.state.version,
             "running": server.in_flight, "speed": speeds.get(name), "why": server.state.why}
            for name, server in self._servers.items()
        ]  # fmt: skip

    async def _wait_for_router(self, url: str) -> None:
        """sglang-router distributes the generate requests. It refuses them until it counts all servers as healthy."""
        config = self._config.servers
        router = Connection(url, api_key=Keys.of_external_servers(config).api, timeout=config.control_timeout)
        deadline, wanted = time.monotonic() + config.start_timeout, len(self._servers)
        try:
            while True:
                try:
                    reply = await router.get("/readiness", tries=1)
                    # A router that reports no number is taken to know all.
                    known = int(reply.get("healthy_workers", wanted)) if isinstance(reply, dict) else wanted
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
        if server.name in self.supervisors:  # else it has left
            self.supervisors[server.name].check(suspect=True)

    def recover(self, server: SGLangClient, cause: BaseException) -> None:
        if server.name in self.supervisors:
            self.supervisors[server.name].recover(cause)

    async def recovered(self, *, joins: bool = False) -> None:
        for supervisor in self.supervisors.values():
            supervisor.check(suspect=False)  # a process that died while nothing was sent to it
        await asyncio.sleep(POLL)
        until = time.monotonic() + (self._config.servers.start_timeout if joins and self.membership.changes else 0.0)
        while all(server.state.down for server in self._servers.values()):
            recovering = any(server.state.phase is Phase.RECOVERING for server in self._servers.values())
            if not recovering and time.monotonic() >= until:
                break
            await asyncio.sleep(POLL)

    async def end(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        ended = await asyncio.gather(*(self.supervisors[server.name].end_process() for server in servers))
        return [server for server, done in zip(servers, ended, strict=True) if not done]

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self.membership.close()
        await wait_all({name: supervisor.stop() for name, supervisor in self.supervisors.items()})
        await wait_all({name: server.end_lease() for name, server in self._servers.items()})

    async def close(self) -> None:
        await self.stop()
        await wait_all({name: server.close() for name, server in self._servers.items()})
        await wait_all({str(index): client.close() for index, client in enumerate(self.client_processes)})
        await wait_all({str(index): process.end() for index, process in enumerate(self.processes)})
