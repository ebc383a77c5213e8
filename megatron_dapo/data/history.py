"""The history of every prompt's accuracy, and how likely the next group of a prompt is to be informative.

A prompt's samples are right or wrong with an unknown probability p. The history counts right and wrong samples, with
older ones decayed; with Jeffreys' prior for p it gives the probability that a group of G samples is neither all right
nor all wrong:

    1 − E[p^G] − E[(1 − p)^G],   p ~ Beta(½ + right, ½ + wrong)

New results wait until `commit`, which the caller calls between two steps. Prompts that are drawn within a step
therefore do not depend on which of its groups finished first, and a resumed run draws the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

PRIOR = 0.5  # right and wrong samples that every prompt starts with


class PromptHistory:
    def __init__(self, prompt_ids: Iterable[str], group_size: int, decay: float) -> None:
        self._index = {name: index for index, name in enumerate(sorted(prompt_ids))}  # whatever the file's order
        self._group_size, self._decay = group_size, decay
        self._right = np.zeros(len(self._index))
        self._wrong = np.zeros(len(self._index))
        self._pending: list[tuple[int, int, int]] = []  # prompt, right, wrong

    def record(self, prompt_id: str, right: int, wrong: int) -> None:
        """The graded samples of one group; they count from the next `commit` on."""
        self._pending.append((self._index[prompt_id], right, wrong))

    def commit(self) -> None:
        for index, right, wrong in sorted(self._pending):  # sums of floats depend on their order
            self._right[index] += right
            self._wrong[index] += wrong
        self._pending = []

    def decay(self) -> None:
        """An epoch has ended: all results so far count less."""
        self._right *= self._decay
        self._wrong *= self._decay

    def known(self, prompt_id: str) -> bool:
        index = self._index[prompt_id]
        return bool(self._right[index] + self._wrong[index] > 0)

    def informative(self, prompt_id: str) -> float:
        """The probability that the prompt's next group is neither all right nor all wrong."""
        index = self._index[prompt_id]
        right, wrong = PRIOR + float(self._right[index]), PRIOR + float(self._wrong[index])
        all_right = all_wrong = 1.0
        for drawn in range(self._group_size):
            total = right + wrong + drawn
            all_right *= (right + drawn) / total
            all_wrong *= (wrong + drawn) / total
        return 1.0 - all_right - all_wrong

    def to_state(self) -> dict[str, Any]:
        pending = np.array(self._pending, dtype=np.int64).reshape(-1, 3)
        return {"right": self._right.copy(), "wrong": self._wrong.copy(), "pending": pending}

    def restore(self, state: dict[str, Any]) -> None:
        """Of the same prompts: the cursor has compared them."""
        self._right = np.array(state["right"], dtype=np.float64)
        self._wrong = np.array(state["wrong"], dtype=np.float64)
        pending = np.asarray(state["pending"], dtype=np.int64).reshape(-1, 3)
        self._pending = [(int(index), int(right), int(wrong)) for index, right, wrong in pending]
