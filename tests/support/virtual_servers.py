"""A fleet on a virtual clock: engine, supervisors and load balancer are real, the servers are queueing models
(`planner/server_model.py`). A server can be slow, die, hang, come back and leave."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.engines.sglang import weight_update
from megatron_dapo.engines.sglang.client import Capabilities, SGLangClient
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.engines.sglang.http import BrokenConnection, failures, wait_for_living
from megatron_dapo.engines.sglang.transports import Transfer
from megatron_dapo.planner.server_model import DecodeModel, Sequence, ServerModel
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, WeightSpan, as_tokens

PROMPT_TOKENS = 64
# A decoding step takes 10 ms, 20 ms with 64 sequences; a thousand prompt tokens take 20 ms.
DECODE = DecodeModel(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01 / 64, 2e-5)
NORMAL = NormalDist()


def length_of(seed: int, mean: int, longest: int) -> int:
    """Log-normal, sigma 0.7."""
    draw = NORMAL.inv_cdf((seed % 1_000_003 + 0.5) / 1_000_003)
    return int(min(longest, max(1, mean * math.exp(0.7 * draw - 0.245))))


class VirtualServer(SGLangClient):
    """`mean`: tokens of a response."""

    def __init__(
        self, url: str, config: RolloutConfig, speed: float = 1.0, mean: int = 200, loads: float = 2.0
    ) -> None:
        super().__init__(url, config.servers)
        times = {"dense": DECODE.dense / speed, "per_sequence": DECODE.per_sequence / speed}
        self._model = ServerModel(replace(DECODE, **times), 10**9, config.servers.max_running)
        self._mean, self._longest, self._loads = mean, config.max_response_tokens, 2.0
        self._label, self._timer = "default", None
        self._waiting: dict[int, tuple[str, Sequence, asyncio.Future[None]]] = {}
        self.alive = self.answering = True
        self.first_reply: float | None = None
        self.most_loads = self._loading = 0

    # ---- faults ----

    def kill(self) -> None:
        self.alive = False
        self._label = "default"
        self._model.clear()
        for _, _, future in self._waiting.values():
            if not future.done():
                future.set_exception(BrokenConnection(f"server {self.name} was killed"))
        self._waiting.clear()

    async def _reach(self) -> None:
        if not self.alive:
            raise BrokenConnection(f"server {self.name}: nobody listens")
        if not self.answering:
            await asyncio.sleep(10_000)

    # ---- generation ----

    async def generate(self, request_id: str, prompt: Any, params: SamplingParams, adapter=None) -> Completion:
        await self._reach()
        version, done = int(self._label) if self._label != "default" else 0, len(prompt) - PROMPT_TOKENS
        whole = length_of(params.seed or 0, self._mean, self._longest) - done
        tokens = max(1, min(whole, params.max_new_tokens))
        sequence = Sequence(tokens, len(prompt), len(prompt))
        future = asyncio.get_running_loop().create_future()
        self._waiting[id(sequence)] = request_id, sequence, future
        self._advance()
        self._model.add(sequence)
        self._set_timer()
        await future
        made = sequence.generated if sequence.remaining else tokens
        reason = FinishReason.ABORT if sequence.remaining else FinishReason.STOP
        self.first_reply = asyncio.get_running_loop().time() if self.first_reply is None else self.first_reply
        spans = [WeightSpan(version, 0, made)] if made else []
        return Completion(np.zeros(made, np.int32), np.zeros(made, np.float32), reason, spans)

    async def abort(self, request_id: str | None = None) -> None:
        await self._reach()
        self._advance()
        for name, sequence, future in list(self._waiting.values()):
            if request_id in (None, name) and not future.done():
                self._model.remove(sequence)
                self._end(sequence)
        self._set_timer()

    def _advance(self) -> None:
        for sequence in self._model.run_until(asyncio.get_running_loop().time()):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        _, _, future = self._waiting.pop(id(sequence))
        if not future.done():
            future.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        event = self._model.next_event()
        self._timer = None if event is None else asyncio.get_running_loop().call_at(event, self._on_event)

    def _on_event(self) -> None:
        self._advance()
        self._set_timer()

    # ---- control calls ----

    async def capabilities(self) -> Capabilities:
        await self._reach()
        return Capabilities(bracketed_updates=False, checksums=False, releases_memory=True)

    async def answers(self) -> None:
        await self._reach()

    async def _full_label(self, wait_for_server: bool = True) -> str:
        await self._reach()
        return self._label

    async def set_version_label(self, label: str) -> None:
        await self._reach()
        self._label = label
        self._labels = {label}

    async def load_from_disk(self, path: str, timeout: float, *, flush: bool = True) -> None:
        await self._reach()
        self._loading += 1
        self.most_loads = max(self.most_loads, self._loading)
        await asyncio.sleep(self._loads)
        self._loading -= 1
        await self._reach()

    async def _control(self, path: str, body: Any, timeout: float | None = None, **options: Any) -> dict[str, Any]:
        await self._reach()
        return {}

    async def _abort_all(self) -> None:
        await self.abort()
        while self.in_flight:
            await asyncio.sleep(0.001)

    async def logprobs_of(self, tokens: Any) -> Any:
        await self._reach()
        return np.full(len(tokens) - 1, -1.0, np.float32)


class VirtualProcess:
    ours, port = False, 0

    def __init__(self, server: VirtualServer) -> None:
        self.server, self.url = server, server.name

    def client(self, generate_url: str | None = None) -> VirtualServer:
        return self.server

    def alive(self) -> bool:
        return True

    def spawn(self, taken: Any = None) -> None: ...

    async def end(self, patience: float = 0.0) -> None: ...

    def log_tail(self) -> str:
        return "no log"

    async def wait_ready(self, server: Any) -> None:
        while not self.server.alive:
            await asyncio.sleep(0.5)


class VirtualSnapshot:
    current: Path | None = None

    @property
    def exists(self) -> bool:
        return self.current is not None

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


class NoBuckets:
    @classmethod
    def of(cls, buckets: Any) -> NoBuckets:
        return cls()

    @contextlib.asynccontextmanager
    async def open(self, *_: Any) -> AsyncIterator[None]:
        yield None


class VirtualTransport:
    """Every server loads the version by itself, as with disk."""

    prepare = release = None

    def __init__(self, snapshot: VirtualSnapshot) -> None:
        self._snapshot = snapshot

    async def send(self, version: int, servers: Any, stream: Any, order: Any) -> Transfer:
        self._snapshot.current = Path(f"version-{version}")
        calls = {server.name: server.load_from_disk("", 0.0) for server in servers}
        answers = {server.name: server.answers for server in servers}
        return Transfer(failed=failures(await wait_for_living(calls, answers, float("inf"))))

    async def close(self) -> None: ...


class VirtualFleet(Fleet):
    """`servers`: all that ever exist, by URL; `listed`: those that the run uses now."""

    def __init__(self, config: RolloutConfig, folder: Path, make: Callable[[str], VirtualServer]) -> None:
        self.every: dict[str, VirtualServer] = {}
        self.listed: list[str] = []
        self._make = make
        super().__init__(config, str(folder), folder, client_processes=False)
        self.membership.current = self._current  # type: ignore[method-assign]

    async def _current(self) -> list[str]:
        return list(self.listed)

    def _external(self, url: str) -> Any:
        self.every[url] = server = self._make(url)
        return VirtualProcess(server)

    def list_servers(self, count: int) -> list[str]:
        """The first `count` of all names."""
        self.listed = [f"http://server-{number}" for number in range(count)]
        return self.listed


@contextlib.asynccontextmanager
async def virtual_fleet(
    folder: Path, count: int, make: Callable[[str, RolloutConfig], VirtualServer] = VirtualServer, **rollout: Any
) -> AsyncIterator[tuple[VirtualFleet, SGLangEngine]]:
    """Inside `run_virtually`. Threads would not be on the virtual clock, so what they do is done at once."""

    async def at_once(function: Any, *args: Any) -> Any:
        return function(*args)

    servers = {"urls": ["file:///virtual"], "max_running": 64, **rollout.pop("servers", {})}
    config = RolloutConfig(servers=servers, weights={"proof": "version"}, **rollout)
    before = asyncio.to_thread, weight_update.BucketStream
    asyncio.to_thread, weight_update.BucketStream = at_once, NoBuckets  # type: ignore[assignment, misc]
    try:
        fleet = VirtualFleet(config, folder, lambda url: make(url, config))
        fleet.list_servers(count)
        engine = await fleet.start()
        snapshot = VirtualSnapshot()
        engine.snapshot = engine._update._snapshot = snapshot  # type: ignore[assignment]
        engine._update._transport = VirtualTransport(snapshot)  # type: ignore[assignment]
        while len([s for s in engine.servers if s.state.version is not None]) < count:
            await asyncio.sleep(0.1)
        try:
            yield fleet, engine
        finally:
            await engine.close()
    finally:
        asyncio.to_thread, weight_update.BucketStream = before  # type: ignore[misc]


def next_prompt() -> Callable[[], Prompt]:
    numbers = iter(range(10**9))
    return lambda: Prompt(f"p{next(numbers)}", "", as_tokens([1] * PROMPT_TOKENS))


async def grade(prompt: Prompt, sample: Sample) -> Grade:
    """Every group is informative."""
    return Grade(sample.index % 2 == 0, float(sample.index % 2 == 0))


async def tool_occupancy(folder: Path, tool_seconds: float, groups: int = 128, max_running: int = 64) -> float:
    """Share of the slots with a request while batches are collected: two turns of about 4 s, and a tool after each."""

    async def converse(prompt: Prompt, conversation: Any, settings: Any) -> Grade:
        for _ in range(2):
            await conversation.generate(max_tokens=200)
            await asyncio.sleep(tool_seconds)
            conversation.append([1, 2, 3])
        return Grade(conversation.samples[0].index % 2 == 0, 1.0)

    texts = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")
    function = RolloutFunction("converse", converse, {}, texts, "turn")
    options = {"samples_per_prompt": 16, "max_response_tokens": 4000, "sampler": {"unfinished": "continue"}}
    options["servers"] = {"max_running": max_running}
    shares = []
    async with virtual_fleet(folder, 2, **options) as (_, engine):
        sampler = Sampler(engine, grade, next_prompt(), engine.config, groups_per_step=groups, function=function)
        for step in range(4):
            collecting = asyncio.ensure_future(sampler.collect(step))
            while not (await asyncio.wait([collecting], timeout=0.1))[0]:
                if step:
                    shares.append(sum(server.in_flight for server in engine.servers) / engine.max_running)
            await collecting
            await engine.update_weights(step + 1, [])
    return sum(shares) / len(shares)
