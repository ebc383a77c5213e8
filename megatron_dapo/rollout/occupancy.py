"""How full the engine was during a step: means over time of requests and groups in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Occupancy:
    """Call `change` after each change of the counts."""

    now: float
    max_running: int
    _groups: int = 0
    _requests: int = 0
    _seconds: float = 0.0
    _group_seconds: float = 0.0
    _request_seconds: float = 0.0

    def change(self, now: float, groups: int, requests: int) -> None:
        """`requests` may include some that queue: only those that the engine runs count."""
        elapsed, self.now = now - self.now, now
        self._seconds += elapsed
        self._group_seconds += elapsed * self._groups
        self._request_seconds += elapsed * self._requests
        self._groups, self._requests = groups, min(requests, self.max_running)

    def metrics(self) -> dict[str, float]:
        seconds = self._seconds or 1.0
        return {
            "rollout/groups_in_flight": self._group_seconds / seconds,
            "rollout/engine_occupancy": self._request_seconds / (seconds * max(1, self.max_running)),
        }
