"""Dynamic sampling: fills a batch with informative groups, continuously rather than in waves.

`collect` keeps enough groups in flight to fill what is missing, grades each sample when it ends, asks the group filter
and returns when the batch is full or a configured limit is reached. Accepted groups beyond the batch and unfinished
samples are carried over to the next step or dropped, as configured.

- Every sample that enters a step is trained, dropped with a reason, failed or carried over: exactly one of them.
- A group is decided once. With `order: prompt` and `unfinished: finish`, or with `oversampling: 1`, timing does not
  change which groups make the batch. With a deterministic engine, the same seed gives the same batches.
- A carried-over token never lags more than `max_carryover_staleness` weight versions. The step waits for a group at
  that limit.
- A `collect` that was cancelled, or whose grader failed, can continue later, in this process or after `restore`, with
  the same decisions and counts.
- After any error, `state` contains every accepted group and every partial sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from megatron_dapo import fault_points
from megatron_dapo.algorithm.filtering import EarlyRejection, GroupFilter, give_up_after, keep_all, load_group_filter
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import ForeignWeightsError, Generator, derive_seed
from megatron_dapo.errors import EngineError, UserError
from megatron_dapo.rollout.accounting import EARLY, STALE, SURPLUS, UNFINISHED, GroupEvents, OnRequest, StepAccounting
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.fill_policy import FillPolicy, age, check_staleness, staleness_metrics
from megatron_dapo.rollout.group_runner import ABORT_TIMEOUT, Ended, Grader, GroupRunner, RunningGroups
from megatron_dapo.rollout.pending_group import (
    UNDECIDED,
    CarryOver,
    DrawnPrompts,
    GroupState,
    GroupTable,
    InterruptedStep,
    PendingGroup,
    new_samples,
)
from megatron_dapo.types import Group, Prompt, Sample, SamplerProgress, StepBatch


class SamplingLimitError(UserError):
    """No more prompts may be sampled, and the step may not train on what it has. `rejected`: as in StepBatch."""

    def __init__(self, message: str, rejected: dict[str, Group]) -> None:
        super().__init__(message)
        self.rejected = rejected


@dataclass(eq=False)
class Sampler:
    """`next_prompt` raises StopIteration when there are no more prompts. `on_decided` is called for every group that
    the filter kept or rejected, `on_kept` for those kept. `function` makes the responses; None: one generated turn."""

    engine: Generator
    grade: Grader
    next_prompt: Callable[[], Prompt]
    config: RolloutConfig
    _: KW_ONLY
    groups_per_step: int
    seed: int = 0
    on_progress: Callable[[SamplerProgress], None] | None = None
    on_request: OnRequest | None = None
    on_decided: Callable[[Group], None] | None = None
    on_kept: Callable[[list[Sample]], None] | None = None
    function: RolloutFunction | None = None
    group_filter: GroupFilter = field(init=False)
    reports: int = field(default=0, init=False)  # of progress: rollouts that were graded, groups that were decided
    unchanged_to: int = field(default=0, init=False)  # all versions up to this one have the same weights
    _carry_over: CarryOver = field(default_factory=CarryOver, init=False)
    _collecting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        filters = self.config.dynamic_sampling
        self.group_filter = load_group_filter(self.config.group_filter) if filters else keep_all

    @property
    def reject_early(self) -> EarlyRejection | None:
        config = self.config
        if config.dynamic_sampling and config.sampler.give_up_after is not None:
            return give_up_after(config.sampler.give_up_after)
        return getattr(self.group_filter, "reject_early", None)

    async def collect(self, step: int) -> StepBatch:
        """One batch for training step `step`. Continues a `collect` of the same step that was cancelled."""
        if self._collecting:
            raise RuntimeError(f"collect({step}) was called while another batch is being collected")
        collector = StepCollector(self, step, self._carry_over)
        self._collecting = True
        try:
            return await collector.collect()
        finally:
            self._carry_over, self._collecting = collector.carry_over, False

    def put_back(self, batch: StepBatch) -> None:
        """The prompts of a batch that cannot be used are sampled again, with the same seeds and before new prompts."""
        carried = self._carry_over
        for group in batch.groups:
            carried.unfinished.append(PendingGroup(carried.next_serial, batch.step, Group(group.prompt, [])))
            carried.next_serial += 1

    def state(self) -> dict[str, Any]:
        """JSON values and numpy arrays. Call between two `collect`s."""
        if self._collecting:
            raise RuntimeError("state() was called while a batch is being collected: cancel it or wait for it first")
        return self._carry_over.to_state() | {"unchanged_to": self.unchanged_to}

    def close(self) -> None:
        """Ends the grading that goes on between two steps."""
        for pending in self._carry_over.unfinished:
            for _, grading in pending.being_graded.values():
                grading.cancel()

    def restore(self, state: dict[str, Any]) -> None:
        self._carry_over, self.unchanged_to = CarryOver.from_state(state), state.get("unchanged_to", 0)


class StepCollector:
    """Collects the batch of one step: starts groups, decides the ones that end, and settles the rest. Used once. It
    takes over a `CarryOver` and leaves another one in `carry_over`, whether `collect` returns or raises."""

    def __init__(self, sampler: Sampler, step: int, carried: CarryOver) -> None:
        config = sampler.config
        self.carry_over = carried
        self._sampler = sampler
        self._step = step
        self._needed = sampler.groups_per_step
        self._options = config.sampler
        self._group_size = config.samples_per_prompt
        self._policy = self._fill_policy()
        self._yield = carried.yield_estimate
        self._groups = GroupTable()
        self._errors: dict[int, BaseException | None] = {}  # by serial, of ended groups
        self._reasons: dict[int, str] = {}  # by serial, of rejected groups
        self._next_serial = carried.next_serial
        self._drawn = carried.drawn if carried.drawn.step == step else DrawnPrompts(step)
        self._exhausted = False
        self._last_failure = ""
        self._events = GroupEvents(sampler.engine.max_running, sampler.on_request)
        self._runner = GroupRunner(
            sampler.engine, sampler.grade, config, sampler.reject_early, self._events, sampler.function
        )
        self._running = RunningGroups(step, self._runner)
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()

    @property
    def _accounting(self) -> StepAccounting:
        return self._events.accounting

    def _fill_policy(self) -> FillPolicy:
        """If the engine is as far behind the trainer as it may be, a group of this step is too stale for the next."""
        config, engine = self._sampler.config, self._sampler.engine
        options = config.sampler.model_copy(update={"max_carryover_staleness": config.staleness_limit})
        behind = age(engine.weight_version, self._trained_version, self._sampler.unchanged_to)
        return FillPolicy(options, self._needed, engine.max_running, can_carry_over=behind < config.staleness_limit)

    async def collect(self) -> StepBatch:
        try:
            self._take_over()
            while not self._complete():
                self._refill()
                if not self._groups.count(*UNDECIDED):
                    break
                self._note_ended(await self._running.wait())
                self._decide_ended()
                self._report()
            self._apply_limit()
            await self._end_running()
            return self._finish()
        except BaseException as error:
            try:
                await self._stop_running()
            finally:
                self._keep_everything(continues=not isinstance(error, SamplingLimitError | EngineError))
            raise

    # ---- start ----

    def _take_over(self) -> None:
        """Accepted groups count as kept at once. The others start before any new prompt, oldest first."""
        for groups, state in (
            (self.carry_over.surplus, GroupState.KEPT),
            (self.carry_over.unfinished, GroupState.WAITING),
        ):
            for pending in groups:
                self._groups.put(pending, state)
        interrupted = self.carry_over.interrupted
        if interrupted is not None and interrupted.step == self._step:
            self._continue(interrupted)
            return
        for pending in self._groups.ordered(GroupState.KEPT, GroupState.WAITING):
            self._accounting.carried_in += self._group_size
            if pending.tokens and self._policy.too_stale(self._staleness(pending)):
                self._accounting.drop(pending.group, STALE, self._group_size)
                self._groups.remove(pending)
        for pending in self._groups.ordered(GroupState.WAITING):
            if self._due(pending):
                self._start(pending)

    def _continue(self, interrupted: InterruptedStep) -> None:
        """Restores the step as it was when it was cancelled. Groups that were running run again."""
        self._events.accounting = interrupted.accounting
        self._last_failure = interrupted.last_failure
        self._began -= interrupted.seconds
        for pending, reason in interrupted.rejected:
            self._reject(pending, reason)
        running = set(interrupted.running)
        for pending in self._groups.ordered(GroupState.WAITING):
            if pending.serial in running:
                self._start(pending)

    def _refill(self) -> None:
        """Starts groups until as many are in flight as the policy wants, or the engine is full."""
        self._events.refill = False
        self._policy = replace(self._policy, max_running=self._sampler.engine.max_running)  # servers come and go
        while self._groups.count(*UNDECIDED) < self._wanted_in_flight():
            if self._policy.engine_full(self._runner.requests):
                self._events.refill = True  # when a rollout has been generated, not when a group ends
                return
            pending = self._groups.first(GroupState.WAITING) or self._new_group()
            if pending is None:
                return
            self._start(pending)

    def _wanted_in_flight(self) -> int:
        kept, unused = self._groups.count(GroupState.KEPT), self._accounting.unused_groups
        return self._policy.wanted_in_flight(kept, unused, self._yield.value, self._runner.per_request)

    def _full(self) -> bool:
        return self._policy.missing(self._groups.count(GroupState.KEPT), self._accounting.unused_groups) <= 0

    def _new_group(self) -> PendingGroup | None:
        if self._exhausted or self._policy.limit_reached(self._accounting.submitted_groups):
            return None
        try:
            prompt = self._sampler.next_prompt()
        except StopIteration:
            self._exhausted = True
            return None
        pending = PendingGroup(self._next_serial, self._step, Group(prompt, []))
        self._next_serial += 1
        self._accounting.submit(self._group_size)
        return pending

    def _start(self, pending: PendingGroup) -> None:
        self._groups.put(pending, GroupState.RUNNING)
        if not pending.group.samples:
            prompt, pending.step = pending.group.prompt, self._step
            repeat = self._drawn.counts[prompt.id]
            self._drawn.counts[prompt.id] += 1
            seeds = [derive_seed(self._sampler.seed, self._step, prompt.id, i, repeat) for i in range(self._group_size)]
            pending.group.samples = new_samples(prompt, seeds)
        self._running.start(pending)
        self._note_occupancy()

    # ---- middle ----

    def _complete(self) -> bool:
        """The batch is full, and no running group would be too stale in the next step."""
        if not self._full():
            return False
        return not any(self._due(pending) for pending in self._groups.unordered(GroupState.RUNNING))

    def _due(self, pending: PendingGroup) -> bool:
        """The group is from an earlier step, and this is the last step in which it can finish."""
        if pending.step == self._step or not pending.tokens:
            return False
        return self._policy.must_finish_now(self._staleness(pending))

    def _staleness(self, pending: PendingGroup) -> int:
        return age(pending.oldest_version, self._trained_version, self._sampler.unchanged_to)

    @property
    def _trained_version(self) -> int:
        """The weights that train on this batch."""
        return self._step if self._sampler.config.max_staleness else self._sampler.engine.weight_version

    def _note_ended(self, ended: list[Ended]) -> None:
        for pending, error in ended:
            self._errors[pending.serial] = error
            self._groups.put(pending, GroupState.ENDED)

    def _decide_ended(self) -> None:
        """Decides ended groups: at once, or (order: prompt) after every earlier prompt has been decided."""
        in_order = self._policy.in_prompt_order
        for pending in self._groups.ordered(GroupState.ENDED):
            if in_order and pending is not self._groups.first(*UNDECIDED):
                break
            self._decide(pending)
            # With order: prompt, the decisions alone determine what is submitted: refill after each of them.
            if in_order and not self._complete():
                self._refill()

    def _decide(self, pending: PendingGroup) -> None:
        """If this raises, the group stays ENDED and is carried over."""
        error = self._errors[pending.serial]
        if error is not None:
            self._fail(pending, error)
        elif pending.rejected:
            self._accounting.drop(pending.group, f"{EARLY}-{pending.rejected}")
            self._groups.remove(pending)  # samples may be missing: `on_limit: fill` cannot use it
            self._count_decision(pending, False)
        elif not pending.finished:
            self._groups.put(pending, GroupState.UNFINISHED)
        else:
            keep, reason = self._sampler.group_filter(pending.group)
            if keep:
                self._groups.put(pending, GroupState.KEPT)
            else:
                self._accounting.drop(pending.group, reason)
                self._reject(pending, reason)
            self._count_decision(pending, keep)
        del self._errors[pending.serial]

    def _count_decision(self, pending: PendingGroup, keep: bool) -> None:
        self._yield.add(keep)
        if self._sampler.on_decided is not None:
            self._sampler.on_decided(pending.group)
        if keep and self._sampler.on_kept is not None:
            self._sampler.on_kept(pending.group.samples)

    def _reject(self, pending: PendingGroup, reason: str) -> None:
        self._groups.put(pending, GroupState.REJECTED)
        self._reasons[pending.serial] = reason

    def _fail(self, pending: PendingGroup, error: BaseException) -> None:
        if not isinstance(error, EngineError) or isinstance(error, ForeignWeightsError):
            raise error
        self._last_failure = str(error)
        self._accounting.fail(self._group_size)
        most = self._options.max_failed_groups
        if self._accounting.failed_groups > (most * self._needed if 0 < most < 1 else most):
            raise EngineError(
                f"step {self._step + 1}: {self._accounting.failed_groups} groups failed "
                f"(rollout.sampler.max_failed_groups is {most:g}); the last: {error}"
            )
        self._groups.remove(pending)

    # ---- end ----

    def _apply_limit(self) -> None:
        """Applies `on_limit` if the batch is not full: no more prompts may be sampled, or there are none."""
        if self._full():
            return
        if self._options.on_limit == "stop":
            kept = self._groups.count(GroupState.KEPT)
            raise SamplingLimitError(
                f"{self._limit_message()}. rollout.sampler.on_limit is stop. The {kept} kept groups are carried over: "
                "they are saved with the run and count when it resumes.",
                self._rejected(),
            )
        if self._options.on_limit == "fill":
            missing = self._needed - self._groups.count(GroupState.KEPT)
            for pending in self._groups.ordered(GroupState.REJECTED)[:missing]:
                self._accounting.undrop(pending.group, self._reasons.pop(pending.serial))
                self._groups.put(pending, GroupState.KEPT)
        if not self._groups.count(GroupState.KEPT):
            raise SamplingLimitError(
                f"{self._limit_message()}. There is nothing to train on (docs/diagnosis.md#nothing-kept)",
                self._rejected(),
            )

    def _limit_message(self) -> str:
        """Begins with what most groups failed with, if they failed or could not be graded."""
        found, kept = self._accounting, self._groups.count(GroupState.KEPT)
        counts = {**found.dropped_groups, "failed": found.failed_groups}
        most = max(counts, key=lambda reason: counts[reason])
        examples = [s.grade.reason for s in self._rejected()[most].samples if s.grade] if most == "ungraded" else []
        why = self._last_failure if most == "failed" else next(filter(None, reversed(examples)), "")
        cause = f"{counts[most]} of {sum(counts.values())} groups {most}: {why}; " if why else ""
        end = "the prompts ran out" if self._exhausted else f"{found.submitted_groups} prompts were sampled"
        return (
            f"step {self._step + 1}: {cause}{end} and {kept} of {self._needed} groups were kept; "
            f"dropped: {dict(sorted(found.dropped_groups.items())) or 'none'}, failed: {found.failed_groups}"
            + (f" (the last: {self._last_failure})" if self._last_failure and most != "failed" else "")
        )

    async def _end_running(self) -> None:
        """Finishes or aborts the running groups, then decides them."""
        if self._options.unfinished == "finish":
            while self._running:
                self._note_ended(await self._running.wait())
                self._report()
        elif self._running:
            carries = self._options.unfinished == "continue"
            self._note_ended(await self._running.abort(grading_timeout=0.0 if carries else math.inf))
            undecided = [p for p in self._groups.ordered(*UNDECIDED) if not p.rejected]
            self._accounting.interrupt(sample for pending in undecided for sample in pending.unfinished_samples)
        for pending in self._groups.ordered(GroupState.ENDED):
            self._decide(pending)

    def _finish(self) -> StepBatch:
        kept = self._groups.ordered(GroupState.KEPT)
        groups = [pending.group for pending in kept[: self._needed]]
        surplus = kept[self._needed :]
        if self._options.surplus == "drop":
            for pending in surplus:
                self._accounting.drop(pending.group, SURPLUS)
            surplus = []
        self._accounting.carry(sum(len(pending.group.rollouts) for pending in surplus))
        unfinished = self._settle_unfinished()
        self._accounting.train(groups)
        self._accounting.check()
        metrics = self._accounting.metrics(groups, self._clock() - self._began)
        metrics |= staleness_metrics(groups, self._trained_version, self._sampler.unchanged_to)
        check_staleness(metrics, self._sampler.config, self._step)
        self._note_occupancy()
        metrics |= self._events.occupancy.metrics() | {"rollout/expected_yield": self._yield.value}
        self._report()
        self._yield.end_step()
        self.carry_over = CarryOver(self._next_serial, surplus, unfinished, yield_estimate=self._yield)
        return StepBatch(self._step, groups, metrics, self._rejected())

    def _rejected(self) -> dict[str, Group]:
        """The first group of each reason."""
        groups = self._groups.ordered(GroupState.REJECTED)
        return {self._reasons[pending.serial]: pending.group for pending in reversed(groups)}

    def _settle_unfinished(self) -> list[PendingGroup]:
        """Applies `unfinished` to interrupted groups and to those that never started; returns those carried over."""
        carried = []
        for pending in self._groups.ordered(GroupState.UNFINISHED, GroupState.WAITING):
            if self._options.unfinished == "drop" and pending.group.samples:
                self._accounting.drop(pending.group, UNFINISHED)
                continue
            if self._options.unfinished == "restart":
                self._accounting.wasted_tokens += pending.tokens
                pending.group.samples, pending.being_graded = [], {}
            self._accounting.carry(self._group_size)
            carried.append(pending)
        return carried

    # ---- error or cancellation ----

    async def _stop_running(self) -> None:
        try:
            with contextlib.suppress(Exception):  # the error that ended the step is the one to raise
                self._note_ended(await asyncio.wait_for(self._running.abort(), ABORT_TIMEOUT))
        finally:
            self._running.cancel()

    def _keep_everything(self, continues: bool) -> None:
        """Accepted groups become surplus. All other groups are carried over as they are, including partial samples. A
        step that was cancelled, or whose grader failed, continues; one that has reached a limit begins anew."""
        self.carry_over = CarryOver(
            self._next_serial,
            surplus=self._groups.ordered(GroupState.KEPT),
            unfinished=self._groups.ordered(*UNDECIDED, GroupState.WAITING, GroupState.UNFINISHED),
            drawn=self._drawn,
            yield_estimate=self._yield,
        )
        if continues:
            self.carry_over.interrupted = InterruptedStep(
                self._step,
                self._accounting,
                seconds=self._clock() - self._began,
                running=[pending.serial for pending in self._groups.ordered(*UNDECIDED)],
                rejected=[(p, self._reasons[p.serial]) for p in self._groups.ordered(GroupState.REJECTED)],
                last_failure=self._last_failure,
            )

    # ---- progress ----

    def _note_occupancy(self) -> None:
        self._events.occupancy.change(self._clock(), self._runner.requests, self._groups.count(*UNDECIDED))

    def _report(self) -> None:
        self._sampler.reports += 1
        fault_points.reach("rollouts/sampling")
        if self._sampler.on_progress is not None:
            self._sampler.on_progress(
                SamplerProgress(
                    step=self._step, needed=self._needed, kept=self._groups.count(GroupState.KEPT),
                    dropped={reason: n for reason, n in self._accounting.dropped_groups.items() if n},
                    in_flight=self._groups.count(*UNDECIDED), running_requests=self._runner.generation.running,
                    finished_samples=self._accounting.finished_samples,
                    response_tokens=self._accounting.response_tokens, seconds=self._clock() - self._began,
                )
            )  # fmt: skip
