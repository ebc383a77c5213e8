"""Chooses the server for each request, and queues requests when no server has room.

Thousands of requests may wait at a time, so a freed slot wakes one of them, the oldest. Only a change that concerns all
of them (an abort, a resume, a server that is back) wakes all.

A full server is refilled in batches. It interrupts decoding for every prefill, and requests that arrive one by one each
cost a prefill: on an H200 (1.5B, 512 running) decoding ran at 60 k tokens/s and a trickle of requests left 20 k of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.errors import EngineError

AFFINITY_SLACK = 8  # requests by which a prompt's own server may be busier than the least busy one
REFILL_SHARE = 8  # a full server gets requests again when one in so many of its own has ended
TICK = 0.25  # seconds after which the oldest waiting request checks again by itself


class LoadBalancer:
    """`open` is False while no request may start. While a server is RECOVERING, requests wait without a limit: this has
    limits of its own. `memory_released`: the trainer has the GPUs, so no server can be started."""

    def __init__(self, servers: Sequence[SGLangClient], max_running: int) -> None:
        self._servers = servers
        self._max_running = max_running
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._full: set[SGLangClient] = set()  # full once, and not refilled since
        self._none_since: float | None = None
        self._ticking = False
        self.open = True
        self.memory_released = False

    async def acquire(
        self,
        key: int,
        version: int,
        cancelled: Callable[[], bool],
        patience: float,
        avoid: Collection[SGLangClient] = (),
    ) -> SGLangClient | None:
        """A server that serves `version`, with a slot reserved for the caller; None once `cancelled()`.

        Requests with the same `key` share a server where possible. Servers in `avoid` are taken only if no other
        serves. Raises when no server has served the version for `patience` seconds.
        """
        first = True
        while not cancelled():
            # First come, first served: a new request does not overtake those that wait.
            server = self._choose(key, version, avoid) if self.open and not (first and self._waiting) else None
            if server is not None:
                self._reserve(server)
                return server
            self._check_patience(version, patience)
            await self._wait(at_front=not first)
            first = False
        self.wake_one()
        return None

    def _reserve(self, server: SGLangClient) -> None:
        server.in_flight += 1
        if server.in_flight >= self._max_running:
            self._full.add(server)
        self.wake_one()  # there may be room for the next one, too

    def release(self, server: SGLangClient) -> None:
        server.in_flight -= 1
        if server.in_flight <= self._max_running - max(1, self._max_running // REFILL_SHARE):
            self._full.discard(server)
        if server not in self._full:
            self.wake_one()

    def wake_one(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _choose(self, key: int, version: int, avoid: Collection[SGLangClient]) -> SGLangClient | None:
        now = asyncio.get_running_loop().time()
        serving = [s for s in self._servers if s.state.serves(version)]
        serving = [s for s in serving if s not in avoid] or serving
        able = [s for s in serving if s.state.takes_requests(version, now) and s not in self._full]
        if not able:
            return None
        least = min(able, key=lambda server: server.in_flight)
        own = self._servers[key % len(self._servers)]
        return own if own in able and own.in_flight <= least.in_flight + AFFINITY_SLACK else least

    def _check_patience(self, version: int, patience: float) -> None:
        now = asyncio.get_running_loop().time()
        states = [server.state for server in self._servers]
        recovering = not self.memory_released and any(state.phase is Phase.RECOVERING for state in states)
        if not self.open or recovering or any(state.serves(version) for state in states):
            self._none_since = None
            return
        self._none_since = self._none_since if self._none_since is not None else now
        if now - self._none_since > patience:
            self.wake_one()  # the next request fails for the same reason
            causes = "; ".join(f"{server.name}: {server.state.why or 'down'}" for server in self._servers)
            raise EngineError(f"waited {patience:g} s and no server serves weight version {version} ({causes})")

    async def _wait(self, at_front: bool) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(waiter) if at_front else self._waiting.append(waiter)
        self._schedule_tick()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake_one()  # pass the wake-up on to a request that can use it
            raise

    def _schedule_tick(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        """A back-off ends and patience runs out without any call here."""
        self._ticking = False
        if self._waiting:
            self._schedule_tick()
            self.wake_one()
