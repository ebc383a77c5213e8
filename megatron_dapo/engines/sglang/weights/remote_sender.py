"""Sending weights from ranks other than rank 0. Rank 0 talks to the servers and says what to do (`SenderLink`).

- join: this rank is the source of a process group of its own to all engine ranks, and broadcasts its buckets in it. The
  next bucket is gathered meanwhile.
- share: this rank pickles a reference to its buckets' memory, and rank 0 gives it to the engines on this rank's node.

Buckets are read to their end whatever happens, because gathering one is a collective of the training ranks. An error
here is reported to rank 0, which fails the update for all servers: none of them serves a part of a version.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.engines.sglang.weights.process_group import GroupSource
from megatron_dapo.engines.sglang.weights.shared_bucket import SharedBucket, share
from megatron_dapo.sync.bucket import FlatBucket
from megatron_dapo.sync.sender_link import POLL, SenderLink, UpdateFailed


class RemoteSender:
    """Kept between updates: a process group is used again while the servers stay the same."""

    def __init__(self) -> None:
        self._group: GroupSource | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._sending: Future[None] | None = None
        self._shared: list[tuple[int, SharedBucket]] = []  # the engines may still read them

    def send(self, buckets: Iterable[Bucket], link: SenderLink) -> str:
        """Returns the cause if the update failed."""
        plan: dict[str, Any] | None = None
        failure = ""
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
            except Exception as error:
                failure = self._give_up(error, link)
        if not failure:
            try:
                self._finish(link)
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
        while len(self._shared):
            link.wait_done(self._shared[0][0])
            del self._shared[0]

    def _share(self, number: int, bucket: FlatBucket, link: SenderLink, pack_experts: bool) -> None:
        """Before the memory of a bucket is used again, two buckets later, the engines must have loaded it."""
        self._shared.append((number, share(bucket, pack_experts=pack_experts)))
        link.put_payload(number, self._shared[-1][1].payload)
        while len(self._shared) > 1:
            link.wait_done(self._shared[0][0])
            del self._shared[0]

    def _give_up(self, error: Exception, link: SenderLink) -> str:
        if not isinstance(error, UpdateFailed):
            link.report(f"{type(error).__name__}: {error}")
        self.close()
        return str(error)
