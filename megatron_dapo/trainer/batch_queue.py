"""The batches that are collected ahead of the trainer, in the rollout thread of rank 0.

One task collects batch after batch, up to the step that `run_to` names. Version N is the policy after N steps and batch
N is trained at version N, so admission control is one comparison: batch N may start when the engines serve version
N − max_staleness or a newer one. A token that is generated after that is at most `max_staleness` versions old when it
is trained on, whatever happens in between.

- Batches are complete in the order of their steps. A batch stays here until the trainer has made a step of it.
- `interrupt` ends the collection so that nothing runs. What a batch has so far is in the sampler's state, and
  `run_to` continues it. `state` may be called only then.
- An error of the collection is raised by everybody who waits for a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_dapo.types import StepBatch


class BatchQueue:
    """All methods but `has`, `remove`, `state` and `restore` run in the event loop of the rollout thread."""

    def __init__(
        self, collect: Callable[[int], Awaitable[StepBatch]], weight_version: Callable[[], int], max_staleness: int
    ) -> None:
        self._collect, self._weight_version, self._max_staleness = collect, weight_version, max_staleness
        self._complete: dict[int, StepBatch] = {}
        self._next = 0  # the step whose batch is collected next
        self._last = -1  # the last step whose batch may be collected now
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    # ---- collecting ----

    def run_to(self, step: int) -> None:
        """Collects batches up to that of `step`, or of a later step that an earlier call named; returns at once."""
        self._last = max(self._last, step)
        if self._task is None and self._error is None and self._next <= self._last:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._next <= self._last:
                while self._weight_version() < self._next - self._max_staleness:
                    await self._changed.wait()
                batch = await self._collect(self._next)
                # No await between the two: a batch that is complete is never lost.
                self._complete[self._next] = batch
                self._next += 1
                self.notify()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
        finally:
            self._task = None
            self.notify()

    def notify(self) -> None:
        """Everything that waits here looks again: a batch is complete, or the engines serve another version."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def get(self, step: int) -> StepBatch:
        """The batch of `step`, as soon as it is complete. It stays in the queue."""
        while step not in self._complete:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._complete[step]

    async def idle(self) -> None:
        """Returns when every batch that `run_to` asked for is complete."""
        while self._task is not None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def interrupt(self) -> None:
        if self._task is not None:
            task = self._task
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # ---- from the main thread ----

    @property
    def collecting(self) -> bool:
        return self._task is not None

    def has(self, step: int) -> bool:
        return step in self._complete

    def remove(self, step: int) -> None:
        """The trainer has made a step of this batch."""
        self._complete.pop(step, None)

    def state(self) -> list[dict[str, Any]]:
        """The complete batches. Call while nothing is collected."""
        return [self._complete[step].to_state() for step in sorted(self._complete)]

    def restore(self, state: list[dict[str, Any]], next_step: int) -> None:
        """`next_step`: the first step whose batch is neither here nor with the trainer."""
        batches = [StepBatch.from_state(batch) for batch in state]
        self._complete = {batch.step: batch for batch in batches}
        self._next = next_step
