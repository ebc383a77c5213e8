"""The sample counts of one step. Every sample that enters the step leaves it exactly once:

    submitted + carried in  =  trained + dropped (by reason) + failed + carried over

`check` raises if this does not hold, so a lost or doubled sample ends the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_dapo.types import Group, Sample

UNFINISHED = "unfinished"
STALE = "stale"
SURPLUS = "surplus"
EARLY = "early"  # prefix of the filter's reason, for a group that was rejected before all of its samples were finished


@dataclass(slots=True)
class StepAccounting:
    """Counts of one step: samples unless the name says groups or tokens. Several samples of one rollout count once.
    Tokens are those that the policy generated."""

    submitted: int = 0
    carried_in: int = 0
    trained: int = 0
    failed: int = 0
    carried_over: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: Counter[str] = field(default_factory=Counter)
    failed_groups: int = 0
    submitted_groups: int = 0
    finished_samples: int = 0
    interrupted_samples: int = 0
    response_tokens: int = 0
    wasted_tokens: int = 0
    graded: int = 0  # samples of complete groups that have a grade, trained or not
    correct: int = 0  # of those
    restarted: int = 0  # interrupted rollouts whose function started again
    rejected_replies: int = 0  # of engines; they were asked again
    rejected_grades: int = 0  # of graders and rollout functions; such a rollout is ungraded
    _lengths: dict[str, list[int]] = field(default_factory=lambda: {"trained": [], "dropped": [], "interrupted": []})

    def to_state(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StepAccounting:
        reasons = {name: Counter(state[name]) for name in ("dropped", "dropped_groups")}
        return cls(**{**state, **reasons})

    def submit(self, samples: int) -> None:
        self.submitted_groups += 1
        self.submitted += samples

    def train(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.trained += len(group.rollouts)
            self._lengths["trained"] += _lengths(group)
            self._count_grades(group)

    def drop(self, group: Group, reason: str, samples: int | None = None) -> None:
        self.dropped[reason] += len(group.rollouts) if samples is None else samples
        self.dropped_groups[reason] += 1
        self.wasted_tokens += sum(_lengths(group))
        if reason not in (UNFINISHED, STALE):
            self._lengths["dropped"] += _lengths(group)
            if not reason.startswith(EARLY):  # such a group is not complete; how much of it is graded depends on timing
                self._count_grades(group)

    def _count_grades(self, group: Group, times: int = 1) -> None:
        self.graded += times * len(group.accuracies)
        self.correct += times * sum(group.accuracies)

    def undrop(self, group: Group, reason: str) -> None:
        """A rejected group is used after all, to fill the batch."""
        self.dropped[reason] -= len(group.rollouts)
        self.dropped_groups[reason] -= 1
        self.wasted_tokens -= sum(_lengths(group))
        self._count_grades(group, -1)  # `train` counts them again

    def fail(self, samples: int) -> None:
        self.failed_groups += 1
        self.failed += samples

    def carry(self, samples: int) -> None:
        self.carried_over += samples

    def interrupt(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.interrupted_samples += sample.part == 0
            self._lengths["interrupted"].append(sample.trained_tokens)

    def check(self) -> None:
        entered = self.submitted + self.carried_in
        left = self.trained + self.dropped.total() + self.failed + self.carried_over
        if entered != left:
            raise AssertionError(f"sampler: {entered} samples entered the step and {left} left it: {self}")

    @property
    def unused_groups(self) -> int:
        """Groups of this step that were rejected or failed."""
        return self.dropped_groups.total() - self.dropped_groups[STALE] + self.failed_groups

    def metrics(self, groups: list[Group], seconds: float) -> dict[str, float]:
        samples = [sample for group in groups for sample in group.samples]
        found: dict[str, float] = {
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": self.response_tokens / seconds if seconds > 0 else 0.0,
            "rollout/response_tokens": self.response_tokens,
            "rollout/wasted_tokens": self.wasted_tokens,
            "rollout/groups_submitted": self.submitted_groups,
            "rollout/groups_kept": len(groups),
            "rollout/groups_failed": self.failed_groups,
            "rollout/samples_submitted": self.submitted,
            "rollout/samples_carried_in": self.carried_in,
            "rollout/samples_trained": self.trained,
            "rollout/samples_dropped": self.dropped.total(),
            "rollout/samples_failed": self.failed,
            "rollout/samples_carried_over": self.carried_over,
            "rollout/oversampling": (self.submitted + self.carried_in) / max(1, self.trained),
            "rollout/interrupted_share": self.interrupted_samples
            / max(1, self.interrupted_samples + self.finished_samples),
            "rollout/truncated_share": _mean(sample.truncated for sample in samples),
        }
        found |= {f"rollout/dropped/{reason}": n for reason, n in sorted(self.dropped_groups.items()) if n}
        for name in ("restarted", "rejected_replies", "rejected_grades"):
            if count := getattr(self, name):
                found[f"rollout/{name}"] = count
        if self.graded:
            found["reward/accuracy_all"] = self.correct / self.graded
        found |= {f"rollout/length_{name}": _mean(lengths) for name, lengths in self._lengths.items() if lengths}
        return found


def _lengths(group: Group) -> list[int]:
    """Generated tokens of each rollout."""
    return [sum(sample.trained_tokens for sample in rollout) for rollout in group.rollouts]


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items) if items else 0.0


@dataclass(slots=True)
class Occupancy:
    """How full the engine was: means over time of the groups and requests in flight. Call `change` after each."""

    now: float
    max_running: int
    _groups: int = 0
    _requests: int = 0
    _seconds: float = 0.0
    _group_seconds: float = 0.0
    _request_seconds: float = 0.0

    def change(self, now: float, requests: int, groups: int | None = None) -> None:
        """`requests` may include some that queue: only those that the engine runs count. `groups` None: as before."""
        elapsed, self.now = now - self.now, now
        self._seconds += elapsed
        self._group_seconds += elapsed * self._groups
        self._request_seconds += elapsed * self._requests
        self._requests = min(requests, self.max_running)
        if groups is not None:
            self._groups = groups

    def metrics(self) -> dict[str, float]:
        seconds = self._seconds or 1.0
        return {
            "rollout/groups_in_flight": self._group_seconds / seconds,
            "rollout/engine_occupancy": self._request_seconds / (seconds * max(1, self.max_running)),
        }


# Of a finished request: server, request id, start (time.monotonic()), tokens.
OnRequest = Callable[[str, str, float, int], None]


class GroupEvents:
    """What the running groups report to their step. They write here; the step reads, and waits for `changed`."""

    def __init__(self, max_running: int = 0, on_request: OnRequest | None = None) -> None:
        self.accounting = StepAccounting()
        self.changed = asyncio.Event()
        self.refill = False  # the step waits for a free place in the engine
        self._on_request = on_request
        self._clock = asyncio.get_running_loop().time
        self.occupancy = Occupancy(self._clock(), max_running)

    def request(self, server: str, request_id: str, started: float, tokens: int, rejected: int = 0) -> None:
        """A request has returned `tokens` tokens, after `rejected` replies that made no sense. Those that fail are not
        reported."""
        self.accounting.response_tokens += tokens
        self.accounting.rejected_replies += rejected
        if self._on_request is not None:
            self._on_request(server, request_id, started, tokens)

    def removed(self, tokens: int) -> None:
        """`tokens` tokens will be generated again."""
        self.accounting.response_tokens -= tokens

    def restarted(self, tokens: int) -> None:
        """A conversation of `tokens` tokens starts again."""
        self.accounting.restarted += 1
        self.accounting.wasted_tokens += tokens

    def generated(self, requests: int) -> None:
        """A rollout needs the engine no longer, or again; `requests` do now."""
        self.occupancy.change(self._clock(), requests)
        if self.refill:
            self.changed.set()

    def finished(self) -> None:
        """A rollout is graded."""
        self.accounting.finished_samples += 1
        self.changed.set()
