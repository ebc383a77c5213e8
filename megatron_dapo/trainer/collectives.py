"""The loop's collectives: rank 0's data, decisions and errors reach every rank, and long waits show that rank 0 lives.

Rank 0 drives the engines, so the other ranks often wait for it. They wait in short broadcasts: rank 0 sends one every
few seconds until its work is done, has failed (every rank raises the same `DriverError`), or is asked to stop (every
rank raises `Stopped`). If rank 0 dies, the others end within one collective timeout, however long sampling may take.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_dapo.config import ConfigError
from megatron_dapo.errors import CheckpointError, EngineError, GateError, LockLost, RankError
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.trainer.signals import Stopped, StopSignal

T = TypeVar("T")
BEAT_SECONDS = 5.0
STOP_CHECK_SECONDS = 0.5
WAITING, DONE, STOPPED, FAILED = range(4)  # a state from FAILED on is FAILED plus an index of KINDS
# Kinds of failures, which rank 0 alone can tell apart: the first that matches.
KINDS: tuple[type[BaseException], ...] = (
    EngineError, ConfigError, LockLost, CheckpointError, GateError, BaseException,
)  # fmt: skip


class DriverError(RankError):
    """Work that rank 0 does for all ranks has failed. Every rank raises it at the same point, and no weight has
    changed. `kind`, one of KINDS, is known on every rank; the error itself only on rank 0."""

    def __init__(self, message: str, kind: type[BaseException] = BaseException) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def by_engine(self) -> bool:
        """The work may succeed when it is repeated."""
        return self.kind is EngineError

    @property
    def may_save(self) -> bool:
        """The run's state may be saved."""
        return self.kind in (EngineError, BaseException)


class Collectives:
    """Every method is called by all ranks, in the same order."""

    def __init__(
        self, runtime: Runtime, stop: StopSignal, mark: Callable[[str, bool], None] = lambda doing, progress: None
    ) -> None:
        """`mark(doing, progress)` tells the watchdog what the loop does, and whether it has made progress."""
        self.runtime, self.stop, self._mark = runtime, stop, mark
        self.driver_progress: Callable[[], int] = lambda: 0  # rank 0: a counter that the rollout thread increments
        self._seen_progress = -1
        self.received_bytes = 0  # by this rank, since the start

    # ---- agreement ----

    def stop_if_requested(self, doing: str) -> None:
        """Raises Stopped on every rank if any rank was asked to stop. The run can be saved where this is called."""
        self._mark(doing, True)
        asked = torch.tensor([self.stop.number], device=self.runtime.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if number := int(asked.item()):
            raise Stopped(doing, number)

    def agree(self, fact: bool) -> bool:
        """Rank 0's view, on every rank."""
        return bool(self._broadcast_number(int(fact)))

    def on_driver(self, work: Callable[[], T], doing: str) -> T | None:
        """Rank 0 runs `work` and gets its result. Its error is a DriverError on every rank."""
        result: T | None = None
        failure: BaseException | None = None
        if self.runtime.rank == 0:
            try:
                result = work()
            except Exception as error:
                failure = error
        self._raise_if_failed(self._broadcast_number(_state_of(failure)), failure, doing)
        return result

    # ---- waiting for rank 0 ----

    def wait(self, future: Future[T] | None, doing: str, *, stoppable: bool = False) -> T | None:
        """Rank 0 passes a future and gets its result; the others pass None. Its error is a DriverError on every rank.

        If the wait is `stoppable`, a stop cancels the future and raises Stopped."""
        self._mark(doing, True)
        while True:
            state, failure = self._look(future, stoppable) if future is not None else (WAITING, None)
            self._mark(doing, future is None or self._has_advanced())
            state = self._broadcast_number(state)
            if state == DONE:
                return future.result() if future is not None else None
            if state == STOPPED:
                raise Stopped(doing, self._broadcast_number(self.stop.number))
            self._raise_if_failed(state, failure, doing)

    def _look(self, future: Future[Any], stoppable: bool) -> tuple[int, BaseException | None]:
        if stoppable and self.stop.number:
            future.cancel()
            return STOPPED, None
        concurrent.futures.wait([future], timeout=STOP_CHECK_SECONDS if stoppable else BEAT_SECONDS)
        if not future.done():
            return WAITING, None
        error = concurrent.futures.CancelledError("it was cancelled") if future.cancelled() else future.exception()
        return _state_of(error), error

    def _has_advanced(self) -> bool:
        progress = self.driver_progress()
        before, self._seen_progress = self._seen_progress, progress
        return progress != before

    def _raise_if_failed(self, state: int, failure: BaseException | None, doing: str) -> None:
        if state < FAILED:
            return
        kind = KINDS[state - FAILED]
        message = self._broadcast_text(str(failure))
        if kind is ConfigError:
            raise ConfigError(message) from failure
        name = self._broadcast_text(type(failure).__name__)
        raise DriverError(f"rank 0 failed while {doing}: {name}: {message}", kind) from failure

    # ---- data ----

    def share_array(self, array: np.ndarray | None) -> np.ndarray | None:
        """One array of rank 0 (or None) on every rank."""
        dtype, length = self._share_header(array)
        if dtype is None:
            return None
        if array is None:
            array = np.empty(length, dtype)
        return self._broadcast(torch.from_numpy(np.ascontiguousarray(array))).numpy()

    def scatter_array(
        self, array: np.ndarray | None, offsets: NDArray[np.int64], shares: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """One array of rank 0 (or None), in which sample i is [offsets[i], offsets[i + 1]). The other ranks receive the
        samples of their data-parallel rank, `shares[dp]`, and have zeros elsewhere. Pages that nobody writes use no
        memory."""
        groups = self.runtime.groups
        if groups.dp.size() == 1:
            return self.share_array(array)
        dtype, length = self._share_header(array)
        if dtype is None:
            return None
        whole = np.zeros(length, dtype) if array is None else array
        places = [[slice(offsets[i], offsets[i + 1]) for i in share] for share in shares]
        mine = places[groups.dp.rank()]
        piece = self._scatter(whole, places) if self.runtime.rank == 0 else np.empty(_size(mine), dtype)
        piece = self._receive_piece(torch.from_numpy(piece).to(self.runtime.device)).cpu().numpy()
        if self.runtime.rank != 0:
            at = 0
            for place in mine:
                end = at + place.stop - place.start
                whole[place] = piece[at:end]
                at = end
        return whole

    def _scatter(self, whole: np.ndarray, places: Sequence[Sequence[slice]]) -> np.ndarray:
        """Rank 0 sends every data-parallel rank its samples, to the first of its ranks; returns rank 0's own."""
        pieces = [np.concatenate([whole[:0], *(whole[place] for place in share)]) for share in places]
        dp = self.runtime.groups.dp
        for index in range(1, dp.size()):
            if pieces[index].size:
                dist.send(torch.from_numpy(pieces[index]).to(self.runtime.device), dist.get_global_rank(dp, index))
        return pieces[0]

    def _receive_piece(self, piece: torch.Tensor) -> torch.Tensor:
        """From rank 0 to the first rank with these samples, then to those that hold parts of the same model."""
        groups = self.runtime.groups
        if not piece.numel():  # fewer samples than data-parallel ranks
            return piece
        if self.runtime.rank != 0:
            self.received_bytes += piece.nbytes
        if groups.cp.rank() == 0:
            if self.runtime.rank != 0 and groups.mp.rank() == 0:
                dist.recv(piece, 0)
            dist.broadcast(piece, dist.get_global_rank(groups.mp, 0), groups.mp)
        dist.broadcast(piece, dist.get_global_rank(groups.cp, 0), groups.cp)
        return piece

    def _share_header(self, array: np.ndarray | None) -> tuple[np.dtype[Any] | None, int]:
        """Type and length of rank 0's array; no type if there is none."""
        kinds = [np.dtype(t) for t in (np.bool_, np.uint8, np.int32, np.int64, np.float32)]
        header = [-1, 0]
        if self.runtime.rank == 0 and array is not None:
            header = [kinds.index(array.dtype), len(array)]
        kind, length = self._broadcast(torch.tensor(header)).tolist()
        return (None if kind < 0 else kinds[kind]), length

    def barrier(self) -> None:
        """Returns when every rank has arrived and its GPU work is done."""
        here = torch.zeros(1, device=self.runtime.device)
        dist.all_reduce(here)
        here.item()

    def _broadcast_number(self, value: int) -> int:
        return int(self._broadcast(torch.tensor([value])).item())

    def _broadcast_text(self, text: str) -> str:
        data = np.frombuffer(text.encode() or b" ", dtype=np.uint8).astype(np.int32)
        found = self.share_array(data if self.runtime.rank == 0 else None)
        assert found is not None
        return found.astype(np.uint8).tobytes().decode()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        on_device = tensor.to(self.runtime.device)
        if self.runtime.rank != 0:
            self.received_bytes += on_device.nbytes
        dist.broadcast(on_device, src=0)
        return on_device.cpu()


def _size(places: Sequence[slice]) -> int:
    return sum(int(place.stop - place.start) for place in places)


def _state_of(error: BaseException | None) -> int:
    if error is None:
        return DONE
    return FAILED + next(index for index, kind in enumerate(KINDS) if isinstance(error, kind))
