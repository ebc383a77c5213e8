"""Whether one server may get requests, and if not, why. The only owner of this: others ask, and report events.

STARTING    it serves nothing until it gets the current weights: updating, its memory released, or failed
SERVING     it serves `version`
SUSPECT     it serves, but a request on it failed: it gets no new ones until it has been checked
RECOVERING  it is new or has failed, and its supervisor starts it and gives it the current weights
GIVEN_UP    its supervisor could not bring it back; it looks for it from time to time
"""

from __future__ import annotations

import random
import time
from enum import Enum, auto

BACKOFF = (0.25, 8.0)  # seconds without requests after a failure: the first time, at most


class Phase(Enum):
    STARTING = auto()
    SERVING = auto()
    SUSPECT = auto()
    RECOVERING = auto()
    GIVEN_UP = auto()


class ServerState:
    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.version: int | None = None  # that it serves
        self.why = ""  # it serves nothing
        self.lost = False  # nothing can bring it back while requests wait for it
        self.last_completion = time.monotonic()
        self._failures = 0  # of requests, since the last that it completed
        self._backoff_until = 0.0

    def serves(self, version: int) -> bool:
        return self.version == version

    def takes_requests(self, version: int, now: float) -> bool:
        return self.phase is Phase.SERVING and self.version == version and self._backoff_until <= now

    @property
    def down(self) -> bool:
        """Its supervisor has not brought it back: a weight update leaves it out and does not wait for it."""
        return self.phase in (Phase.RECOVERING, Phase.GIVEN_UP)

    # ---- events ----

    def served(self, version: int) -> None:
        """It holds all of this version, and may generate with it."""
        self.phase = Phase.SERVING
        self.version = version
        self.why, self.lost = "", False
        self._failures = 0
        self._backoff_until = 0.0

    def withdrawn(self, why: str) -> None:
        """It serves nothing from now on; one that is down stays so."""
        self.version = None
        self.why = why
        if not self.down:
            self.phase = Phase.STARTING

    def suspected(self) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.SUSPECT

    def cleared(self) -> bool:
        """It was checked and works. Whether it had been suspected."""
        was_suspect = self.phase is Phase.SUSPECT
        if was_suspect:
            self.phase = Phase.SERVING
        return was_suspect

    def recovering(self, why: str, *, lost: bool = False) -> None:
        self.withdrawn(why)
        self.phase, self.lost = Phase.RECOVERING, lost

    def recovery_ended(self) -> None:
        """Whatever came of it."""
        if self.phase is Phase.RECOVERING:
            self.phase = Phase.STARTING

    def given_up(self, why: str, *, lost: bool = False) -> None:
        self.withdrawn(why)
        self.phase, self.lost = Phase.GIVEN_UP, lost

    def completed_request(self) -> None:
        self._failures = 0
        self.last_completion = time.monotonic()

    def failed_request(self, now: float, at_least: float = 0.0) -> None:
        """It gets nothing for a while, longer each time until it has completed a request, and for `at_least` seconds
        if it has asked for them."""
        first, longest = BACKOFF
        if self._backoff_until <= now:  # requests that fail together count as one failure
            self._failures += 1
            self._backoff_until = now + min(longest, first * 2 ** (self._failures - 1)) * random.uniform(0.5, 1.0)
        self._backoff_until = max(self._backoff_until, now + at_least)
