"""The running groups of one step: their tasks, waiting for one to end, and aborting all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_dapo.engines.protocol import Engine, EngineError
from megatron_dapo.rollout.group_runner import GroupRunner
from megatron_dapo.rollout.pending_group import PendingGroup

ABORT_REPEAT = 1.0  # seconds between two aborts: a request may have reached the engine after the first
ABORT_TIMEOUT = 120.0


class RunningGroups:
    """`on_end(group, error)` is called once for each group that ends; `error` is None if it ended normally."""

    def __init__(
        self,
        step: int,
        engine: Engine,
        runner: GroupRunner,
        stall_timeout: float,
        on_end: Callable[[PendingGroup, BaseException | None], None],
    ) -> None:
        self._step, self._engine, self._runner = step, engine, runner
        self._stall_timeout, self._on_end = stall_timeout, on_end
        self._tasks: dict[asyncio.Task[None], PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, pending: PendingGroup) -> None:
        self._tasks[asyncio.ensure_future(self._runner.run(pending))] = pending

    async def wait_for_one(self) -> None:
        """Until a group ends. Foreign weights end the wait at once, whatever else is running."""
        while self._tasks:
            finished_before = self._runner.finished_samples
            awaited: set[asyncio.Future[Any]] = {*self._tasks, self._runner.foreign_weights}
            done, _ = await asyncio.wait(awaited, timeout=self._stall_timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._runner.foreign_weights in done:
                raise self._runner.foreign_weights.result()
            if done:
                self._remove_ended()
                return
            if self._runner.finished_samples == finished_before:
                names = ", ".join(repr(pending.group.prompt.id) for pending in list(self._tasks.values())[:3])
                raise EngineError(
                    f"step {self._step}: no sample finished within {self._stall_timeout:.0f} s "
                    f"(rollout.sampler.stall_timeout); {len(self._tasks)} groups are running, among them the prompts "
                    f"{names}"
                )

    async def abort(self) -> None:
        """Aborts all requests and waits until every group has ended."""
        self._runner.stop()
        clock = asyncio.get_running_loop().time
        deadline = clock() + ABORT_TIMEOUT
        while self._tasks:
            if clock() > deadline:
                raise EngineError(
                    f"step {self._step}: {len(self._tasks)} groups did not end within {ABORT_TIMEOUT:.0f} s after "
                    "their requests were aborted"
                )
            await self._engine.abort()
            await asyncio.wait(self._tasks, timeout=ABORT_REPEAT)
            self._remove_ended()

    def cancel(self) -> None:
        """Cancels the tasks of groups that could not be aborted."""
        for task in self._tasks:
            task.cancel()

    def _remove_ended(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._on_end(self._tasks.pop(task), error)
