"""A step that was cancelled before its batch was full. It continues later, in this process or after a resume.

The groups themselves are in `CarryOver`: accepted ones are surplus, all others are unfinished. This is the rest of what
the step needs to make the same decisions and the same counts as without the interruption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dapo.rollout.accounting import StepAccounting
from megatron_dapo.rollout.pending_group import PendingGroup


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
