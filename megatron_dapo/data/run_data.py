"""All prompts of a run, training and evaluation, loaded and tokenised once.

The check of the set-up loads them and hands them on to the rollouts. With several training files, a question that is in
more than one of them belongs to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config import Config
from megatron_dapo.config.data import PromptFileConfig
from megatron_dapo.data.mixture import FILE, PromptMixture
from megatron_dapo.data.prompts import PromptSet, answer_key, load_prompts
from megatron_dapo.data.sources import DataError
from megatron_dapo.types import Prompt

Named = Callable[[str], AbstractContextManager[Any]]


@dataclass(slots=True, frozen=True)
class RunData:
    """Prompt sets by the name of their file in metrics."""

    training: dict[str, PromptSet]
    evaluation: dict[str, PromptSet]

    def mixture(self, config: Config) -> PromptMixture:
        return PromptMixture(
            self.training,
            config.trainer.seed,
            weights=config.data.weights,
            curriculum=config.data.curriculum,
            group_size=config.rollout.samples_per_prompt,
        )

    def report(self) -> str:
        """What was read of every file, a line or more for each."""
        return "\n".join(loaded.report.summary() for loaded in (*self.training.values(), *self.evaluation.values()))


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
            training = _mixed(training, config.data)
    return RunData(training, load("evaluate.data", config.evaluate.data.files, bool(config.evaluate.data.sources)))


def _mixed(sets: dict[str, PromptSet], config: PromptFileConfig) -> dict[str, PromptSet]:
    """Every question once, in the first file that has it; the reports say what was removed."""
    if config.duplicates == "drop":
        sets = _without_repeated(sets, drop_conflicts=config.conflicts == "drop")
    for name, loaded in sets.items():
        for prompt in loaded:
            prompt.meta[FILE] = name
    return sets


def _without_repeated(sets: dict[str, PromptSet], drop_conflicts: bool) -> dict[str, PromptSet]:
    first: dict[str, tuple[str, Prompt]] = {}  # by prompt: its first file
    conflicts: dict[str, dict[str, list[int]]] = {}  # by prompt: answer to lines
    for name, loaded in sets.items():
        for prompt in loaded:
            _, known = first.setdefault(prompt.id, (name, prompt))
            if drop_conflicts and answer_key(known.answer) != answer_key(prompt.answer):
                answers = conflicts.setdefault(prompt.id, {known.answer: [known.meta["line"]]})
                answers.setdefault(prompt.answer, []).append(prompt.meta["line"])
    kept = {}
    for name, loaded in sets.items():
        report, prompts = loaded.report, []
        for prompt in loaded:
            if prompt.id in conflicts:
                report.in_conflict += 1
                report.conflicts[prompt.meta["question"]] = conflicts[prompt.id]
            elif first[prompt.id][0] != name:
                report.duplicates += 1
            else:
                prompts.append(prompt)
        if not prompts:
            raise DataError(f"{report.path}: all of its {len(loaded)} prompts are also in the files listed before it")
        report.kept = len(prompts)
        kept[name] = PromptSet(tuple(prompts), report)
    return kept
