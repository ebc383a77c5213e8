"""A step that was cut short before its batch was full, and goes on where it was: in this process or after a resume.

Its groups are the sampler's (accepted ones are surplus, the others unfinished). Here is what else the step knew, so
that the whole step decides and counts what it would have without the interruption.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron_dapo.rollout.accounting import Tally
from megatron_dapo.rollout.group_runner import PendingGroup


@dataclass(slots=True)
class CutStep:
    step: int
    tally: Tally
    seconds: float
    running: list[int]  # serials of the groups that were started and not yet decided
    rejected: list[tuple[PendingGroup, str]]  # for on_limit: fill
    repeats: Counter[str]  # how often a prompt was drawn in this step; part of its seeds
    last_failure: str = ""  # of a group, in words

    def to_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tally": self.tally.to_state(),
            "seconds": self.seconds,
            "running": self.running,
            "rejected": [[pending.to_state(), reason] for pending, reason in self.rejected],
            "repeats": dict(self.repeats),
            "last_failure": self.last_failure,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CutStep:
        rejected = [(PendingGroup.from_state(pending), reason) for pending, reason in state["rejected"]]
        tally, repeats = Tally.from_state(state["tally"]), Counter(state["repeats"])
        running, last_failure = state["running"], state.get("last_failure", "")
        return cls(state["step"], tally, state["seconds"], running, rejected, repeats, last_failure)
