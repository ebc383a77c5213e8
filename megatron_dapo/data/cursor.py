"""The cursor over a prompt set: a new shuffle every epoch, and a position that can be saved and restored.

The order of an epoch depends on the seed, the epoch and the prompts' ids, not on the order of the file, the version of
numpy, or the number of prompts taken at a time. The saved position of another prompt set is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from megatron_dapo.data.sources import DataError
from megatron_dapo.types import Prompt


class PromptCursor:
    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("a cursor needs at least one prompt")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._epoch = self._position = 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def taken(self) -> int:
        """Prompts returned since the beginning."""
        return self._epoch * len(self._prompts) + self._position

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; at the end of an epoch, the next one begins."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
            end = self._position + count - len(taken)
            taken += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = min(end, len(self._order))
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed, "shuffle": self._shuffle, "epoch": self._epoch, "position": self._position,
            "prompts": len(self._prompts), "fingerprint": self._fingerprint(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position of the same prompts; seed and shuffling are taken from the state."""
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                f"the saved position belongs to a set of {state['prompts']} prompts, but this is another set, of "
                f"{len(self._prompts)}: use the data file and data settings of the run that you resume"
            )
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

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
