"""What rank 0 knows reaches all ranks; and while it waits for something, the others know that it is alive.

Rank 0 drives the engines, so the other ranks often wait for it. They wait in short broadcasts: rank 0 sends a beat
every few seconds until it is done, has failed (the reason travels along and every rank raises it), or is asked to
stop. A rank 0 that is gone therefore ends the others within one collective timeout, however long sampling may take.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.runtime import RankError, Runtime
from megatron_dapo.trainer.signals import Stopped, StopSignal

T = TypeVar("T")
BEAT_SECONDS = 5.0
WAITING, DONE, FAILED, STOPPED = range(4)


class Together:
    """The collectives of the loop. Every method is called by all ranks, in the same order."""

    def __init__(self, runtime: Runtime, stop: StopSignal, mark: Callable[[str], None] = lambda doing: None) -> None:
        """`mark` is told that the loop goes on, and with what."""
        self.runtime, self.stop, self._mark = runtime, stop, mark

    def stop_requested(self) -> bool:
        """Whether any rank has been asked to stop."""
        self._mark("training")
        asked = torch.tensor([int(bool(self.stop.received))], device=self.runtime.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())

    def wait(self, future: Future[T] | None, doing: str, *, stoppable: bool = False) -> T | None:
        """Rank 0 passes a future and gets its result; the others pass None. Its error is everybody's error."""
        while True:
            self._mark(doing)
            state, error = self._look(future, stoppable) if future is not None else (WAITING, None)
            state = self._broadcast_number(state)
            if state == DONE:
                return future.result() if future is not None else None
            if state == FAILED:
                reason = self._broadcast_text("" if error is None else f"{type(error).__name__}: {error}")
                raise RankError(f"rank 0 failed while {doing}: {reason}") from error
            if state == STOPPED:
                raise Stopped(doing)

    def _look(self, future: Future[Any], stoppable: bool) -> tuple[int, BaseException | None]:
        if stoppable and self.stop.received:
            future.cancel()
            return STOPPED, None
        try:
            future.result(timeout=BEAT_SECONDS if not stoppable else 0.5)
        except FutureTimeout:
            if not future.done():
                return WAITING, None
            return FAILED, future.exception()
        except (Exception, CancelledError) as error:
            return FAILED, error
        return DONE, None

    def share_batch(self, batch: TrainBatch | None, mini: list[list[int]] | None) -> tuple[TrainBatch, list[list[int]]]:
        """Rank 0's mini-batches on every rank."""
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
