"""The prompts of a run: loaded and tokenised once, then drawn from one file or from several mixed by weight.

Every source has its own cursor, which shuffles it anew in every epoch. The order of an epoch depends on the seed, the
epoch and the prompts' ids, not on the order of the file or the number of prompts taken at a time. After any number of
prompts, a source has given its weight's share of them, within one prompt. The next source follows from `credit` alone,
so the mixture is resumed exactly, also with other weights. The saved position of another prompt set is refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config import Config
from megatron_dapo.config.data import PromptFileConfig
from megatron_dapo.data.columns import DataError
from megatron_dapo.data.prompts import PromptSet, answer_key, load_prompts
from megatron_dapo.types import Group, Prompt, StepBatch

FILE = "file"  # in a prompt's `meta`: the name of its source
Named = Callable[[str], AbstractContextManager[Any]]


@dataclass(slots=True, frozen=True)
class RunData:
    """Prompt sets by the name of their file in metrics."""

    training: dict[str, PromptSet]
    evaluation: dict[str, PromptSet]

    def mixture(self, config: Config) -> PromptMixture:
        return PromptMixture(self.training, config.trainer.seed, config.data.weights)

    def report(self) -> str:
        """What was read of every file, a line or more for each; then benchmarks whose problems are also trained on."""
        lines = [loaded.report.summary() for loaded in (*self.training.values(), *self.evaluation.values())]
        trained = {prompt.id for loaded in self.training.values() for prompt in loaded}
        for loaded in self.evaluation.values():
            if count := sum(prompt.id in trained for prompt in loaded):
                lines.append(
                    f"warning: {loaded.report.path}: {count} of its {len(loaded)} problems are also training prompts"
                )
        return "\n".join(lines)


def load_run_data(config: Config, tokenizer: Any, named: Named = lambda key: nullcontext()) -> RunData:
    """Raises DataError. `named(key)` surrounds the loading of the file under a configuration key."""
    limit = config.rollout.max_prompt_tokens

    def load(key: str, files: Mapping[str, PromptFileConfig], several: bool) -> dict[str, PromptSet]:
        found = {}
        for name, file in files.items():
            with named(f"{key}.sources ({name})" if several else f"{key}.path"):
                found[name] = load_prompts(file, tokenizer, limit)
        return found

    training = load("data", config.data.files, bool(config.data.sources))
    if config.data.sources:
        with named("data.sources"):
            training = _without_repeated(training)
            for name, loaded in training.items():
                for prompt in loaded:
                    prompt.meta[FILE] = name
    return RunData(training, load("evaluate.data", config.evaluate.data.files, bool(config.evaluate.data.sources)))


def _without_repeated(sets: dict[str, PromptSet]) -> dict[str, PromptSet]:
    """Every question once, in the first file that has it; none whose answers differ, in one file or between files. The
    reports say what was removed."""
    first: dict[str, tuple[str, Prompt]] = {}  # by prompt: its first file
    conflicts = {id: conflict for loaded in sets.values() for id, conflict in loaded.report.conflicts.items()}
    for name, loaded in sets.items():
        for prompt in loaded:
            _, known = first.setdefault(prompt.id, (name, prompt))
            if answer_key(known.answer) != answer_key(prompt.answer):
                _, answers = conflicts.setdefault(prompt.id, (prompt.question, {known.answer: [known.meta["line"]]}))
                answers.setdefault(prompt.answer, []).append(prompt.meta["line"])
    kept = {}
    for name, loaded in sets.items():
        report, prompts = loaded.report, []
        for prompt in loaded:
            if prompt.id in conflicts:
                report.conflicts[prompt.id] = conflicts[prompt.id]
            elif first[prompt.id][0] != name:
                report.duplicates += 1
            else:
                prompts.append(prompt)
        if not prompts:
            raise DataError(
                f"{report.path}: all of its {len(loaded)} prompts are also in the files listed before it, or have "
                "another answer in one of the files"
            )
        report.kept = len(prompts)
        kept[name] = PromptSet(tuple(prompts), report)
    return kept


class PromptCursor:
    """Every prompt of a set once an epoch, and a position that can be saved and restored."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("a cursor needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    @property
    def epochs(self) -> float:
        """Epochs since the beginning, with the part of the present one that is done."""
        return self._epoch + self._position / len(self._order)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; at the end of an epoch, the next one begins."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled()
            taken.append(self._prompts[self._order[self._position]])
            self._position += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed, "epoch": self._epoch, "position": self._position,
            "prompts": len(self._prompts), "fingerprint": self._fingerprint(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position of the same prompts; the seed is taken from the state."""
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                f"the saved position belongs to a set of {state['prompts']} prompts, but this is another set, of "
                f"{len(self._prompts)}: use the data file and data settings of the run that you resume"
            )
        self._seed = int(state["seed"])
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        salt = f"{self._seed}:{self._epoch}:".encode()

        def key(index: int) -> bytes:
            return hashlib.blake2b(salt + self._prompts[index].id.encode(), digest_size=16).digest()

        return sorted(range(len(self._prompts)), key=key)

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for prompt in sorted(f"{p.id} {p.answer}" for p in self._prompts):
            digest.update(prompt.encode() + b"\n")
        return digest.hexdigest()


class PromptMixture:
    def __init__(
        self, sources: Mapping[str, Sequence[Prompt]], seed: int, weights: Mapping[str, float] | None = None
    ) -> None:
        """`weights` by source; default: equal."""
        if not sources:
            raise DataError("a mixture needs at least one source")
        self._cursors = {name: PromptCursor(prompts, seed) for name, prompts in sources.items()}
        given = {name: (weights or {}).get(name, 1.0) for name in sources}
        self._weights = {name: weight / sum(given.values()) for name, weight in given.items()}
        self._credit = dict.fromkeys(sources, 0.0)
        self._step = -1
        self._right: Counter[str] = Counter()  # samples of the step, by source
        self._graded: Counter[str] = Counter()

    def take(self, count: int) -> list[Prompt]:
        return [self.next_prompt() for _ in range(count)]

    def next_prompt(self) -> Prompt:
        for name, weight in self._weights.items():
            self._credit[name] += weight
        name = max(self._credit, key=self._credit.__getitem__)  # of equal ones the first
        self._credit[name] -= 1.0
        (prompt,) = self._cursors[name].take(1)
        return prompt

    def begin_step(self, step: int) -> None:
        """Starts the metrics of a step. An interrupted step that continues does not begin again."""
        if step != self._step:
            self._step = step
            self._right = Counter()
            self._graded = Counter()

    def record(self, group: Group) -> None:
        """A group that was decided, whether it was kept or not."""
        name = self._source_of(group)
        self._right[name] += sum(group.accuracies)
        self._graded[name] += len(group.accuracies)

    def _source_of(self, group: Group) -> str:
        return str(group.prompt.meta.get(FILE, "")) if len(self._cursors) > 1 else next(iter(self._cursors))

    def metrics(self, batch: StepBatch) -> dict[str, float]:
        """Of the present step. Per-source metrics only where there are several sources."""
        cursors = self._cursors
        found = {"data/epoch": min(cursor.epochs for cursor in cursors.values())}
        if len(cursors) > 1:
            groups = Counter(self._source_of(group) for group in batch.groups)
            for name, cursor in cursors.items():
                found[f"data/{name}/share"] = groups[name] / max(1, len(batch.groups))
                found[f"data/{name}/epoch"] = cursor.epochs
                if self._graded[name]:
                    found[f"data/{name}/accuracy"] = self._right[name] / self._graded[name]
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "sources": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "credit": dict(self._credit),
            "step": self._step,
            "right": dict(self._right),
            "graded": dict(self._graded),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["sources"]
        if len(saved) == len(self._cursors) == 1:  # a single file may have another name
            (cursor,) = self._cursors.values()
            cursor.load_state_dict(*saved.values())
        elif saved.keys() == self._cursors.keys():
            for name, cursor in self._cursors.items():
                try:
                    cursor.load_state_dict(saved[name])
                except DataError as error:
                    raise DataError(f"source {name}: {error}") from None
            self._credit = {name: float(state["credit"][name]) for name in self._cursors}
        else:
            raise DataError(
                f"the run was started with {', '.join(saved)}, but now its data is {', '.join(self._cursors)}: use "
                "the same files (their weights may change), or another trainer.run_dir"
            )
        self._step = state["step"]
        self._right = Counter(state["right"])
        self._graded = Counter(state["graded"])
