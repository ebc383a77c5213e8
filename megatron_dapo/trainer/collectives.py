"""The loop's collectives: rank 0's data, decisions and errors reach every rank, and long waits show that rank 0 lives.

Rank 0 drives the engines, so the other ranks often wait for it. They wait in short broadcasts: rank 0 sends one every
few seconds until its work is done, has failed (every rank raises the same `DriverError`), or is asked to stop (every
rank raises `Stopped`). If rank 0 dies, the others end within one collective timeout, however long sampling may take.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.config import ConfigError
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.checkpoint_files import CheckpointError
from megatron_dapo.policy.runtime import RankError, Runtime
from megatron_dapo.trainer.caller_thread import CallerThread
from megatron_dapo.trainer.run_lock import LockLost
from megatron_dapo.trainer.signals import Stopped, StopSignal

T = TypeVar("T")
BEAT_SECONDS = 5.0
STOP_CHECK_SECONDS = 0.5
WAITING, DONE, STOPPED, FAILED = range(4)  # a state from FAILED on is FAILED plus an index of KINDS
# Kinds of failures, which rank 0 alone can tell apart: the first that matches.
KINDS: tuple[type[BaseException] | tuple[type[BaseException], ...], ...] = (
    EngineError,
    ConfigError,
    (LockLost, CheckpointError),
    BaseException,
)


class DriverError(RankError):
    """Work that rank 0 does for all ranks has failed. Every rank raises it at the same point, and no weight has
    changed. `by_engine`: the work may succeed when it is repeated. `may_save`: the run's state may be saved."""

    def __init__(self, message: str, *, by_engine: bool = False, may_save: bool = True) -> None:
        super().__init__(message)
        self.by_engine, self.may_save = by_engine, may_save


class Collectives:
    """Every method is called by all ranks, in the same order."""

    def __init__(
        self, runtime: Runtime, stop: StopSignal, mark: Callable[[str, bool], None] = lambda doing, progress: None
    ) -> None:
        """`mark(doing, progress)` tells the watchdog what the loop does, and whether it has made progress."""
        self.runtime, self.stop, self._mark = runtime, stop, mark
        self.driver_progress: Callable[[], int] = lambda: 0  # rank 0: a counter that the rollout thread increments
        self._seen_progress = -1

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

    def wait(
        self, future: Future[T] | None, doing: str, *, stoppable: bool = False, caller: CallerThread | None = None
    ) -> T | None:
        """Rank 0 passes a future and gets its result; the others pass None. Its error is a DriverError on every rank.

        If the wait is `stoppable`, a stop cancels the future and raises Stopped. Calls that the work submits to
        `caller` run in this thread meanwhile."""
        self._mark(doing, True)
        while True:
            state, failure = self._look(future, stoppable, caller) if future is not None else (WAITING, None)
            self._mark(doing, future is None or self._has_advanced())
            state = self._broadcast_number(state)
            if state == DONE:
                return future.result() if future is not None else None
            if state == STOPPED:
                raise Stopped(doing, self._broadcast_number(self.stop.number))
            self._raise_if_failed(state, failure, doing)

    def _look(
        self, future: Future[Any], stoppable: bool, caller: CallerThread | None
    ) -> tuple[int, BaseException | None]:
        if stoppable and self.stop.number:
            future.cancel()
            return STOPPED, None
        seconds = STOP_CHECK_SECONDS if stoppable else BEAT_SECONDS
        if caller is not None:
            caller.run(until=future.done, timeout=seconds)
        else:
            concurrent.futures.wait([future], timeout=seconds)
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
        raise DriverError(
            f"rank 0 failed while {doing}: {name}: {message}",
            by_engine=kind is EngineError,
            may_save=kind in (EngineError, BaseException),
        ) from failure

    # ---- data ----

    def share_batch(self, batch: TrainBatch | None, mini: list[list[int]] | None) -> tuple[TrainBatch, list[list[int]]]:
        """Rank 0's batch and its mini-batches on every rank."""
        arrays: list[Any] = [None] * len(fields(TrainBatch))
        if batch is not None:
            arrays = [getattr(batch, f.name) for f in fields(TrainBatch)]
        found = [self.share_array(array) for array in arrays]
        sizes = self.share_array(None if mini is None else np.array([len(m) for m in mini], dtype=np.int64))
        assert sizes is not None
        edges = np.concatenate([[0], np.cumsum(sizes)])
        indices = [list(range(a, b)) for a, b in pairwise(edges)]
        return TrainBatch(*found), indices  # type: ignore[arg-type]

    def share_array(self, array: np.ndarray | None) -> np.ndarray | None:
        """One array of rank 0 (or None) on every rank."""
        kinds = [np.dtype(t) for t in (np.bool_, np.int32, np.int64, np.float32)]
        header = [-1, 0]
        if self.runtime.rank == 0 and array is not None:
            header = [kinds.index(array.dtype), len(array)]
        kind, length = self._broadcast(torch.tensor(header)).tolist()
        if kind < 0:
            return None
        if array is None:
            array = np.zeros(length, kinds[kind])
        return self._broadcast(torch.from_numpy(np.ascontiguousarray(array))).numpy()

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
        dist.broadcast(on_device, src=0)
        return on_device.cpu()


def _state_of(error: BaseException | None) -> int:
    if error is None:
        return DONE
    return FAILED + next(index for index, kind in enumerate(KINDS) if isinstance(error, kind))
