"""Opens what `reward` configures: one grader, or several whose scores are added up with weights.

The first of several graders decides `correct`. `Grade.parts` has the score of each. Where a grader with a weight could
not grade a response, the sum is not known, so the response is ungraded; a grader of weight 0 is only reported.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megatron_dapo import fault_points
from megatron_dapo.config.data import RewardConfig, WeightedGraderConfig
from megatron_dapo.reward.grader import Graders
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.types import Grade, Prompt, Sample, Tokens


def open_graders(config: RewardConfig, tokenizer: str = "") -> Graders:
    """`async with open_graders(config) as graders: …`. `tokenizer`: as for RewardPool."""
    if not config.graders:
        return _single(config, "reward", tokenizer)
    return CombinedGraders(
        [
            Weighted(one.label, one.weight, _single(_settings(config, one), f"reward.graders[{i}]", tokenizer))
            for i, one in enumerate(config.graders)
        ]
    )


def _settings(config: RewardConfig, one: WeightedGraderConfig) -> RewardConfig:
    own = {"grader": one.grader, "http": one.http, "judge": one.judge, "graders": []}
    return config.model_copy(update=own)


def _single(config: RewardConfig, key: str, tokenizer: str) -> Graders:
    # Imported here: grading processes import this package, and need no HTTP client.
    if config.grader in ("http", "judge"):
        from megatron_dapo.reward.remote import HttpReward, Judge

        return HttpReward(config, f"{key}.http") if config.grader == "http" else Judge(config, f"{key}.judge")
    return RewardPool(config, tokenizer)


@dataclass(slots=True, frozen=True)
class Weighted:
    name: str
    weight: float
    grader: Graders


class CombinedGraders(Graders):
    def __init__(self, members: list[Weighted]) -> None:
        super().__init__()
        self._members = members
        self._stack = AsyncExitStack()
        self.decodes_tokens = all(member.grader.decodes_tokens for member in members)

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            for member in self._members:
                await stack.enter_async_context(member.grader)
            self._stack = stack.pop_all()

    async def close(self) -> None:
        await self._stack.aclose()

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        return self._combine(await asyncio.gather(*(m.grader.grade(prompt, sample) for m in self._members)))

    async def grade_tokens(self, prompt: Prompt, sample: Sample) -> Grade:
        return self._combine(await asyncio.gather(*(m.grader.grade_tokens(prompt, sample) for m in self._members)))

    def metrics(self) -> dict[str, float]:
        """The counts of all graders; graded, ungraded and correct are those of the combined grade."""
        total: Counter[str] = Counter()
        for member in self._members:
            total.update(member.grader.metrics())
        return {**total, **super().metrics()}

    def _combine(self, grades: list[Grade]) -> Grade:
        self.last_error = next((m.grader.last_error for m in self._members if m.grader.last_error), "")
        return self._count(combine({m.name: (m.weight, g) for m, g in zip(self._members, grades, strict=True)}))


def combine(grades: dict[str, tuple[float, Grade]]) -> Grade:
    """The combined grade of (weight, grade) by the grader's name; the first decides `correct`."""
    parts = {name: None if grade.ungraded else grade.score for name, (_, grade) in grades.items()}
    first = next(iter(grades.values()))[1]
    missing = [name for name, (weight, grade) in grades.items() if grade.ungraded and (weight or grade is first)]
    if missing:
        why = "; ".join(f"{name}: {grades[name][1].reason}" for name in missing)
        return Grade(None, 0.0, first.extracted, why, parts)
    counted = [(weight, grade) for weight, grade in grades.values() if weight]
    score = sum(weight * grade.score for weight, grade in counted)
    turns = zip_longest(*([weight * reward for reward in grade.turns] for weight, grade in counted), fillvalue=0.0)
    return Grade(first.correct, score, first.extracted, first.reason, parts, tuple(map(sum, turns)))


SHORT = 512  # tokens; decoding fewer costs less than sending them to a process


class ResponseGrader:
    """Grades samples by their tokens: text is made from them once, and where it costs the driving process least."""

    def __init__(self, config: RewardConfig, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        # Only the tokenizers library can decode elsewhere; other tokenizers, and this clean-up, are Python code.
        fast = getattr(tokenizer, "is_fast", False) and not tokenizer.clean_up_tokenization_spaces
        self.tokenizer_json = str(tokenizer.backend_tokenizer.to_str()) if fast else ""
        self.graders = open_graders(config, self.tokenizer_json)

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        fault_points.reach("rollouts/before_grade")
        tokens = sample.final_tokens
        if len(tokens) > SHORT and self.tokenizer_json:
            if self.graders.decodes_tokens:
                return await self.graders.grade_tokens(prompt, sample)
            sample.text = await asyncio.to_thread(self.decode, tokens)  # releases the GIL
        else:
            sample.text = self.decode(tokens)
        return await self.graders.grade(prompt, sample)

    def add_texts(self, samples: Sequence[Sample]) -> None:
        """For samples that are shown to people."""
        for sample in samples:
            sample.text = readable(sample, self.decode)


def readable(sample: Sample, decode: Callable[[Tokens], str]) -> str:
    """The response; the turns of a conversation under their roles."""
    if not sample.turns:
        return decode(sample.response_tokens)
    turns = ((turn.role, decode(sample.response_tokens[turn.start : turn.end])) for turn in sample.turns)
    return "\n".join(f"[{role}] {text}" for role, text in turns)
