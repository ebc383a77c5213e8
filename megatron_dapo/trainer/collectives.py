"""The loop's collectives: rank 0's data, decisions and errors reach every rank, and long waits show that rank 0 lives.

Rank 0 drives the engines, so the other ranks often wait for it. They wait in short broadcasts: rank 0 sends one every
few seconds until its work is done, has failed (every rank raises the same `DriverError`), or is asked to stop (every
rank raises `Stopped`). If rank 0 dies, the others end within one collective timeout, however long sampling may take.

All messages and waits use the control group: gloo, on the CPU. A rank that waits in an NCCL call would take GPU time
from colocated engines. Only arrays of `BULK` bytes and more use the device, after all ranks have arrived.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_dapo.config import ConfigError
from megatron_dapo.errors import CheckpointError, EngineError, GateError, LockLost, RankError
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.trainer.signals import Stopped, StopSignal

if TYPE_CHECKING:
    from megatron_dapo.trainer.rollout_driver import RolloutDriver

T = TypeVar("T")
BEAT_SECONDS = 5.0
STOP_CHECK_SECONDS = 0.5
BULK = 1 << 20
WAITING, DONE, STOPPED, FAILED = range(4)  # a state from FAILED on is FAILED plus an index of KINDS
# Kinds of failures, which rank 0 alone can tell apart: the first that matches.
KINDS: tuple[type[BaseException], ...] = (
    EngineError, ConfigError, LockLost, CheckpointError, GateError, BaseException,
)  # fmt: skip
DTYPES = [np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32")]  # of shared arrays


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
        self.runtime = runtime
        self.stop = stop
        self.driver: RolloutDriver | None = None  # rank 0, from the start of the rollout thread on
        self.received_bytes = 0  # by this rank, since the start
        self._mark = mark
        self._seen_progress = -1

    # ---- agreement ----

    def stop_if_requested(self, doing: str) -> None:
        """Raises Stopped on every rank if any rank was asked to stop. The run can be saved where this is called."""
        self._mark(doing, True)
        if number := self._largest(self.stop.number)[0]:
            raise Stopped(doing, number)

    def agree(self, fact: bool) -> bool:
        """Rank 0's view, on every rank."""
        return bool(self._from_driver(int(fact)))

    @contextlib.contextmanager
    def on_driver(self, doing: str) -> Iterator[bool]:
        """`with collectives.on_driver("…") as mine: if mine: …` is work of rank 0; True there. Its error inside the
        block is a DriverError on every rank."""
        failure: BaseException | None = None
        try:
            yield self.runtime.rank == 0
        except Exception as error:
            if self.runtime.rank != 0:
                raise
            failure = error
        self._raise_if_failed(self._from_driver(_state_of(failure)), failure, doing)

    def barrier(self) -> None:
        """Returns when every rank has arrived and its GPU work is done."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        self.arrive()

    def arrive(self) -> None:
        """Returns when every rank has arrived."""
        self._largest(0)

    # ---- waiting for rank 0 ----

    def wait(self, future: Future[T] | None, doing: str, *, stoppable: bool = False) -> T | None:
        """Rank 0 passes a future and gets its result; the others pass None. Its error is a DriverError on every rank.

        If the wait is `stoppable`, a stop cancels the future and raises Stopped."""
        self._mark(doing, True)
        while True:
            state, failure = self._look(future, stoppable) if future is not None else (WAITING, None)
            self._mark(doing, future is None or self._has_advanced())
            state = self._from_driver(state)
            if state == DONE:
                return future.result() if future is not None else None
            if state == STOPPED:
                raise Stopped(doing, self._from_driver(self.stop.number))
            self._raise_if_failed(state, failure, doing)

    def _look(self, future: Future[Any], stoppable: bool) -> tuple[int, BaseException | None]:
        if stoppable and self.stop.number and not future.done():
            future.cancel()
            return STOPPED, None
        concurrent.futures.wait([future], timeout=STOP_CHECK_SECONDS if stoppable else BEAT_SECONDS)
        if not future.done():
            return WAITING, None
        error = concurrent.futures.CancelledError("it was cancelled") if future.cancelled() else future.exception()
        return _state_of(error), error

    def _has_advanced(self) -> bool:
        progress = self.driver.progress if self.driver is not None else 0
        before, self._seen_progress = self._seen_progress, progress
        return progress != before

    def _raise_if_failed(self, state: int, failure: BaseException | None, doing: str) -> None:
        if state < FAILED:
            return
        kind = KINDS[state - FAILED]
        texts = [str(failure), type(failure).__name__]
        dist.broadcast_object_list(texts, src=0, group=self.runtime.control)
        message, name = texts
        if kind is ConfigError:
            raise ConfigError(message) from failure
        raise DriverError(f"rank 0 failed while {doing}: {name}: {message}", kind) from failure

    # ---- data ----

    def share_array(self, array: np.ndarray | None) -> np.ndarray | None:
        """One array of rank 0 (or None) on every rank."""
        found = self._announce(array)
        if found is None:
            return None
        if self.runtime.rank != 0:
            self.received_bytes += found.nbytes
        tensor = torch.from_numpy(np.ascontiguousarray(found))
        if found.nbytes < BULK:
            dist.broadcast(tensor, src=0, group=self.runtime.control)
        else:
            tensor = tensor.to(self.runtime.device)
            dist.broadcast(tensor, src=0)
        return tensor.cpu().numpy()

    def scatter_array(
        self, array: np.ndarray | None, offsets: NDArray[np.int64], shares: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """One array of rank 0 (or None), in which sample i is [offsets[i], offsets[i + 1]). The other ranks receive the
        samples of their data-parallel rank, `shares[dp]`, and have zeros elsewhere. Pages that nobody writes use no
        memory."""
        dp = self.runtime.groups.dp
        if dp.size() == 1:
            return self.share_array(array)
        whole = self._announce(array)
        if whole is None:
            return None
        places = [[slice(offsets[i], offsets[i + 1]) for i in share] for share in shares]
        mine = places[dp.rank()]
        if self.runtime.rank == 0:
            pieces = [np.concatenate([whole[:0], *(whole[place] for place in share)]) for share in places]
            for index in range(1, dp.size()):
                if pieces[index].size:
                    dist.send(torch.from_numpy(pieces[index]).to(self.runtime.device), dist.get_global_rank(dp, index))
            self._receive_piece(torch.from_numpy(pieces[0]).to(self.runtime.device))
            return whole
        sizes = [int(place.stop - place.start) for place in mine]
        piece = torch.from_numpy(np.empty(sum(sizes), whole.dtype)).to(self.runtime.device)
        received = np.split(self._receive_piece(piece).cpu().numpy(), np.cumsum(sizes))[:-1]
        for place, values in zip(mine, received, strict=True):
            whole[place] = values
        return whole

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

    def _announce(self, array: np.ndarray | None) -> np.ndarray | None:
        """Rank 0's array there, an empty one of its type and length elsewhere, or None. All ranks have arrived."""
        header = (-1, 0)
        if self.runtime.rank == 0 and array is not None:
            header = (DTYPES.index(array.dtype), len(array))
        kind, length = self._largest(*header)
        if kind < 0:
            return None
        return array if self.runtime.rank == 0 else np.zeros(length, DTYPES[kind])

    # ---- messages on the CPU ----

    def _largest(self, *values: int) -> list[int]:
        """Each value's maximum over the ranks. Returns when every rank has arrived."""
        found = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.runtime.control)
        return found.tolist()

    def _from_driver(self, value: int) -> int:
        found = torch.tensor([value])
        dist.broadcast(found, src=0, group=self.runtime.control)
        return int(found.item())


def _state_of(error: BaseException | None) -> int:
    if error is None:
        return DONE
    return FAILED + next(index for index, kind in enumerate(KINDS) if isinstance(error, kind))
