"""The running groups of one step: their tasks, waiting for one to end, and aborting all of them.

A group that ends adds itself to a queue, so waiting costs the same with ten groups as with ten thousand.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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
        self._ended: deque[asyncio.Task[None]] = deque()
        self._changed = asyncio.Event()
        runner.foreign_weights.add_done_callback(lambda _: self.wake())

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, pending: PendingGroup) -> None:
        task = asyncio.ensure_future(self._runner.run(pending))
        self._tasks[task] = pending
        task.add_done_callback(self._add_ended)

    def wake(self) -> None:
        """Ends a `wait` although no group has ended."""
        self._changed.set()

    async def wait(self) -> None:
        """Until a group ends or `wake` is called. Foreign weights end the wait at once, whatever else is running."""
        while self._tasks:
            finished_before = self._runner.finished_samples
            if await self._wait_for_change(self._stall_timeout):
                if self._runner.foreign_weights.done():
                    raise self._runner.foreign_weights.result()
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
        clock = asyncio.get_running_loop().time
        deadline = clock() + ABORT_TIMEOUT
        self._runner.stop()
        while self._tasks:
            if clock() > deadline:
                raise EngineError(
                    f"step {self._step}: {len(self._tasks)} groups did not end within {ABORT_TIMEOUT:.0f} s after "
                    "their requests were aborted"
                )
            await self._engine.abort()
            await asyncio.wait(self._tasks, timeout=ABORT_REPEAT)
            self._remove_ended()
            self._runner.stop()  # rollout functions that have generated a turn in the meantime

    def cancel(self) -> None:
        """Cancels the tasks of groups that could not be aborted."""
        for task in self._tasks:
            task.cancel()

    async def _wait_for_change(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _add_ended(self, task: asyncio.Task[None]) -> None:
        self._ended.append(task)
        self._changed.set()

    def _remove_ended(self) -> None:
        while self._ended:
            task = self._ended.popleft()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._on_end(self._tasks.pop(task), error)
