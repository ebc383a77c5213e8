"""Dynamic sampling: fills a batch with informative groups, continuously rather than in waves, and loses nothing.

`collect` keeps enough groups in flight to fill what is missing, grades each sample as it ends, asks the group filter,
and returns when the batch is full or a configured bound is reached. What is left over (complete groups beyond the
batch, samples in mid-sentence) is kept for the next step or dropped, as configured, and is part of `state`.

- Every sample that enters a step is trained, dropped with a reason, failed, or carried over: exactly one of them.
- A group is decided once. With `order: prompt`, or without oversampling, which groups make the batch does not depend
  on timing; with a deterministic engine the same seed gives the same batches.
- A carried-over token never lags more than `max_staleness` weight versions: a group at that bound is waited for.
- A `collect` that is cancelled can go on later, here or after a restore, as if it had not been: same decisions, same
  counts. After an error, accepted groups and partial samples are in `state` as after any step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_dapo.algorithm import GroupFilter, keep_all, load_group_filter
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Engine, EngineError, derive_seed
from megatron_dapo.errors import UserError
from megatron_dapo.rollout.accounting import STALE, SURPLUS, UNFINISHED, Progress, Tally
from megatron_dapo.rollout.group_runner import Decoder, Grader, GroupRunner, PendingGroup, new_samples
from megatron_dapo.rollout.interrupted_step import CutStep
from megatron_dapo.types import Group, Prompt, StepBatch

ABORT_REPEAT = 1.0  # seconds after which an abort is sent again: a request may have overtaken the first
CUT_TIMEOUT = 120.0


class SamplingLimitError(UserError):
    """The bound on generated prompts was reached and `on_limit` is `stop`."""


class Sampler:
    def __init__(
        self,
        engine: Engine,
        grade: Grader,
        next_prompt: Callable[[], Prompt],
        config: RolloutConfig,
        *,
        groups_per_step: int,
        seed: int = 0,
        decode: Decoder | None = None,
        group_filter: GroupFilter | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """`next_prompt` raises StopIteration when there are no more. `decode` turns response tokens into the text
        that is graded; without it the engine's own text is used. `group_filter` overrides the configured one."""
        self._engine, self._grade, self._next_prompt, self._config = engine, grade, next_prompt, config
        self._needed, self._seed, self._decode, self._on_progress = groups_per_step, seed, decode, on_progress
        chosen = load_group_filter(config.group_filter) if config.dynamic_sampling else keep_all
        self._filter: GroupFilter = group_filter or chosen
        self._next_serial = 0
        self._surplus: list[PendingGroup] = []
        self._unfinished: list[PendingGroup] = []
        self._cut: CutStep | None = None

    async def collect(self, step: int) -> StepBatch:
        """One batch for training step `step`; goes on with it where a `collect` of the same step was cancelled."""
        return await _Step(self, step).collect()

    def state(self) -> dict[str, Any]:
        """Plain JSON values; call between two `collect`s."""
        return {
            "next_serial": self._next_serial,
            "surplus": [pending.to_state() for pending in self._surplus],
            "unfinished": [pending.to_state() for pending in self._unfinished],
            "cut": self._cut.to_state() if self._cut else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._next_serial = state["next_serial"]
        self._surplus = [PendingGroup.from_state(record) for record in state["surplus"]]
        self._unfinished = [PendingGroup.from_state(record) for record in state["unfinished"]]
        self._cut = CutStep.from_state(state["cut"]) if state.get("cut") else None


class _Step:
    """The life of one `collect`. Groups move: to_start → running → decided (kept, dropped or failed)."""

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step, self.config = sampler, step, sampler._config
        self.options = sampler._config.sampler
        self.needed = sampler._needed
        self.tally = Tally()
        self.kept: list[PendingGroup] = []
        self.rejected: list[tuple[PendingGroup, str]] = []  # for on_limit: fill
        self.to_start: list[PendingGroup] = []
        self.running: dict[asyncio.Task[None], PendingGroup] = {}
        self.ended: dict[int, asyncio.Task[None]] = {}  # by serial; ended but not yet decided
        self.undecided: dict[int, PendingGroup] = {}  # by serial; running or ended
        self.repeats: Counter[str] = Counter()
        self.exhausted = False
        self.last_failure = ""
        self.runner = GroupRunner(sampler._engine, sampler._grade, self.config, sampler._decode, self._on_piece)
        self.clock = asyncio.get_running_loop().time
        self.began = self.clock()

    async def collect(self) -> StepBatch:
        cut, self.sampler._cut = self.sampler._cut, None
        if cut is not None and cut.step == self.step:
            self._go_on(cut)
        else:
            self._take_carried_over()
        try:
            while not self._complete():
                self._refill()
                if not self.running and not self.ended:
                    break
                await self._wait_for_one()
                self._decide_ended()
                self._report()
            self._at_limit()
            await self._end_running()
        except BaseException as error:
            await self._keep_everything()
            if isinstance(error, asyncio.CancelledError):
                seconds, running = self.clock() - self.began, list(self.undecided)
                self.sampler._cut = CutStep(
                    self.step, self.tally, seconds, running, self.rejected, self.repeats, self.last_failure
                )
            raise
        return self._batch()

    # ---- start ----

    def _take_carried_over(self) -> None:
        """Surplus groups have been accepted and count as kept; the others are started first, oldest first."""
        sampler, version = self.sampler, self.sampler._engine.weight_version
        for groups, place in ((sampler._surplus, self.kept), (sampler._unfinished, self.to_start)):
            for pending in groups:
                self.tally.carried_in += self.config.samples_per_prompt
                if pending.has_tokens and version - pending.oldest_version > self.options.max_staleness:
                    self.tally.drop(pending.group, STALE, self.config.samples_per_prompt)
                else:
                    place.append(pending)
        sampler._surplus, sampler._unfinished = [], []
        for pending in [p for p in self.to_start if self._due(p)]:
            self.to_start.remove(pending)
            self._start(pending)

    def _go_on(self, cut: CutStep) -> None:
        """As the step was when it was cancelled: what had been started is running again."""
        sampler = self.sampler
        self.tally, self.rejected, self.repeats = cut.tally, cut.rejected, cut.repeats
        self.last_failure = cut.last_failure
        self.began -= cut.seconds
        self.kept, groups = sampler._surplus, sampler._unfinished
        sampler._surplus, sampler._unfinished = [], []
        self.to_start = [pending for pending in groups if pending.serial not in cut.running]
        for pending in groups:
            if pending.serial in cut.running:
                self._start(pending)

    def _refill(self) -> None:
        """Keeps `oversampling` groups in flight for each that is missing."""
        while self._in_flight() < self._wanted_in_flight():
            pending = self.to_start.pop(0) if self.to_start else self._new_group()
            if pending is None:
                return
            self._start(pending)

    def _wanted_in_flight(self) -> int:
        done = len(self.kept)
        if self.options.fill == "dynamic":
            # Without one kept group there is nothing to train on: go on, one group at a time.
            done = min(done + self._dropped_groups(), self.needed if self.kept else self.needed - 1)
        return math.ceil((self.needed - done) * self.options.oversampling)

    def _in_flight(self) -> int:
        return len(self.undecided)

    def _new_group(self) -> PendingGroup | None:
        if self.exhausted or self._limit_reached():
            return None
        try:
            prompt = self.sampler._next_prompt()
        except StopIteration:
            self.exhausted = True
            return None
        pending = PendingGroup(self.sampler._next_serial, self.step, Group(prompt, []))
        self.sampler._next_serial += 1
        self.tally.submit(self.config.samples_per_prompt)
        return pending

    def _limit_reached(self) -> bool:
        batches = self.options.generation_batches
        if batches is None or self.options.on_limit == "continue":
            return False
        return self.tally.submitted_groups >= batches * math.ceil(self.needed * self.options.oversampling)

    def _start(self, pending: PendingGroup) -> None:
        prompt = pending.group.prompt
        if not pending.group.samples:
            pending.step = self.step
            repeat = self.repeats[prompt.id]
            self.repeats[prompt.id] += 1
            indices = range(self.config.samples_per_prompt)
            seeds = [derive_seed(self.sampler._seed, self.step, prompt.id, i, repeat) for i in indices]
            pending.group.samples = new_samples(prompt, seeds)
        self.undecided[pending.serial] = pending
        self.running[asyncio.ensure_future(self.runner.run(pending))] = pending

    # ---- middle ----

    def _complete(self) -> bool:
        """The batch is full and no running group would become too old by waiting for the next step."""
        if self._wanted_in_flight() > 0:
            return False
        return not any(self._due(pending) for pending in self.running.values())

    def _due(self, pending: PendingGroup) -> bool:
        if self.options.unfinished != "continue" or pending.step == self.step or not pending.has_tokens:
            return False
        return self.sampler._engine.weight_version - pending.oldest_version >= self.options.max_staleness

    async def _wait_for_one(self) -> None:
        if not self.running:
            return
        finished_before = self.tally.finished_samples
        while True:
            timeout = self.options.stall_timeout
            done, _ = await asyncio.wait(self.running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            if self.tally.finished_samples == finished_before:
                names = ", ".join(f"{p.group.prompt.id!r}" for p in list(self.running.values())[:3])
                raise EngineError(
                    f"step {self.step}: waited {timeout:.0f} s (rollout.sampler.stall_timeout) and no sample finished; "
                    f"{len(self.running)} groups are running, among them the prompts {names}"
                )
            finished_before = self.tally.finished_samples
        for task in done:
            self.ended[self.running.pop(task).serial] = task

    def _decide_ended(self) -> None:
        """Decides ended groups: at once, or (order: prompt) once every earlier prompt has been decided."""
        in_order = self.options.order == "prompt" and self.options.oversampling > 1
        for serial in sorted(self.ended):
            if in_order and serial != min(self.undecided):
                break
            self._decide(serial)
            if in_order:
                self._refill_unless_complete()

    def _refill_unless_complete(self) -> None:
        # With order: prompt, what is submitted must follow from the decisions alone, so look after every one of them.
        if not self._complete():
            self._refill()

    def _decide(self, serial: int) -> None:
        """Kept, dropped, failed or carried over. The group stays undecided, and so is not lost, when this raises."""
        pending, error = self.undecided[serial], self.ended[serial].exception()
        if error is not None:
            self._fail(error)
        elif not pending.finished:
            self.sampler._unfinished.append(pending)
        else:
            keep, reason = self.sampler._filter(pending.group)
            if keep:
                self.kept.append(pending)
            else:
                self.tally.drop(pending.group, reason)
                self.rejected.append((pending, reason))
        del self.undecided[serial], self.ended[serial]

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, EngineError):
            raise error
        self.last_failure = str(error)
        self.tally.fail(self.config.samples_per_prompt)
        if self.tally.failed_groups > self.options.max_failed_groups:
            raise EngineError(
                f"step {self.step}: {self.tally.failed_groups} groups failed "
                f"(rollout.sampler.max_failed_groups is {self.options.max_failed_groups}); the last: {error}"
            )

    def _dropped_groups(self) -> int:
        return self.tally.dropped_groups.total() - self.tally.dropped_groups[STALE] + self.tally.failed_groups

    # ---- end ----

    def _at_limit(self) -> None:
        """What happens when nothing more may be started and the batch is not full."""
        if self._wanted_in_flight() <= 0:
            return
        cause = "the prompts ran out" if self.exhausted else f"{self.tally.submitted_groups} prompts were sampled"
        found = (
            f"step {self.step}: {cause} and {len(self.kept)} of {self.needed} groups were kept; "
            f"dropped: {dict(self.tally.dropped_groups) or 'none'}, failed: {self.tally.failed_groups}"
            + (f" (the last: {self.last_failure})" if self.last_failure else "")
        )
        if self.options.on_limit == "stop":
            raise SamplingLimitError(f"{found}. rollout.sampler.on_limit is stop; nothing kept is lost.")
        if self.options.on_limit == "fill":
            self.rejected.sort(key=lambda item: item[0].serial)
            while self.rejected and len(self.kept) < self.needed:
                pending, reason = self.rejected.pop(0)
                self.tally.undrop(pending.group, reason)
                self.kept.append(pending)
        if not self.kept:
            raise SamplingLimitError(f"{found}. There is nothing to train on: check the grader and the group filter.")

    async def _end_running(self) -> None:
        """Finishes or cuts what still runs, then decides it."""
        if self.running and self.options.unfinished == "finish":
            while self.running:
                await self._wait_for_one()
                self._report()
        elif self.running:
            await self._cut()
            self.tally.cut(s for pending in self.undecided.values() for s in pending.unfinished_samples)
        self._decide_leftovers()

    def _decide_leftovers(self) -> None:
        for serial in sorted(self.ended):
            self._decide(serial)
        # Started never, carried in: they wait for the next step.
        self.sampler._unfinished += self.to_start
        self.to_start = []

    async def _cut(self) -> None:
        self.runner.stop()
        deadline = self.clock() + CUT_TIMEOUT
        while self.running:
            if self.clock() > deadline:
                raise EngineError(f"step {self.step}: waited {CUT_TIMEOUT:.0f} s for aborted requests to return")
            await self.sampler._engine.abort()
            done, _ = await asyncio.wait(self.running, timeout=ABORT_REPEAT)
            for task in done:
                self.ended[self.running.pop(task).serial] = task

    def _settle_unfinished(self) -> None:
        """Applies `unfinished` to the groups that were cut."""
        groups, self.sampler._unfinished = self.sampler._unfinished, []
        for pending in sorted(groups, key=lambda p: p.serial):
            if self.options.unfinished == "drop" and pending.group.samples:
                self.tally.drop(pending.group, UNFINISHED)
                continue
            if self.options.unfinished == "restart":
                self.tally.wasted_tokens += sum(sample.length for sample in pending.group.samples)
                pending.group.samples = []
            self.tally.carry(self.config.samples_per_prompt)
            self.sampler._unfinished.append(pending)

    def _batch(self) -> StepBatch:
        self.kept.sort(key=lambda pending: pending.serial)
        chosen, surplus = self.kept[: self.needed], self.kept[self.needed :]
        if self.options.surplus == "keep":
            self.sampler._surplus = surplus
            self.tally.carry(sum(len(pending.group.samples) for pending in surplus))
        else:
            for pending in surplus:
                self.tally.drop(pending.group, SURPLUS)
        self._settle_unfinished()
        groups = [pending.group for pending in chosen]
        self.tally.train(groups)
        self.tally.check()
        metrics = self.tally.metrics(groups, self.clock() - self.began)
        version = self.sampler._engine.weight_version
        metrics["rollout/staleness"] = sum(version - g.oldest_version for g in groups) / max(1, len(groups))
        self._report()
        return StepBatch(self.step, groups, metrics)

    async def _keep_everything(self) -> None:
        """After an error: what was kept becomes surplus, what ran is carried over, however far it came."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._cut(), CUT_TIMEOUT)
        for task in self.running:
            task.cancel()
        left = {p.serial: p for p in (*self.undecided.values(), *self.to_start, *self.sampler._unfinished)}
        self.sampler._surplus = sorted(self.kept, key=lambda pending: pending.serial)
        self.sampler._unfinished = [left[serial] for serial in sorted(left)]
        for task in (*self.running, *self.ended.values()):
            with contextlib.suppress(BaseException):
                task.exception()  # seen: the first error is the one that is raised

    # ---- progress ----

    def _on_piece(self, tokens: int, finished: bool) -> None:
        self.tally.response_tokens += tokens
        self.tally.finished_samples += finished
        if finished:
            self._report()

    def _report(self) -> None:
        if self.sampler._on_progress is None:
            return
        self.sampler._on_progress(
            Progress(
                step=self.step, needed=self.needed, kept=len(self.kept),
                dropped={reason: n for reason, n in self.tally.dropped_groups.items() if n},
                in_flight=len(self.undecided), running_requests=self.runner.running,
                finished_samples=self.tally.finished_samples, response_tokens=self.tally.response_tokens,
                seconds=self.clock() - self.began,
            )
        )  # fmt: skip
