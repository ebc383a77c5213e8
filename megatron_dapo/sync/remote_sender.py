"""Sending weights from several ranks. Rank 0 alone talks to the servers; it posts a plan, which tells the other
senders how to reach the engines (`SenderLink`, through the trainer's key-value store):

- join: a rank is the source of a process group of its own to all engine ranks (`GroupSource`), and broadcasts its
  buckets in it. The next bucket is gathered meanwhile.
- share: a rank pickles a reference to its buckets' memory, and rank 0 gives it to the engines on that rank's node.

Buckets are read to their end whatever happens, because gathering one is a collective of the training ranks. A sender
reports its error to rank 0, which fails the update for all servers: none of them serves a part of a version. Each side
notices within `POLL` seconds, so nobody waits for a transfer that will not happen.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket, FlatBucket
from megatron_dapo.sync.shared_bucket import SharedBucket, share

POLL = 0.5  # seconds


class UpdateFailed(EngineError):
    """The update has failed elsewhere; this rank sends nothing more."""


class SenderLink:
    """One update. `ranks`: the ranks that send, rank 0 perhaps among them."""

    def __init__(self, store: dist.Store, rank: int, ranks: list[int], update: int, timeout: float) -> None:
        self._store = dist.PrefixStore(f"weights/{update}", store)
        self.rank = rank
        self.ranks = ranks
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
        return self._take(f"payload/{number}/{rank}", f"rank {rank} has not prepared bucket {number}")

    def checksums(self, rank: int) -> dict[str, tuple[int, int]]:
        """Of the tensors that rank `rank` has sent."""
        return dict(json.loads(self._take(f"checksums/{rank}", f"rank {rank} has not sent its checksums")))

    def done(self, number: int) -> None:
        """The memory of bucket `number` may be used again."""
        self._store.set(f"done/{number}", "")

    def _take(self, key: str, otherwise: str) -> str:
        """Once: the store would keep it until the run ends."""
        found = self._wait(key, self._raise_error, otherwise)
        self._store.delete_key(key)
        return found

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

    def put_checksums(self, sums: dict[str, tuple[int, int]]) -> None:
        self._store.set(f"checksums/{self.rank}", json.dumps(sums))

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


def host_store(address: str, timeout: float) -> dist.TCPStore:
    """Where the members of the groups meet, on any free port. The servers connect to it by themselves."""
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(address, 0, is_master=True, timeout=wait, wait_for_workers=False, multi_tenant=True)


class GroupSource:
    """Rank 0 of a process group from which weights are broadcast; the engine ranks follow."""

    def __init__(self, name: str, backend: str, timeout: float) -> None:
        self.name = name
        self._backend = backend
        self._timeout = timedelta(seconds=timeout)
        self._device = "cuda" if backend == "nccl" else "cpu"
        self._group: Any = None

    def join(self, address: str, port: int, world: int) -> None:
        """Returns when all members have joined."""
        store = dist.TCPStore(address, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
        # Servers create their side with the same helper; torch has no public call that leaves the default group alone.
        self._group, _ = dist.distributed_c10d._new_process_group_helper(
            world, 0, [], dist.Backend(self._backend), dist.PrefixStore(self.name, store),
            group_name=dist.distributed_c10d.GroupName(self.name), timeout=self._timeout,
        )  # fmt: skip
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world)}

    def send(self, flat: Tensor) -> None:
        flat = flat.to(self._device)
        dist.broadcast(flat, 0, group=self._group)
        if self._device == "cuda":
            torch.cuda.current_stream(flat.device).synchronize()

    def leave(self) -> None:
        """Also ends a transfer that hangs, as far as the backend can."""
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):
                group.abort()
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)


class RemoteSender:
    """Kept between updates: a process group is used again while the servers stay the same."""

    def __init__(self, checksums_of: Callable[[FlatBucket], Any] = lambda bucket: None) -> None:
        """`checksums_of`: of a bucket that this rank sends; its result has a method `read`."""
        self._checksums_of = checksums_of
        self._group: GroupSource | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._sending: Future[None] | None = None
        self._shared: list[tuple[int, SharedBucket]] = []  # the engines may still read them

    def send(self, buckets: Iterable[Bucket], link: SenderLink) -> str:
        """Returns the cause if the update failed."""
        plan: dict[str, Any] | None = None
        failure = ""
        sent: list[Any] = []
        for number, bucket in enumerate(buckets):
            if failure or not isinstance(bucket, FlatBucket):
                continue
            try:
                if plan is None:
                    plan = link.plan()
                    self._follow(plan, link)
                if plan["action"] == "share":
                    self._share(number, bucket, link, plan["pack_experts"])
                else:
                    self._finish(link)
                    assert self._thread is not None and self._group is not None
                    self._sending = self._thread.submit(self._group.send, bucket.flat)
                if plan.get("checksums"):
                    sent.append(self._checksums_of(bucket))
            except Exception as error:
                failure = self._give_up(error, link)
        if not failure:
            try:
                self._finish(link)
                if sent:
                    link.put_checksums({name: sums for one in sent for name, sums in one.read().items()})
            except Exception as error:
                failure = self._give_up(error, link)
        self._shared.clear()
        return failure

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._group = self._thread = self._sending = None

    def _follow(self, plan: dict[str, Any], link: SenderLink) -> None:
        if plan["action"] != "join":
            return
        self.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        self._group = GroupSource(plan["names"][str(link.rank)], plan["backend"], plan["timeout"])
        self._sending = self._thread.submit(self._group.join, plan["address"], plan["port"], plan["world"])
        self._finish(link)
        link.joined()

    def _finish(self, link: SenderLink) -> None:
        """Waits until the transfer that runs has ended."""
        while self._sending is not None:
            try:
                self._sending.result(timeout=POLL)
                self._sending = None
            except concurrent.futures.TimeoutError:
                link.raise_if_failed()
        self._wait_until_loaded(0, link)

    def _share(self, number: int, bucket: FlatBucket, link: SenderLink, pack_experts: bool) -> None:
        """Before the memory of a bucket is used again, two buckets later, the engines must have loaded it."""
        self._shared.append((number, share(bucket, pack_experts=pack_experts)))
        link.put_payload(number, self._shared[-1][1].payload)
        self._wait_until_loaded(1, link)

    def _wait_until_loaded(self, all_but: int, link: SenderLink) -> None:
        while len(self._shared) > all_but:
            link.wait_done(self._shared[0][0])
            del self._shared[0]

    def _give_up(self, error: Exception, link: SenderLink) -> str:
        if not isinstance(error, UpdateFailed):
            link.report(f"{type(error).__name__}: {error}")
        self.close()
        return str(error)
