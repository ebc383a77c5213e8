"""The prompts of a run: one file or several, mixed by weight, with an optional curriculum, and what a step drew.

Every source has its own cursor, so each of its epochs takes every prompt at most once. After any number of prompts, a
source has given its weight's share of them, within one prompt. The next source follows from `credit` alone, so the
mixture is resumed exactly, also with other weights.

Results of groups count for the curriculum from the next step on (`begin_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.config.data import CurriculumConfig
from megatron_dapo.data.cursor import PromptCursor
from megatron_dapo.data.sources import DataError
from megatron_dapo.types import Group, Prompt, StepBatch

FILE = "file"  # in a prompt's `meta`: the name of its source


class PromptMixture:
    def __init__(
        self,
        sources: Mapping[str, Sequence[Prompt]],
        seed: int,
        *,
        weights: Mapping[str, float] | None = None,
        curriculum: CurriculumConfig | None = None,
        group_size: int = 2,
    ) -> None:
        """`weights` by source; default: equal."""
        if not sources:
            raise DataError("a mixture needs at least one source")
        self._cursors = {
            name: PromptCursor(prompts, seed, curriculum=curriculum, group_size=group_size)
            for name, prompts in sources.items()
        }
        given = {name: (weights or {}).get(name, 1.0) for name in sources}
        self._weights = {name: weight / sum(given.values()) for name, weight in given.items()}
        self._credit = dict.fromkeys(sources, 0.0)
        self._step = StepDraws(-1)

    def take(self, count: int) -> list[Prompt]:
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> Prompt:
        for name, weight in self._weights.items():
            self._credit[name] += weight
        name = max(self._credit, key=self._credit.__getitem__)  # of equal ones the first
        self._credit[name] -= 1.0
        cursor = self._cursors[name]
        passed_over = cursor.passed_over
        (prompt,) = cursor.take(1)
        self._step.taken += 1
        self._step.passed_over += cursor.passed_over - passed_over
        if cursor.history is not None:
            self._step.predicted += cursor.history.informative(prompt.id)
        return prompt

    # ---- results ----

    def begin_step(self, step: int) -> None:
        """Before the prompts of a step are drawn. An interrupted step that continues does not begin again."""
        if step == self._step.step:
            return
        self._step = StepDraws(step)
        for cursor in self._cursors.values():
            if cursor.history is not None:
                cursor.history.commit()

    def record(self, group: Group) -> None:
        """A group that was decided, whether it was kept or not."""
        right, graded = sum(group.accuracies), len(group.accuracies)
        if not graded:
            return
        name = self._source_of(group)
        self._step.right[name] += right
        self._step.graded[name] += graded
        history = self._cursors[name].history
        if history is not None:
            history.record(group.prompt.id, right, graded - right)

    def _source_of(self, group: Group) -> str:
        return str(group.prompt.meta.get(FILE, "")) if len(self._cursors) > 1 else next(iter(self._cursors))

    def metrics(self, batch: StepBatch) -> dict[str, float]:
        """Of the present step. Per-source metrics only where there are several sources."""
        draws, cursors = self._step, self._cursors
        found = {"data/epoch": min(cursor.epochs for cursor in cursors.values())}
        if any(cursor.history is not None for cursor in cursors.values()):
            found["data/passed_over_share"] = draws.passed_over / max(1, draws.taken + draws.passed_over)
            if draws.taken:
                found["data/predicted_yield"] = draws.predicted / draws.taken
        if len(cursors) > 1:
            groups = Counter(self._source_of(group) for group in batch.groups)
            for name, cursor in cursors.items():
                found[f"data/{name}/share"] = groups[name] / max(1, len(batch.groups))
                found[f"data/{name}/epoch"] = cursor.epochs
                if draws.graded[name]:
                    found[f"data/{name}/accuracy"] = draws.right[name] / draws.graded[name]
        return found

    # ---- state ----

    @property
    def taken(self) -> int:
        """Prompts returned since the beginning."""
        return sum(cursor.taken for cursor in self._cursors.values())

    def state_dict(self) -> dict[str, Any]:
        """JSON values and numpy arrays. Of one source it is the cursor's state, as in earlier versions."""
        if len(self._cursors) == 1:
            (cursor,) = self._cursors.values()
            return {**cursor.state_dict(), "step": self._step.to_state()}
        return {
            "sources": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "credit": dict(self._credit),
            "step": self._step.to_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "sources" in state and len(self._cursors) > 1:
            self._load_sources(state)
        elif "sources" in state or len(self._cursors) > 1:
            saved = ", ".join(state["sources"]) if "sources" in state else "one file"
            raise DataError(self._other_sources(saved))
        else:
            (cursor,) = self._cursors.values()
            cursor.load_state_dict(state)
        self._step = StepDraws.from_state(state["step"]) if "step" in state else StepDraws(-1)

    def _load_sources(self, state: dict[str, Any]) -> None:
        saved = state["sources"]
        if saved.keys() != self._cursors.keys():
            raise DataError(self._other_sources(", ".join(saved)))
        for name, cursor in self._cursors.items():
            try:
                cursor.load_state_dict(saved[name])
            except DataError as error:
                raise DataError(f"source {name}: {error}") from None
        self._credit = {name: float(state["credit"][name]) for name in self._cursors}

    def _other_sources(self, saved: str) -> str:
        return (
            f"the run was started with {saved}, but now its data is {', '.join(self._cursors)}: use the same files "
            "(their weights may change), or another trainer.run_dir"
        )


class StepDraws:
    """What one step drew and what became known about it, for metrics."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.taken = self.passed_over = 0
        self.predicted = 0.0  # sum over the prompts taken
        self.right: Counter[str] = Counter()  # samples by source
        self.graded: Counter[str] = Counter()

    def to_state(self) -> dict[str, Any]:
        return {**vars(self), "right": dict(self.right), "graded": dict(self.graded)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StepDraws:
        draws = cls(state["step"])
        vars(draws).update(state, right=Counter(state["right"]), graded=Counter(state["graded"]))
        return draws
