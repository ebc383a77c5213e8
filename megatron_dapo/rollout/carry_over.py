"""Everything that one step of the sampler leaves for the next one. It is the sampler's whole persistent state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.rollout.accounting import StepAccounting
from megatron_dapo.rollout.fill_policy import YieldEstimate
from megatron_dapo.rollout.pending_group import PendingGroup

# A step that was cancelled before its batch was full. It continues later, in this process or after a resume.


@dataclass(slots=True)
class InterruptedStep:
    step: int
    accounting: StepAccounting
    seconds: float
    running: list[int]  # serials of the groups that were started and not yet decided
    rejected: list[tuple[PendingGroup, str]]  # with the reason; for on_limit: fill
    last_failure: str = ""  # message of the last group that failed

    def to_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "accounting": self.accounting.to_state(),
            "seconds": self.seconds,
            "running": self.running,
            "rejected": [[pending.to_state(), reason] for pending, reason in self.rejected],
            "last_failure": self.last_failure,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> InterruptedStep:
        return cls(
            step=state["step"],
            accounting=StepAccounting.from_state(state["accounting"]),
            seconds=state["seconds"],
            running=state["running"],
            rejected=[(PendingGroup.from_state(pending), reason) for pending, reason in state["rejected"]],
            last_failure=state.get("last_failure", ""),
        )


@dataclass(slots=True)
class DrawnPrompts:
    """How often each prompt was drawn in `step`. The count is part of a sample's seed, so that a step that is repeated
    after an error does not sample the same responses again."""

    step: int = -1
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class CarryOver:
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
            "yield_estimate": self.yield_estimate.to_state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CarryOver:
        state = _from_older_format(state)
        drawn, interrupted = state.get("drawn"), state.get("interrupted")
        return cls(
            next_serial=state["next_serial"],
            surplus=[PendingGroup.from_state(pending) for pending in state["surplus"]],
            unfinished=[PendingGroup.from_state(pending) for pending in state["unfinished"]],
            drawn=DrawnPrompts(drawn["step"], Counter(drawn["counts"])) if drawn else DrawnPrompts(),
            interrupted=InterruptedStep.from_state(interrupted) if interrupted else None,
            yield_estimate=YieldEstimate.from_state(state.get("yield_estimate")),
        )


def _from_older_format(state: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints once held an interrupted step under `cut`, its accounting under `tally`, and `repeats` inside it."""
    cut = state.get("cut")
    if not cut:
        return state
    drawn = {"step": cut["step"], "counts": cut["repeats"]}
    return {**state, "drawn": drawn, "interrupted": {**cut, "accounting": cut["tally"]}}
