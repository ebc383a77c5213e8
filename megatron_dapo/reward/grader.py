"""Graders: they turn a response into a `Grade`.

Built in are `math` (equivalence), `dapo` (the published run's rules) and `exact` (the same text). Anything else is the
user's own function, `python:module.function`, called with the prompt and the response text. It may be async;
`Scores.read` says what it may return. `quick` of a built-in grader is bounded string operations that decide most
responses in the calling process. Where `quick` returns None, `grade` may take long or never end, so it runs in a
grading process (`reward.pool`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from megatron_dapo.errors import UserError
from megatron_dapo.plugins import is_plugin, load_function
from megatron_dapo.reward.dapo import published_answer, published_verdict
from megatron_dapo.reward.equivalence import decide, equivalent
from megatron_dapo.reward.extract import final_answer, reference_answer
from megatron_dapo.types import Grade, Prompt, Sample

if TYPE_CHECKING:  # a grading process does not need it
    from megatron_dapo.config.data import RewardConfig


class Grader(Protocol):
    def grade(self, prompt: Prompt, response: str) -> Grade: ...

    def quick(self, prompt: Prompt, response: str) -> Grade | None:
        """The grade if string operations are enough; None if `grade` must decide."""
        ...


class GraderError(UserError):
    """The grader is broken: it raised too often, its processes crash or cannot start. The message has its traceback.

    The policy's weights are consistent when this is raised, so the trainer saves a checkpoint before it ends.
    """


class Graders:
    """What grades the responses of a run: grading processes, a server, or several of them combined.

    `async with graders: grade = await graders.grade(prompt, sample)`. `grade` raises GraderError once grading cannot go
    on. Counts are since it was created.
    """

    decodes_tokens = False  # whether `grade_tokens` works; otherwise the caller decodes and calls `grade`
    counted: ClassVar[tuple[str, ...]] = ("graded", "correct", "ungraded")

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.last_error = ""  # of the last response for which the grader raised or its server failed

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        """The grade of `sample.text`."""
        raise NotImplementedError

    async def grade_tokens(self, prompt: Prompt, sample: Sample) -> Grade:
        """The grade of the text that `sample.final_tokens` decode to."""
        raise RuntimeError("this grader reads texts: decode the response first")

    def metrics(self) -> dict[str, float]:
        reasons = sorted(name for name in self._counts if name.startswith("ungraded/"))
        return {f"reward/{name}": float(self._counts[name]) for name in (*self.counted, *reasons)}

    def _count(self, grade: Grade) -> Grade:
        self._counts["ungraded" if grade.ungraded else "graded"] += 1
        self._counts["correct"] += grade.correct is True
        return grade


class Scores:
    """The scores of correct and wrong responses. `scale` is `reward.scores`."""

    def __init__(self, scale: str) -> None:
        self.right = 1.0
        self.wrong = -1.0 if scale == "plus-minus-one" else 0.0

    def grade(self, correct: bool, extracted: str | None, reason: str) -> Grade:
        return Grade(correct, self.right if correct else self.wrong, extracted, reason)

    def read(self, returned: Any) -> Grade:
        """The grade that a grader function, a grading server or a rollout function has returned.

        It is a Grade, a bool, a number (the score; correct above the middle of the scale), or a dict with `score` and
        optionally `correct` (verl: `acc`), `extracted`, `reason` and `turns`; other keys are ignored. Scalars of numpy
        and torch are numbers. A dict whose score is None is ungraded. The values may be unusable: see `Grade.plain`.
        """
        if isinstance(returned, Grade):
            return returned
        found = returned if isinstance(returned, dict) else {"score": returned}
        score, correct = _scalar(found.get("score")), _scalar(found.get("correct", found.get("acc")))
        extracted, reason = found.get("extracted"), found.get("reason") or ""
        if score is None and found is returned and "score" in found:
            return Grade(None, 0.0, extracted, reason or "the grader gave no score")
        if not isinstance(score, int | float) or not isinstance(correct, int | float | None):
            raise TypeError(f"expected a Grade, a bool, a number or a dict with 'score', found {returned!r:.200}")
        is_correct = score > (self.right + self.wrong) / 2 if correct is None else correct > 0.5
        if isinstance(score, bool):
            score = self.right if score else self.wrong
        return Grade(is_correct, score, extracted, reason, turns=tuple(found.get("turns") or ()))


def _scalar(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value


class MathGrader:
    """Correct if the answer has the reference's value or text, however it is written."""

    def __init__(self, config: RewardConfig) -> None:
        self._scores = Scores(config.scores)
        self._rule = config.dapo_rule

    def quick(self, prompt: Prompt, response: str) -> Grade | None:
        answer = self._find(response)
        if answer is None:
            return self._scores.grade(False, None, "no answer found")
        verdict = self._decide(prompt.answer, answer)
        return None if verdict is None else self._scores.grade(verdict[0], answer, verdict[1])

    def grade(self, prompt: Prompt, response: str) -> Grade:
        if quick := self.quick(prompt, response):
            return quick
        answer = self._find(response) or ""
        correct, reason = equivalent(reference_answer(prompt.answer), answer)
        return self._scores.grade(correct, answer, reason)

    def _find(self, response: str) -> str | None:
        return final_answer(response)

    def _decide(self, reference: str, answer: str) -> tuple[bool, str] | None:
        return decide(reference_answer(reference), answer)


class DapoGrader(MathGrader):
    """The published run's rules; all of them are string operations."""

    def _find(self, response: str) -> str | None:
        return published_answer(response, self._rule)

    def _decide(self, reference: str, answer: str) -> tuple[bool, str]:
        return _as_text(published_verdict(reference, answer, self._rule))


class ExactGrader(MathGrader):
    """Correct if the final answer is the reference, character by character; only white space may differ."""

    def _decide(self, reference: str, answer: str) -> tuple[bool, str]:
        return _as_text(answer.split() == reference_answer(reference).split())


def _as_text(same: bool) -> tuple[bool, str]:
    return same, "same text" if same else "different text"


class FunctionGrader:
    """The user's own function, sync or async."""

    def __init__(self, config: RewardConfig) -> None:
        self._scores = Scores(config.scores)
        self.function: Callable[..., Any] = load_function(config.grader, "reward.grader")
        self.is_async = inspect.iscoroutinefunction(self.function)

    def quick(self, prompt: Prompt, response: str) -> None:
        """Never: it may be slow, and it may run foreign code."""

    def grade(self, prompt: Prompt, response: str) -> Grade:
        if self.is_async:
            return asyncio.run(self.grade_async(prompt, response))
        return self._scores.read(self.function(prompt, response)).plain()

    async def grade_async(self, prompt: Prompt, response: str) -> Grade:
        return self._scores.read(await self.function(prompt, response)).plain()


def load_grader(config: RewardConfig) -> Grader:
    if is_plugin(config.grader):
        return FunctionGrader(config)
    built_in: dict[str, Callable[[RewardConfig], Grader]] = {
        "math": MathGrader,
        "dapo": DapoGrader,
        "exact": ExactGrader,
    }
    return built_in[config.grader](config)
