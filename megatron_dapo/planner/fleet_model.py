"""All engines of a run as a queueing model: a central queue, and the least loaded server takes the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from megatron_dapo.planner.decoding import DecodeModel
from megatron_dapo.planner.server_model import Sequence, ServerModel


class FleetModel:
    def __init__(self, servers: int, decode: DecodeModel, kv_tokens: int, max_running: int) -> None:
        self.servers = [ServerModel(decode, kv_tokens, max_running) for _ in range(servers)]
        self.now = 0.0
        self._waiting: deque[Sequence] = deque()
        self._next: list[float | None] = [None] * servers  # event of each server
        self._loads = [0] * servers  # sequences that run or wait on each
        self._server_of: dict[int, int] = {}

    def submit(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            load = min(self._loads)
            index = self._loads.index(load)
            server = self.servers[index]
            if load >= server.max_running:
                return
            sequence = self._waiting.popleft()
            server.run_until(self.now)
            self._server_of[id(sequence)] = index
            server.add(sequence)
            self._changed(index)

    def _changed(self, index: int) -> None:
        server = self.servers[index]
        self._next[index], self._loads[index] = server.next_event(), len(server)

    def next_event(self) -> float | None:
        return min((event for event in self._next if event is not None), default=None)

    def run_until(self, time: float) -> list[tuple[float, Sequence]]:
        """Advances to `time`; the sequences that ended, with when they did."""
        ended: list[tuple[float, Sequence]] = []
        while (event := self.next_event()) is not None and event <= time:
            ended += [(event, sequence) for sequence in self.run_to_event(event)]
        self.now = max(self.now, time)
        return ended

    def run_to_event(self, event: float) -> list[Sequence]:
        """Advances to the next event, which is at `event`; the sequences that ended with it."""
        index = self._next.index(event)
        server, self.now = self.servers[index], event
        ended = server.run_until(event)
        self._changed(index)
        for sequence in ended:
            del self._server_of[id(sequence)]
        if ended:
            self._dispatch()
        return ended

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends these sequences, keeping what they generated."""
        for sequence in sequences:
            index = self._server_of.pop(id(sequence), None)
            if index is None:
                self._waiting.remove(sequence)
            else:
                server = self.servers[index]
                server.run_until(self.now)
                server.remove(sequence)
                self._changed(index)
        self._dispatch()

    def abort_all(self) -> None:
        for index, server in enumerate(self.servers):
            server.run_until(self.now)
            server.clear()
            self._changed(index)
        self._waiting.clear()
        self._server_of.clear()
