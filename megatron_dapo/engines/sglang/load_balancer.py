"""Which server a request goes to, and who waits when none has room.

Thousands of requests wait at one time, so a freed slot wakes one of them, the oldest; only a change that concerns all
(an abort, a resume, a server that is back) wakes all.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence

from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import SGLangServer

SAME_SERVER_SLACK = 8  # requests by which a prompt's own server may be busier than the least busy one
REST = (0.25, 8.0)  # seconds that a failing server is left alone: first, longest
TICK = 0.25  # seconds after which the oldest waiting request looks again by itself


class Admission:
    def __init__(self, servers: Sequence[SGLangServer], max_running: int) -> None:
        self._servers, self._max_running = servers, max_running
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._nobody_since: float | None = None
        self._ticking = False
        self.open = True

    async def acquire(
        self, key: int, version: int, cancelled: Callable[[], bool], patience: float
    ) -> SGLangServer | None:
        """A server that serves `version` and has room, its slot taken; None once `cancelled()`. `key` is the same for
        requests that should share a server. Raises when no server has served the version for `patience` seconds."""
        first = True
        while not cancelled():
            # Who comes first goes first: a new request does not overtake those that wait.
            server = self._choose(key, version) if self.open and not (first and self._waiting) else None
            if server is not None:
                server.in_flight += 1
                return server
            self._check_patience(version, patience)
            await self._wait(at_front=not first)
            first = False
        self.wake_one()
        return None

    def release(self, server: SGLangServer) -> None:
        server.in_flight -= 1
        self.wake_one()

    def let_rest(self, server: SGLangServer) -> None:
        """Leaves a failing server alone for a while, longer each time until it has served again."""
        now, (first, longest) = asyncio.get_running_loop().time(), REST
        if server.resting_until > now:
            return  # many requests fail at the same moment: that is one failure
        server.failures += 1
        server.resting_until = now + min(longest, first * 2 ** (server.failures - 1)) * random.uniform(0.5, 1.0)

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

    def _choose(self, key: int, version: int) -> SGLangServer | None:
        now = asyncio.get_running_loop().time()
        able = [s for s in self._servers if s.serves == version and s.resting_until <= now]
        able = [s for s in able if s.in_flight < self._max_running]
        if not able:
            return None
        least = min(able, key=lambda server: server.in_flight)
        own = self._servers[key % len(self._servers)]
        return own if own in able and own.in_flight <= least.in_flight + SAME_SERVER_SLACK else least

    def _check_patience(self, version: int, patience: float) -> None:
        now = asyncio.get_running_loop().time()
        if not self.open or any(server.serves == version for server in self._servers):
            self._nobody_since = None
            return
        self._nobody_since = self._nobody_since if self._nobody_since is not None else now
        if now - self._nobody_since > patience:
            self.wake_one()  # it is as hopeless for the next
            causes = "; ".join(f"{server.name}: {server.trouble or 'down'}" for server in self._servers)
            raise EngineError(f"waited {patience:g} s and no server serves weight version {version} ({causes})")

    async def _wait(self, at_front: bool) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(waiter) if at_front else self._waiting.append(waiter)
        self._tick_later()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake_one()  # the wake-up was meant for whoever can use it
            raise

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        """Rests end and patience runs out without anyone calling."""
        self._ticking = False
        if self._waiting:
            self._tick_later()
            self.wake_one()
