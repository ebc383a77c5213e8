"""How rank 0 and the other ranks that send weights coordinate one update: through the trainer's key-value store.

Rank 0 alone talks to the servers. It posts a plan, which tells the other senders how to reach the engines. A sender
reports its error, and rank 0 announces when the update has failed; each side notices within `POLL` seconds, so nobody
waits for a transfer that will not happen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_dapo.errors import EngineError

POLL = 0.5  # seconds


class UpdateFailed(EngineError):
    """The update has failed elsewhere; this rank sends nothing more."""


class SenderLink:
    """One update. `ranks`: the ranks that send, rank 0 perhaps among them."""

    def __init__(self, store: dist.Store, rank: int, ranks: list[int], update: int, timeout: float) -> None:
        self._store, self.rank, self.ranks = dist.PrefixStore(f"weights/{update}", store), rank, ranks
        self._timeout = timeout

    # ---- rank 0 ----

    def post_plan(self, plan: dict[str, Any]) -> None:
        self._store.set("plan", json.dumps(plan))

    def fail(self, cause: str) -> None:
        """The other senders stop. Repeatable."""
        self._store.set("failed", cause)

    def error(self) -> str:
        """The error of a sender, or an empty string."""
        for rank in self.ranks:
            if rank and self._store.check([f"error/{rank}"]):
                return f"rank {rank}: {self._store.get(f'error/{rank}').decode()}"
        return ""

    def wait_joined(self, rank: int) -> None:
        self._wait(f"joined/{rank}", self._raise_error, f"rank {rank} has not joined the process group of the weights")

    def payload(self, number: int, rank: int) -> str:
        """What rank `rank` has prepared of bucket `number`."""
        key = f"payload/{number}/{rank}"
        found = self._wait(key, self._raise_error, f"rank {rank} has not prepared bucket {number}")
        self._store.delete_key(key)
        return found

    def done(self, number: int) -> None:
        """The memory of bucket `number` may be used again."""
        self._store.set(f"done/{number}", "")

    def _raise_error(self) -> None:
        if error := self.error():
            raise EngineError(error)

    # ---- the other senders ----

    def plan(self) -> dict[str, Any]:
        return dict(json.loads(self._wait("plan", self.raise_if_failed, "rank 0 has not posted a plan")))

    def joined(self) -> None:
        self._store.set(f"joined/{self.rank}", "")

    def put_payload(self, number: int, payload: str) -> None:
        self._store.set(f"payload/{number}/{self.rank}", payload)

    def wait_done(self, number: int) -> None:
        self._wait(f"done/{number}", self.raise_if_failed, f"the engines have not loaded bucket {number}")

    def report(self, cause: str) -> None:
        self._store.set(f"error/{self.rank}", cause)

    def raise_if_failed(self) -> None:
        if self._store.check(["failed"]):
            raise UpdateFailed(self._store.get("failed").decode())

    # ---- both ----

    def _wait(self, key: str, check: Callable[[], None], otherwise: str) -> str:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._store.wait([key], timedelta(seconds=POLL))
                return self._store.get(key).decode()
            except RuntimeError:  # torch's error for a wait that took too long
                check()
            if time.monotonic() > deadline:
                raise EngineError(f"{otherwise} after {self._timeout:g} s (rollout.weights.timeout)")
