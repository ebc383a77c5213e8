"""The cursor over a prompt set: a new shuffle every epoch, and a position that can be saved and restored.

The order of an epoch depends on the seed, the epoch and the prompts' ids, not on the order of the file, the version of
numpy, or the number of prompts taken at a time. The saved position of another prompt set is refused.

With a curriculum, an epoch still takes every prompt at most once, but passes over a prompt with the probability that
its group would not be informative (`history`). The floor bounds that probability: in every epoch each prompt is taken
with at least `floor`. A prompt without history is always taken. The draw depends on the seed, the epoch and the
prompt's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from megatron_dapo.config.data import CurriculumConfig
from megatron_dapo.data.history import PromptHistory
from megatron_dapo.data.sources import DataError
from megatron_dapo.types import Prompt


class PromptCursor:
    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        curriculum: CurriculumConfig | None = None,
        group_size: int = 2,
    ) -> None:
        """`group_size`: samples per prompt, for the curriculum."""
        if not prompts:
            raise DataError("a cursor needs at least one prompt")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._epoch = self._position = self._taken = self._passed_over = 0
        self._order = self._shuffled(0)
        self._floor = curriculum.floor if curriculum else 1.0
        self.history: PromptHistory | None = None
        if curriculum is not None and curriculum.enabled:
            self.history = PromptHistory((prompt.id for prompt in prompts), group_size, curriculum.decay)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def taken(self) -> int:
        """Prompts returned since the beginning."""
        return self._taken

    @property
    def passed_over(self) -> int:
        """Prompts that the curriculum passed over since the beginning."""
        return self._passed_over

    @property
    def epochs(self) -> float:
        """Epochs since the beginning, with the part of the present one that is done."""
        return self._epoch + self._position / len(self._order)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; at the end of an epoch, the next one begins."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._next_epoch()
            prompt = self._prompts[self._order[self._position]]
            self._position += 1
            if self._wanted(prompt):
                taken.append(prompt)
        self._taken += count
        return taken

    def _next_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
        self._order = self._shuffled(self._epoch)
        if self.history is not None:
            self.history.decay()

    def _wanted(self, prompt: Prompt) -> bool:
        if self.history is None or not self.history.known(prompt.id):
            return True
        draw = hashlib.blake2b(f"{self._seed}:{self._epoch}:take:{prompt.id}".encode(), digest_size=8).digest()
        wanted = int.from_bytes(draw, "big") < max(self._floor, self.history.informative(prompt.id)) * 2.0**64
        self._passed_over += not wanted
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """JSON values, and numpy arrays in `history`."""
        state = {
            "seed": self._seed, "shuffle": self._shuffle, "epoch": self._epoch, "position": self._position,
            "taken": self._taken, "passed_over": self._passed_over,
            "prompts": len(self._prompts), "fingerprint": self._fingerprint(),
        }  # fmt: skip
        return state if self.history is None else {**state, "history": self.history.to_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position of the same prompts; seed and shuffling are taken from the state. A history is
        restored if there is one and the curriculum is on."""
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                f"the saved position belongs to a set of {state['prompts']} prompts, but this is another set, of "
                f"{len(self._prompts)}: use the data file and data settings of the run that you resume"
            )
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._taken = int(state.get("taken", self._epoch * len(self._prompts) + self._position))
        self._passed_over = int(state.get("passed_over", 0))
        self._order = self._shuffled(self._epoch)
        if self.history is not None and "history" in state:
            self.history.restore(state["history"])

    def _shuffled(self, epoch: int) -> list[int]:
        indices = list(range(len(self._prompts)))
        if not self._shuffle:
            return indices
        salt = f"{self._seed}:{epoch}:".encode()

        def key(index: int) -> bytes:
            return hashlib.blake2b(salt + self._prompts[index].id.encode(), digest_size=16).digest()

        return sorted(indices, key=key)

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        listed = [f"{p.id} {p.answer}" for p in self._prompts]
        for prompt in sorted(listed) if self._shuffle else listed:
            digest.update(prompt.encode() + b"\n")
        return digest.hexdigest()
