"""Runs one group: generates the samples of one prompt and grades each at once.

A sample is finished when it is graded. Without a rollout function a response is one generated turn. With one, the
function makes the response in a conversation, and the samples of a rollout are finished together. When the group filter
rejects a group early, its remaining samples are aborted and stay unfinished.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_dapo.algorithm.filtering import EarlyRejection
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Generator
from megatron_dapo.errors import EngineError
from megatron_dapo.rollout.accounting import GroupEvents
from megatron_dapo.rollout.agents.conversation import Conversation, ReplayMismatch, RolloutInterrupted
from megatron_dapo.rollout.agents.functions import RolloutFunction, with_rewards
from megatron_dapo.rollout.generation import Generation, TurnRequest
from megatron_dapo.rollout.pending_group import PendingGroup
from megatron_dapo.types import Grade, Prompt, Sample

Grader = Callable[[Prompt, Sample], Awaitable[Grade]]
Ended = tuple[PendingGroup, BaseException | None]  # a group that has ended, and its error


@dataclass(eq=False)
class GroupRunner:
    """Shared by all groups of one step. After `stop`, aborted samples stay unfinished instead of being continued."""

    engine: Generator
    grade: Grader
    config: RolloutConfig
    reject_early: EarlyRejection | None
    events: GroupEvents
    function: RolloutFunction | None
    requests: int = 0  # rollouts that need the engine: not complete, and not waiting for a tool between two turns
    _request_ids: dict[int, set[str]] = field(default_factory=dict)  # in the engine, by the group's serial
    _conversations: dict[asyncio.Task[Grade | None], tuple[PendingGroup, Conversation]] = field(default_factory=dict)
    _awaited: set[asyncio.Future[Grade]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.generation = Generation(self.engine, self.config, self.events)

    @property
    def per_request(self) -> float:
        """Rollouts in flight for each that needs the engine: more than 1 where others wait for tools. If they would
        have to start again in the next step, there should not be more of them: 1."""
        if self.function is None or self.function.resume == "restart":
            return 1.0
        return max(1.0, len(self._conversations) / max(1, self.requests))

    def stop(self) -> None:
        """May be called again: a rollout function is cancelled while it does not generate."""
        self.generation.stopping = True
        self._cancel_functions(lambda pending: True)

    def interrupt(self) -> None:
        """Before tasks are cancelled from outside: what the conversations have so far is kept."""
        for _, conversation in self._conversations.values():
            conversation.interrupted = True

    def leave_grading(self) -> None:
        """Samples are still being graded, and the next step takes their grades."""
        for awaited in self._awaited:
            awaited.cancel()

    def _cancel_functions(self, ended: Callable[[PendingGroup], object]) -> None:
        for task, (pending, conversation) in self._conversations.items():
            if not conversation.generating and ended(pending):
                conversation.interrupted = True
                task.cancel()

    def _check_early(self, pending: PendingGroup) -> None:
        """After each grade: the filter may reject the group although it has unfinished samples."""
        if self.reject_early and pending.group.samples:
            pending.rejected = self.reject_early(pending.group)

    def run(self, pending: PendingGroup) -> Coroutine[Any, Any, None]:
        """Finishes every rollout of the group, or leaves some unfinished after `stop` or an early rejection. Raises the
        first error. The rollouts count as requests at once, before the coroutine starts."""
        todo = pending.unfinished_rollouts
        self.requests += len(todo)
        return self._run(pending, todo)

    async def _run(self, pending: PendingGroup, todo: list[list[Sample]]) -> None:
        self._request_ids[pending.serial] = set()
        self._check_early(pending)  # it may have been carried over with some samples graded
        results = await asyncio.gather(*(self._run_rollout(pending, s) for s in todo), return_exceptions=True)
        del self._request_ids[pending.serial]
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _run_rollout(self, pending: PendingGroup, samples: list[Sample]) -> None:
        conversation, grading = pending.being_graded.pop(samples[0].index, (None, None))
        grade, load = None, _EngineLoad(self)
        try:
            if grading is not None:
                complete = True
            elif self.function is None:
                if samples[0].turns:  # of a rollout function that the configuration no longer names
                    self._restart(pending, samples)
                request = self.generation.whole_response(samples[0], _name(pending, samples[0]))
                complete = await self._extend(pending, samples[0], request)
            else:
                complete, conversation, grade = await self._converse(pending, samples, self.function, load)
        finally:
            load.set(False)
        if not complete:
            return
        if grade is None:
            grading = grading or asyncio.ensure_future(self.grade(pending.group.prompt, samples[-1]))
            if (grade := await self._awaited_grade(grading)) is None:
                pending.being_graded[samples[0].index] = conversation, grading
                return
        given, grade = grade, grade.checked()
        if conversation is not None:
            grade = with_rewards(grade, conversation)
        if grade.ungraded and not given.ungraded:
            self.events.accounting.rejected_grades += 1
        for sample in samples:
            sample.grade = grade
        self._check_early(pending)
        self.events.finished()
        if not pending.finished and pending.rejected:
            self._cancel_functions(lambda other: other is pending)
            await asyncio.gather(*(self.engine.abort(name) for name in self._request_ids[pending.serial]))

    async def _awaited_grade(self, grading: asyncio.Future[Grade]) -> Grade | None:
        """None after `leave_grading`."""
        awaited = asyncio.shield(grading)
        self._awaited.add(awaited)
        try:
            return await awaited
        except asyncio.CancelledError:
            if self.generation.stopping:
                return None
            raise
        finally:
            self._awaited.discard(awaited)

    async def _extend(self, pending: PendingGroup, sample: Sample, request: TurnRequest) -> bool:
        requests = self._request_ids[pending.serial]
        return await self.generation.generate(sample, request, pending, requests)

    async def _converse(
        self, pending: PendingGroup, samples: list[Sample], function: RolloutFunction, load: _EngineLoad
    ) -> tuple[bool, Conversation | None, Grade | None]:
        """Whether the function returned; its conversation and grade."""
        if function.resume == "restart":
            self._restart(pending, samples)
        while True:
            conversation = Conversation(
                pending.group.prompt, samples, partial(self._extend_turn, pending, load), function.tokenizer,
                max_response_tokens=self.config.max_response_tokens, stop=self.config.stop,
                name=_name(pending, samples[0]), on_new_sample=pending.add_part,
            )  # fmt: skip
            task = asyncio.ensure_future(function(conversation))
            self._conversations[task] = pending, conversation
            # The tools of an interrupted rollout may run again before it generates.
            tool = asyncio.get_running_loop().call_later(TOOL_SECONDS, load.ended_unless, conversation)
            try:
                return True, conversation, await task
            except RolloutInterrupted:
                return False, None, None
            except ReplayMismatch:
                self._restart(pending, samples)
            except asyncio.CancelledError:
                if self.generation.stopping or pending.rejected:
                    return False, None, None
                raise
            finally:
                tool.cancel()
                del self._conversations[task]

    async def _extend_turn(
        self, pending: PendingGroup, load: _EngineLoad, sample: Sample, request: TurnRequest
    ) -> bool:
        load.set(True)
        try:
            return not self.generation.stopping and await self._extend(pending, sample, request)
        finally:
            load.set(False)

    def add_load(self, requests: int) -> None:
        self.requests += requests
        self.events.generated(self.requests)

    def _restart(self, pending: PendingGroup, samples: list[Sample]) -> None:
        tokens = sum(sample.trained_tokens for sample in samples)
        if not samples[0].turns and not tokens:
            return
        self.events.restarted(tokens)
        pending.restart(samples)


TOOL_SECONDS = 0.1  # a rollout that starts and has not generated by then waits for a tool


class _EngineLoad:
    """Whether one rollout needs the engine; at first it does."""

    def __init__(self, runner: GroupRunner) -> None:
        self._runner = runner
        self._needs_engine = True

    def set(self, needs_engine: bool) -> None:
        change, self._needs_engine = needs_engine - self._needs_engine, needs_engine
        if change:
            self._runner.add_load(change)

    def ended_unless(self, conversation: Conversation) -> None:
        """It generates by now."""
        if not conversation.generating:
            self.set(False)


def _name(pending: PendingGroup, sample: Sample) -> str:
    return f"step{pending.step + 1}-group{pending.serial}-sample{sample.index}"


ABORT_REPEAT = 1.0  # seconds between two aborts: a request may have reached the engine after the first
ABORT_TIMEOUT = 120.0
GRADING_TIMEOUT = 5.0  # seconds that a run that ends waits for grades


class RunningGroups:
    """The running groups of one step: their tasks, waiting for one to end, and aborting all of them."""

    def __init__(self, step: int, runner: GroupRunner) -> None:
        self._step = step
        self._runner = runner
        self._stall_timeout = runner.config.sampler.stall_timeout
        self._tasks: dict[asyncio.Task[None], PendingGroup] = {}
        self._ended: deque[asyncio.Task[None]] = deque()
        self._changed = runner.events.changed
        runner.generation.foreign_weights.add_done_callback(lambda _: self._changed.set())

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, pending: PendingGroup) -> None:
        task = asyncio.ensure_future(self._runner.run(pending))
        self._tasks[task] = pending
        task.add_done_callback(self._add_ended)

    async def wait(self) -> list[Ended]:
        """Until a rollout is finished, a group ends, or a place in the engine is free that the step waits for; returns
        the groups that have ended. Foreign weights end the wait at once, whatever else is running."""
        if not self._tasks:
            return []
        try:
            async with asyncio.timeout(self._stall_timeout):
                await self._changed.wait()
        except TimeoutError:
            names = ", ".join(repr(pending.group.prompt.id) for pending in list(self._tasks.values())[:3])
            raise EngineError(
                f"step {self._step + 1}: no sample finished within {self._stall_timeout:.0f} s "
                f"(rollout.sampler.stall_timeout); {len(self._tasks)} groups are running, among them the prompts "
                f"{names}"
            ) from None
        self._changed.clear()
        if self._runner.generation.foreign_weights.done():
            raise self._runner.generation.foreign_weights.result()
        return self._take_ended()

    async def abort(self, *, grading_timeout: float = GRADING_TIMEOUT) -> list[Ended]:
        """Aborts all requests and waits until every group has ended; returns them. Samples that are being graded after
        `grading_timeout` stay unfinished."""
        ended = self._take_ended()
        clock = asyncio.get_running_loop().time
        began = clock()
        self._runner.stop()
        while self._tasks:
            if clock() > began + grading_timeout:
                self._runner.leave_grading()
            if clock() > began + ABORT_TIMEOUT:
                raise EngineError(
                    f"step {self._step + 1}: {len(self._tasks)} groups did not end within {ABORT_TIMEOUT:.0f} s after "
                    "their requests were aborted"
                )
            await self._runner.engine.abort()
            await asyncio.wait(self._tasks, timeout=ABORT_REPEAT)
            ended += self._take_ended()
            self._runner.stop()  # rollout functions that have generated a turn in the meantime
        return ended

    def cancel(self) -> None:
        """Cancels the tasks of groups that could not be aborted."""
        self._runner.interrupt()
        for task in self._tasks:
            task.cancel()

    def _add_ended(self, task: asyncio.Task[None]) -> None:
        self._ended.append(task)
        self._changed.set()

    def _take_ended(self) -> list[Ended]:
        found: list[Ended] = []
        while self._ended:
            task = self._ended.popleft()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            found.append((self._tasks.pop(task), error))
        return found
