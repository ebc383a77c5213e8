"""The share of decided groups that the group filter keeps: an estimate that follows a run.

Decisions of earlier steps count less with each step, so the estimate follows a policy whose prompts become too easy or
too hard. It depends only on the decisions and their order, never on time.
"""

from __future__ import annotations

from dataclasses import dataclass

# Before the first decision: as if 8 groups had been decided and 70 % of them kept.
PRIOR_DECIDED, PRIOR_YIELD = 8.0, 0.7
DECAY = 0.7  # weight of a decision after each further step
SMALLEST = 0.05  # limits the groups in flight when nothing is kept


@dataclass(slots=True)
class YieldEstimate:
    kept: float = PRIOR_DECIDED * PRIOR_YIELD
    decided: float = PRIOR_DECIDED

    @property
    def value(self) -> float:
        return max(SMALLEST, self.kept / self.decided)

    def add(self, keep: bool) -> None:
        self.kept += keep
        self.decided += 1

    def end_step(self) -> None:
        self.kept *= DECAY
        self.decided *= DECAY

    def to_state(self) -> list[float]:
        return [self.kept, self.decided]

    @classmethod
    def from_state(cls, state: list[float] | None) -> YieldEstimate:
        """None: a checkpoint of a version that had no estimate."""
        return cls(*state) if state else cls()
