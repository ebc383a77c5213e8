"""The SGLang engine: one server, several, or several behind sglang-router, as one engine.

- A request goes to the least busy server that serves the current weight version; samples of one prompt prefer the
  same server, whose cache then holds the prompt.
- Generating is safe to repeat: a request that a server failed is sent again, elsewhere if possible. What a server
  refuses (4xx) is final.
- A server whose answer carries another weight version than ours (it restarted, someone else updated it) serves
  nothing until it has ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Bucket, Capabilities, Completion, EngineError, SamplingParams, WeightReport
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.http import ServerFailure, failures, wait_all
from megatron_dapo.engines.sglang.load_balancer import Admission
from megatron_dapo.engines.sglang.weights.snapshot import Snapshot
from megatron_dapo.engines.sglang.weights.update import WeightUpdate
from megatron_dapo.types import FinishReason, LogProbs, Tokens, as_logprobs, as_tokens

NO_SERVER_PATIENCE = 30.0


async def _nothing_to_wait_for() -> None:
    pass


class SGLangEngine:
    def __init__(
        self, servers: Sequence[SGLangServer], config: RolloutConfig, *, model: str = "", version: int = 0
    ) -> None:
        """`model` is the HF directory that servers were started with; disk updates copy its configuration files."""
        self.servers, self.config, self._version = list(servers), config, version
        self.snapshot = Snapshot(config.weights.directory, model)
        self._update = WeightUpdate(config.weights, self.snapshot)
        self.patience = NO_SERVER_PATIENCE  # how long a request waits for any server to serve; the fleet raises it
        self._admission = Admission(self.servers, config.servers.max_running)
        self._changing = asyncio.Lock()  # two updates of one server at a time can end it
        self._epoch = 0
        self.resting = False  # the trainer has the GPUs
        self._where: dict[str, tuple[SGLangServer, str]] = {}
        self._aborted: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.all_up: Callable[[], Awaitable[None]] = _nothing_to_wait_for  # servers that died while they rested
        self.on_failure: Callable[[SGLangServer], None] = lambda server: None  # whoever watches may look at once

    @classmethod
    async def connect(
        cls, urls: Sequence[str], config: RolloutConfig, *, model: str = "", version: int = 0
    ) -> SGLangEngine:
        """An engine over servers that already run."""
        router = config.servers.router_url
        engine = cls([SGLangServer(url, config.servers, generate_url=router) for url in urls], config,
                     model=model, version=version)  # fmt: skip
        results = await wait_all({server.name: engine.admit(server) for server in engine.servers})
        for error in failures(results).values():
            await engine.close()
            raise error
        return engine

    async def admit(self, server: SGLangServer) -> None:
        """Lets a server serve, if it holds the current version or can be given it."""
        while True:
            async with self._changing:
                if self._update.loaded is None:
                    if server.serves != self._version:
                        await self._admit(server)
                    break
            await asyncio.sleep(0.05)  # between load and serve the trainer may still use the KV cache's memory
        self._admission.wake_all()

    async def _admit(self, server: SGLangServer) -> None:
        await server.capabilities()
        try:
            held: int | None = await server.version()
        except ServerFailure:
            held = None
        if held != self._version:
            if self.snapshot.current is None:
                server.trouble = f"it holds weight version {held}, current is {self._version}"
                return
            await self._update.from_snapshot(self._version, server)
        server.serves, server.trouble, server.resting_until, server.failures = self._version, "", 0.0, 0

    @property
    def weight_version(self) -> int:
        return self._version

    async def capabilities(self) -> Capabilities:
        return await self.servers[0].capabilities()

    # ---- generation ----

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        epoch, failure = self._epoch, ""
        key = zlib.crc32(np.ascontiguousarray(prompt[:256]).tobytes())

        def aborted() -> bool:
            return self._epoch != epoch or request_id in self._aborted

        for attempt in range(self.config.servers.attempts):
            version = self._version
            server = await self._admission.acquire(key, version, aborted, self.patience)
            if server is None:
                self._aborted.discard(request_id)
                return Completion(as_tokens([]), as_logprobs([]), FinishReason.ABORT)
            name = f"{request_id}-try{attempt}" if attempt else request_id
            self._where[request_id] = (server, name)
            try:
                completion = await server.generate(name, prompt, params)
                self._check_version(server, completion, version)
                server.failures = 0
                return completion
            except ServerFailure as error:
                failure = str(error)
                self._admission.let_rest(server)
                self.on_failure(server)
                self._in_background(partial(server.abort, name))
            except asyncio.CancelledError:
                self._in_background(partial(server.abort, name))
                raise
            finally:
                self._where.pop(request_id, None)
                self._aborted.discard(request_id)
                self._admission.release(server)
        tries = self.config.servers.attempts
        raise EngineError(f"request {request_id}: {tries} tries failed (rollout.servers.attempts); the last: {failure}")

    def _check_version(self, server: SGLangServer, completion: Completion, version: int) -> None:
        """`version` is the one that was current when the request was sent."""
        strange = {span.version for span in completion.weight_spans} - {version}
        if strange:
            trouble = f"it answered with weight version {min(strange)}, expected {version}"
            if server.serves == version:
                server.serves, server.trouble = None, trouble
                self._in_background(partial(self.admit, server))
            raise ServerFailure(f"server {server.name}: {trouble}; was it restarted?")

    # ---- control ----

    async def abort(self, request_id: str | None = None) -> None:
        if request_id is not None:
            self._aborted.add(request_id)
            if request_id in self._where:
                server, name = self._where[request_id]
                # Behind a router nobody knows who has the request: ask all.
                asked = self.servers if self.config.servers.router_url else [server]
                await wait_all({other.name: other.abort(name) for other in asked})
            self._admission.wake_all()
            return
        self._epoch += 1
        self._admission.wake_all()
        busy = [server for server in self.servers if server.in_flight or self.config.servers.router_url]
        await wait_all({server.name: server.abort() for server in busy})

    async def pause(self) -> None:
        self._admission.open = False
        self._epoch += 1
        self._admission.wake_all()
        await self._to_serving("pause")

    async def resume(self) -> None:
        await self._to_serving("resume")
        self._admission.open = True
        self._admission.wake_all()

    async def _to_serving(self, order: str) -> None:
        """A server that cannot be paused or resumed serves nothing until it has been admitted again."""
        serving = [server for server in self.servers if server.serves is not None]
        failed = failures(await wait_all({server.name: getattr(server, order)() for server in serving}))
        for server in serving:
            if server.name in failed:
                server.serves, server.trouble = None, str(failed[server.name])

    async def load_weights(self, version: int, buckets: Iterable[Bucket], executor: Executor | None = None) -> None:
        if self.resting:
            self.resting = False
            await self.all_up()
        async with self._changing:
            self._epoch += 1
            self._admission.wake_all()
            self._version = version
            with self._closed_for_requests():
                await self._update.load(version, self.servers, buckets, executor)

    async def serve_weights(self, version: int) -> WeightReport:
        async with self._changing:
            with self._closed_for_requests():
                return await self._update.serve(version)

    @contextlib.contextmanager
    def _closed_for_requests(self) -> Iterator[None]:
        was_open, self._admission.open = self._admission.open, False
        try:
            yield
        finally:
            if was_open:
                self._admission.open = True
                self._admission.wake_all()

    async def update_weights(self, version: int, buckets: Iterable[Bucket]) -> WeightReport:
        await self.load_weights(version, buckets)
        return await self.serve_weights(version)

    async def release_memory(self) -> None:
        async with self._changing:
            self._epoch += 1
            self._admission.wake_all()
            self.resting = True
            for server in self.servers:
                server.serves, server.trouble = None, "the trainer has its GPUs"
            results = await wait_all({server.name: server.release_memory() for server in self.servers})
        for error in failures(results).values():
            raise error

    async def logprobs_of(self, tokens: Sequence[int]) -> dict[str, LogProbs]:
        """What each serving server gives for a fixed text, so that a trainer can compare it with its own."""
        serving = [server for server in self.servers if server.serves == self._version]
        return {server.name: await server.logprobs_of(tokens) for server in serving}

    async def health(self) -> None:
        results = await wait_all({server.name: server.health() for server in self.servers})
        well = [s for s in self.servers if s.serves == self._version and not isinstance(results[s.name], BaseException)]
        if not well:
            causes = "; ".join(f"{s.name}: {s.trouble or results[s.name]}" for s in self.servers)
            raise EngineError(f"no server serves weight version {self._version}: {causes}")

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await self._update.close()
        await wait_all({server.name: server.close() for server in self.servers})
        self.snapshot.close()
        if self.on_close is not None:
            await self.on_close()

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(EngineError):
                await work()

        task = asyncio.ensure_future(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
