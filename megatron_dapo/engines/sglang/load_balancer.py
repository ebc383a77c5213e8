"""Chooses the server for each request, and queues requests when no server has room.

A request goes where it is expected to finish first. A server with n requests needs (n + N) ÷ speed seconds for a token
of each. Its speed is measured from what its requests have generated, short ones (an update aborts many) counting less;
N is max_running, as if a full server decoded half as fast as an idle one. Among equal servers this is the least busy
one. Where a choice turns out wrong (a server became slow, another one came back), `overloaded` names requests to move.

A free slot goes to the oldest waiting request, and an abort wakes nobody else. A choice costs O(log servers).

A full server is refilled in batches. It interrupts decoding for every prefill, and requests that arrive one by one each
cost a prefill: on an H200 (1.5B, 512 running) decoding ran at 60 k tokens/s and a trickle of requests left 20 k of it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.errors import EngineError

AFFINITY_SLACK = 8  # requests by which a prompt's own server may be busier than the least busy one
REFILL_SHARE = 8  # a full server gets requests again after 1 in REFILL_SHARE of its own has ended
TICK = 0.25  # seconds after which waiting requests are looked at again without any event
MEMORY = 64  # requests, or as many as a server runs, after which a measurement of its speed counts 1/e
LEAST_MEASURED = 8  # requests before a speed is believed
EQUAL = (0.8, 1.25)  # of the median speed: the difference is noise
MOVE_RATIO = 1.5  # requests move to a server on which they run so much faster
FORGET_SECONDS = 120.0  # a server without requests is then measured again


class _Place:
    """One server as the balancer sees it."""

    def __init__(self, server: SGLangClient) -> None:
        self.server = server
        self.index = 0  # in the list of all places
        self.full = False  # it was, and has not been refilled since
        self.entry = 0  # the number of its valid entry in the heap; 0: none
        self.measured = 0.0  # requests, the older ones count less
        self.work = 0.0  # their tokens × (requests at a time + N)
        self.seconds = 0.0
        self.last_used = 0.0

    def measure(self, tokens: int, seconds: float, crowd: float, memory: int) -> None:
        weight = min(1.0, seconds * self.measured / self.seconds) if self.seconds else 1.0
        decay = 1 - weight / memory
        self.measured = self.measured * decay + 1
        self.work = self.work * decay + tokens * crowd
        self.seconds = self.seconds * decay + seconds
        self.last_used = asyncio.get_running_loop().time()

    @property
    def speed(self) -> float | None:
        """None: not known yet."""
        known = self.measured >= LEAST_MEASURED and self.seconds > 0 and self.work > 0
        return self.work / self.seconds if known else None


@dataclass(slots=True, eq=False)
class _Waiting:
    future: asyncio.Future[SGLangClient | None]
    key: int
    version: int
    patience: float
    avoid: Collection[SGLangClient] = field(default=())


class LoadBalancer:
    """`open` is False while no request may start. While a server is RECOVERING, requests wait without a limit: this has
    limits of its own. `memory_released`: the trainer has the GPUs, so no server can be started."""

    def __init__(self, servers: Sequence[SGLangClient], max_running: int) -> None:
        self._max_running = max_running
        self._places: list[_Place] = []
        self._place_of: dict[SGLangClient, _Place] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._heap: list[tuple[float, int, _Place]] = []  # by pace; entries that are not valid are skipped
        self._entries = 0
        self._typical: float | None = None  # speed of the median server
        self._measurements = 0
        self._none_since: float | None = None
        self._ticking = False
        self.open = True
        self.memory_released = False
        for server in servers:
            self.add(server)

    # ---- servers that come and go ----

    def add(self, server: SGLangClient) -> None:
        place = self._place_of[server] = _Place(server)
        place.index = len(self._places)
        self._places.append(place)
        self.refresh(server)

    def remove(self, server: SGLangClient) -> None:
        place = self._place_of.pop(server)
        place.entry = 0
        last = self._places.pop()
        if last is not place:
            self._places[place.index], last.index = last, place.index

    def refresh(self, *servers: SGLangClient) -> None:
        """These servers, or all, may take requests again."""
        for place in [self._place_of[s] for s in servers if s in self._place_of] or self._places:
            self._push(place)
        self._dispatch()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """No request starts while the body runs."""
        self.open = False
        try:
            yield
        finally:
            self.open = True
            self.refresh()

    # ---- requests ----

    async def acquire(
        self, request_id: str, key: int, version: int, patience: float, avoid: Collection[SGLangClient] = ()
    ) -> SGLangClient | None:
        """A server that serves `version`, with a slot reserved for the caller; None after `cancel`.

        Requests with the same `key` share a server where possible. Servers in `avoid` are taken only if no other
        serves. Raises when no server has served the version for `patience` seconds.
        """
        # First come, first served: a new request does not overtake those that wait.
        if self.open and not self._waiting and (place := self._choose(key, version, avoid)) is not None:
            return self._reserve(place)
        future: asyncio.Future[SGLangClient | None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(future, key, version, patience, avoid)
        self._schedule_tick()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (server := future.result()) is not None:
                self.release(server)
            raise
        finally:
            if (mine := self._waiting.get(request_id)) is not None and mine.future is future:
                del self._waiting[request_id]

    def release(self, server: SGLangClient, tokens: int = 0, seconds: float = 0.0, crowd: float = 0.0) -> None:
        """The request generated `tokens` tokens in `seconds`, with `crowd` requests at a time on the server."""
        server.in_flight -= 1
        place = self._place_of.get(server)
        if place is None:  # it has left
            return
        if tokens:
            place.measure(tokens, seconds, crowd + self._max_running, max(MEMORY, self._max_running))
            self._measurements += 1
            if self._measurements % max(MEMORY, 4 * len(self._places)) == 1:
                self._find_typical()
        if server.in_flight <= self._max_running - max(1, self._max_running // REFILL_SHARE):
            place.full = False
        self._push(place)
        if self._waiting and not place.full:
            self._dispatch()

    def cancel(self, request_id: str | None = None) -> None:
        """A request that waits gets None; without a name, all do."""
        if request_id is None:
            waiting, self._waiting = list(self._waiting.values()), OrderedDict()
        else:
            found = self._waiting.pop(request_id, None)
            waiting = [] if found is None else [found]
        for one in waiting:
            if not one.future.done():
                one.future.set_result(None)

    # ---- speed ----

    def speeds(self) -> dict[SGLangClient, float]:
        """Of each server that has been measured, in shares of the median."""
        self._find_typical()
        typical = self._typical or 1.0
        return {p.server: p.speed / typical for p in self._places if p.speed is not None}

    def overloaded(self) -> tuple[SGLangClient, int] | None:
        """The server whose requests would run much faster elsewhere, and how many of them should move. None while
        others wait: then every slot is of use."""
        if self._waiting or not self.open:
            return None
        busy = [place for place in self._places if place.server.in_flight and place.server.state.version is not None]
        if not busy:
            return None
        worst = max(busy, key=lambda place: self._pace(place, 0))
        now = asyncio.get_running_loop().time()
        version = worst.server.state.version
        free = [place for place in self._places if place is not worst and self._able(place, version, now)]
        paces = [(self._pace(place), place.server.in_flight, place.index) for place in free]
        heapq.heapify(paces)
        count, left = 0, worst.server.in_flight
        while paces and left:
            pace, load, index = paces[0]
            if load >= self._max_running or self._pace(worst, left - worst.server.in_flight) < MOVE_RATIO * pace:
                break
            count, left = count + 1, left - 1
            place = self._places[index]
            heapq.heapreplace(paces, (self._pace(place, load + 2 - place.server.in_flight), load + 1, index))
        return (worst.server, count) if count else None

    def _pace(self, place: _Place, more: int = 1) -> float:
        """Seconds per token, up to a factor, with `more` further requests."""
        typical = self._typical or 1.0
        speed = place.speed or typical
        if EQUAL[0] < speed / typical < EQUAL[1]:
            speed = typical
        return (place.server.in_flight + more + self._max_running) / speed

    def _find_typical(self) -> None:
        now = asyncio.get_running_loop().time()
        for place in self._places:
            if not place.server.in_flight and now - place.last_used > FORGET_SECONDS:
                place.measured = place.work = place.seconds = 0.0
        known = [place.speed for place in self._places if place.speed is not None]
        self._typical = median(known) if known else None

    # ---- inside ----

    def _push(self, place: _Place) -> None:
        """Its pace has changed, or it may take requests again."""
        if place.full:
            place.entry = 0
            return
        self._entries += 1
        place.entry = self._entries
        heapq.heappush(self._heap, (self._pace(place), self._entries, place))
        if len(self._heap) > 4 * len(self._places) + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)

    def _able(self, place: _Place, version: int | None, now: float) -> bool:
        return version is not None and not place.full and place.server.state.takes_requests(version, now)

    def _choose(self, key: int, version: int, avoid: Collection[SGLangClient]) -> _Place | None:
        now = asyncio.get_running_loop().time()
        least, avoided = None, []
        while self._heap:
            _, entry, place = self._heap[0]
            if place.entry == entry and self._able(place, version, now):
                if place.server not in avoid:
                    least = place
                    break
                avoided.append(self._heap[0])
            elif place.entry == entry:
                place.entry = 0  # until `refresh`
                self._schedule_tick()
            heapq.heappop(self._heap)
        for one in avoided:
            heapq.heappush(self._heap, one)
        if least is None and avoided:
            others = (place.server for place in self._places if place.server not in avoid)
            if not any(server.state.serves(version) for server in others):
                least, avoid = avoided[0][2], ()
        if least is None:
            return None
        own = self._places[key % len(self._places)]
        near = self._pace(own) <= self._pace(least, AFFINITY_SLACK + 1)
        return own if near and self._able(own, version, now) and own.server not in avoid else least

    def _reserve(self, place: _Place) -> SGLangClient:
        place.server.in_flight += 1
        place.full = place.full or place.server.in_flight >= self._max_running
        self._push(place)
        return place.server

    def _dispatch(self) -> None:
        """Gives free slots to waiting requests, oldest first."""
        while self.open and self._waiting:
            request_id, one = next(iter(self._waiting.items()))
            if one.future.done():  # cancelled by its caller
                del self._waiting[request_id]
                continue
            place = self._choose(one.key, one.version, one.avoid)
            if place is None:
                return
            del self._waiting[request_id]
            one.future.set_result(self._reserve(place))

    def _check_patience(self) -> None:
        """All requests fail when no server has served their version for too long. They want the same version: an update
        aborts those that wait."""
        oldest = next(iter(self._waiting.values()))
        now = asyncio.get_running_loop().time()
        states = [place.server.state for place in self._places]
        recovering = not self.memory_released and any(state.phase is Phase.RECOVERING for state in states)
        if not self.open or recovering or any(state.serves(oldest.version) for state in states):
            self._none_since = None
            return
        self._none_since = self._none_since if self._none_since is not None else now
        lost = bool(states) and all(state.lost for state in states)
        if now - self._none_since <= oldest.patience and not lost:
            return
        causes = "; ".join(f"{place.server.name}: {place.server.state.why or 'down'}" for place in self._places)
        waited = f"waited {now - self._none_since:.0f} s and no server serves weight version {oldest.version}"
        waiting, self._waiting = self._waiting, OrderedDict()
        for one in waiting.values():
            if not one.future.done():
                one.future.set_exception(EngineError(f"{waited} ({causes})"))

    def _schedule_tick(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        """A back-off ends and patience runs out without any call here."""
        self._ticking = False
        for place in self._places:
            if not place.entry:
                self._push(place)
        self._dispatch()
        if not self._waiting:
            self._none_since = None
            return
        self._check_patience()
        self._schedule_tick()
