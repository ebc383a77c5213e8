"""A group that a step is working on and its state, and what a step leaves for the next one.

A `GroupTable` holds the groups of one step. Each group is in exactly one state, so a group can be neither lost between
two lists nor counted in both.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_dapo.rollout.accounting import StepAccounting
from megatron_dapo.rollout.fill_policy import YieldEstimate
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens


class GroupState(Enum):
    WAITING = "waiting"  # carried over, not started in this step
    RUNNING = "running"  # samples are being generated or graded
    ENDED = "ended"  # nothing runs any more; not decided yet
    KEPT = "kept"  # accepted by the group filter
    REJECTED = "rejected"  # rejected by the group filter; `on_limit: fill` may still use it
    UNFINISHED = "unfinished"  # the batch was full before all of its samples were finished


UNDECIDED = (GroupState.RUNNING, GroupState.ENDED)


@dataclass(slots=True, eq=False)
class PendingGroup:
    """`serial` numbers the prompts in the order in which they were drawn. `step` is the step its seeds belong to."""

    serial: int
    step: int
    group: Group
    rejected: str | None = None  # why the filter rejects it although samples may be unfinished; not saved
    # Complete rollouts that the next step takes over: their conversations and grades to come, by index; not saved.
    being_graded: dict[int, tuple[Any, asyncio.Future[Grade]]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return not self.unfinished_samples

    @property
    def unfinished_rollouts(self) -> list[list[Sample]]:
        return [samples for samples in self.group.rollouts if samples[0].grade is None]

    @property
    def unfinished_samples(self) -> list[Sample]:
        return [sample for sample in self.group.samples if sample.grade is None]

    @property
    def tokens(self) -> int:
        return sum(sample.trained_tokens for sample in self.group.samples)

    @property
    def oldest_version(self) -> int:
        """The oldest weight version of its tokens. Call only if it has `tokens`."""
        return min(sample.oldest_version for sample in self.group.samples if sample.trained_tokens)

    def add_part(self, sample: Sample) -> None:
        """Adds another sample of a rollout, after the others of that rollout."""
        after = max(i for i, other in enumerate(self.group.samples) if other.index == sample.index)
        self.group.samples.insert(after + 1, sample)

    def restart(self, rollout: list[Sample]) -> None:
        """Makes a rollout a single empty sample again, in place."""
        first, *others = rollout
        self.group.samples = [s for s in self.group.samples if not any(s is other for other in others)]
        del rollout[1:]
        (empty,) = new_samples(self.group.prompt, [first.seed])
        for name in Sample.__slots__:
            if name != "index":
                setattr(first, name, getattr(empty, name))

    def to_state(self) -> dict[str, Any]:
        return {"serial": self.serial, "step": self.step, "group": self.group.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PendingGroup:
        return cls(state["serial"], state["step"], Group.from_state(state["group"]))


class GroupTable:
    """The groups of one step by serial, each in exactly one state."""

    def __init__(self) -> None:
        self._groups: dict[GroupState, dict[int, PendingGroup]] = {state: {} for state in GroupState}
        # Serials that have been in each state; those that have left it are removed when they reach the top.
        self._heaps: dict[GroupState, list[int]] = {state: [] for state in GroupState}
        self._state_of: dict[int, GroupState] = {}

    def put(self, pending: PendingGroup, state: GroupState) -> None:
        """Adds a group, or moves it to another state."""
        if pending.serial in self._state_of:
            self.remove(pending)
        self._groups[state][pending.serial] = pending
        self._state_of[pending.serial] = state
        heapq.heappush(self._heaps[state], pending.serial)

    def remove(self, pending: PendingGroup) -> None:
        del self._groups[self._state_of.pop(pending.serial)][pending.serial]

    def unordered(self, state: GroupState) -> Collection[PendingGroup]:
        return self._groups[state].values()

    def ordered(self, *states: GroupState) -> list[PendingGroup]:
        """The groups in these states, in the order of their prompts."""
        found = {serial: pending for state in states for serial, pending in self._groups[state].items()}
        return [found[serial] for serial in sorted(found)]

    def first(self, *states: GroupState) -> PendingGroup | None:
        """The group of the earliest prompt in these states."""
        found = [first for state in states if (first := self._first(state)) is not None]
        return min(found, key=lambda pending: pending.serial, default=None)

    def _first(self, state: GroupState) -> PendingGroup | None:
        heap, groups = self._heaps[state], self._groups[state]
        while heap and heap[0] not in groups:
            heapq.heappop(heap)
        return groups[heap[0]] if heap else None

    def count(self, *states: GroupState) -> int:
        return sum(len(self._groups[state]) for state in states)


def new_samples(prompt: Prompt, seeds: list[int]) -> list[Sample]:
    empty = as_tokens([]), as_logprobs([]), FinishReason.ABORT
    return [Sample(prompt.id, index, prompt.tokens, *empty, seed=seed) for index, seed in enumerate(seeds)]


@dataclass(slots=True)
class InterruptedStep:
    """A step that was cancelled before its batch was full. It continues later, in this process or after a resume."""

    step: int
    accounting: StepAccounting
    seconds: float
    running: list[int]  # serials of the groups that were started and not yet decided
    rejected: list[tuple[PendingGroup, str]]  # with the reason; for on_limit: fill
    last_failure: str = ""  # message of the last group that failed

    def to_state(self) -> dict[str, Any]:
        rejected = [[pending.to_state(), reason] for pending, reason in self.rejected]
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "accounting": self.accounting.to_state(), "rejected": rejected}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> InterruptedStep:
        rejected = [(PendingGroup.from_state(pending), reason) for pending, reason in state["rejected"]]
        return cls(**{**state, "accounting": StepAccounting.from_state(state["accounting"]), "rejected": rejected})


@dataclass(slots=True)
class DrawnPrompts:
    """How often each prompt was drawn in `step`. The count is part of a sample's seed, so that a step that is repeated
    after an error does not sample the same responses again."""

    step: int = -1
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class CarryOver:
    """Everything that one step leaves for the next one: the whole persistent state of the sampler."""

    next_serial: int = 0
    surplus: list[PendingGroup] = field(default_factory=list)  # accepted by the group filter, not yet trained
    unfinished: list[PendingGroup] = field(default_factory=list)  # all others
    drawn: DrawnPrompts = field(default_factory=DrawnPrompts)  # of a step that did not complete
    interrupted: InterruptedStep | None = None  # of a step that was cancelled
    yield_estimate: YieldEstimate = field(default_factory=YieldEstimate)

    def to_state(self) -> dict[str, Any]:
        return {
            "next_serial": self.next_serial,
            "surplus": [pending.to_state() for pending in self.surplus],
            "unfinished": [pending.to_state() for pending in self.unfinished],
            "drawn": {"step": self.drawn.step, "counts": dict(self.drawn.counts)},
            "interrupted": self.interrupted.to_state() if self.interrupted else None,
            "yield_estimate": [self.yield_estimate.kept, self.yield_estimate.decided],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CarryOver:
        drawn, interrupted = state["drawn"], state["interrupted"]
        return cls(
            next_serial=state["next_serial"],
            surplus=[PendingGroup.from_state(pending) for pending in state["surplus"]],
            unfinished=[PendingGroup.from_state(pending) for pending in state["unfinished"]],
            drawn=DrawnPrompts(drawn["step"], Counter(drawn["counts"])),
            interrupted=InterruptedStep.from_state(interrupted) if interrupted else None,
            yield_estimate=YieldEstimate(*state["yield_estimate"]),
        )
