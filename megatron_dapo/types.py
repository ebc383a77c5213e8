"""The types that packages exchange: Prompt, Sample, Group, StepBatch.

A sample holds everything known about one response: its tokens, the engine's log-probs, the finish reason, the weight
version of each token and the grade. No other module derives these again. This module does not import torch; arrays
are numpy, int32 for tokens and float32 for log-probs.

`to_state` and `from_state` convert each type to JSON values and numpy arrays and back, bit for bit. `from_state` also
accepts lists in place of arrays. `json_default` lets `json` and `orjson` write a state as JSON text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
LogProbs = NDArray[np.float32]
# [tokens, layers · experts per token]: 1 + the expert that computed the token, 0 where it is not known.
RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]
LARGEST_SCORE = 1e9  # of scores and rewards: sums of their squares stay far from infinity, also in float32
ASSISTANT = "assistant"  # role of the turns that the policy generates


def as_tokens(ids: Iterable[int] | NDArray[Any]) -> Tokens:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)


def as_logprobs(values: Iterable[float] | NDArray[Any]) -> LogProbs:
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)


def json_default(value: Any) -> Any:
    """The `default` argument of `json.dumps` and `orjson.dumps`: an array becomes a list that `from_state` reads.

    JSON has no NaN or infinity; they are written as strings. A float32 is written as the equal double, so the round
    trip is exact.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        return [x if math.isfinite(x) else str(x) for x in value.tolist()]
    return value.tolist()


class FinishReason(StrEnum):
    """Why the engine stopped. `length` means truncated; overlong masking tests for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Prompt:
    """One question: `tokens` is the engine's input, `answer` the reference answer for the grader."""

    id: str
    text: str
    tokens: Tokens
    answer: str = ""
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """Without the template, unlike `text`."""
        return str(self.meta.get("question", self.text))

    def to_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Prompt:
        return cls(**{**state, "tokens": as_tokens(state["tokens"])})


def score_of(value: Any) -> float:
    """Raises ValueError or TypeError for what cannot be a score or a reward."""
    if isinstance(value, str | bytes) or not abs(number := float(value)) <= LARGEST_SCORE:  # also NaN
        raise ValueError(f"{value!r:.50} is not a number of at most {LARGEST_SCORE:g}")
    return number


def _plain(text: object) -> str:
    """Without lone surrogates, which JSON files cannot hold."""
    return str(text).encode(errors="replace").decode()


# All but line break and tab: escape sequences, carriage returns, and marks that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Control characters as they are written in Python: a response or a row must not move the cursor or clear the
    screen of a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass(slots=True, frozen=True)
class Grade:
    """A grader's verdict. `correct is None` means ungraded: the sample is masked and never counts as wrong.

    `parts` has the score of each of several graders, None where it is ungraded. `turns` has a reward for each turn of
    the model, in addition to `score`; it may be shorter than the conversation.
    """

    correct: bool | None
    score: float
    extracted: str | None = None
    reason: str = ""
    parts: dict[str, float | None] = field(default_factory=dict)
    turns: tuple[float, ...] = ()

    @property
    def ungraded(self) -> bool:
        return self.correct is None

    @classmethod
    def invalid(cls, why: object) -> Grade:
        """Instead of a grade that no advantage can be computed from."""
        return cls(None, 0.0, reason=f"invalid: {why}")

    def plain(self) -> Grade:
        """This grade in plain Python values. Raises if a score or reward is not a usable number."""
        return Grade(
            None if self.correct is None else bool(self.correct), score_of(self.score),
            None if self.extracted is None else _plain(self.extracted), _plain(self.reason),
            {_plain(name): None if value is None else score_of(value) for name, value in self.parts.items()},
            tuple(map(score_of, self.turns)),
        )  # fmt: skip

    def checked(self) -> Grade:
        """As `plain`, but `invalid` instead of an error. Graders and rollout functions are foreign code: a NaN in one
        grade would end the run, and be saved before."""
        try:
            return self.plain()
        except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
            return Grade.invalid(error)

    def to_state(self) -> list[Any]:
        return [self.correct, self.score, self.extracted, self.reason, self.parts, list(self.turns)]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Grade:
        correct, score, extracted, reason, parts, turns = state
        return cls(correct, score, extracted, reason, dict(parts), tuple(turns))


@dataclass(slots=True, frozen=True)
class WeightSpan:
    """Response tokens [start, end) were sampled from weights `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True, frozen=True)
class TurnSpan:
    """Response tokens [start, end) are one turn: generated (role `assistant`), or appended by a rollout function."""

    role: str
    start: int
    end: int
    seconds: float = 0.0  # generating it; of an appended turn, what the rollout function needed to produce it
    finish_reason: str = ""  # of a generated turn
    reward: float | None = None  # given by the environment for this turn

    @property
    def generated(self) -> bool:
        return self.role == ASSISTANT


@dataclass(slots=True)
class Sample:
    """One response. `response_tokens` and `engine_logprobs` always have the same length.

    A response of several turns also has tokens that the policy has not generated. `trained` is False for them, their
    log-prob is 0, and no loss, count or metric includes them. `index` numbers the rollouts of a group. A rollout whose
    history was rewritten has several samples; `part` numbers them, and all have the rollout's grade.
    """

    prompt_id: str
    index: int
    prompt_tokens: Tokens
    response_tokens: Tokens
    engine_logprobs: LogProbs
    finish_reason: FinishReason
    weight_spans: list[WeightSpan] = field(default_factory=list)
    seed: int = 0
    text: str = ""
    grade: Grade | None = None
    routed_experts: RoutedExperts | None = None  # of prompt and response; rows may be missing at the end
    trained: NDArray[np.bool_] | None = None  # [response tokens]; None: all of them
    turns: list[TurnSpan] = field(default_factory=list)  # empty: the response is one generated turn
    part: int = 0
    teacher_logprobs: LogProbs | None = None  # [response tokens], of distillation; None: not scored

    def __post_init__(self) -> None:
        if len(self.response_tokens) != len(self.engine_logprobs):
            raise ValueError(
                f"sample {self.prompt_id}#{self.index}: {len(self.response_tokens)} response tokens but "
                f"{len(self.engine_logprobs)} log-probs; the engine must return one log-prob per token"
            )
        if self.trained is not None and len(self.trained) != len(self.response_tokens):
            raise ValueError(
                f"sample {self.prompt_id}#{self.index}: {len(self.response_tokens)} response tokens but "
                f"{len(self.trained)} entries of `trained`"
            )

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    @property
    def length(self) -> int:
        return len(self.response_tokens)

    @property
    def trained_tokens(self) -> int:
        """Response tokens that the policy generated."""
        return self.length if self.trained is None else int(np.count_nonzero(self.trained))

    @property
    def trained_mask(self) -> NDArray[np.bool_]:
        """[response tokens]"""
        return np.ones(self.length, np.bool_) if self.trained is None else self.trained

    @property
    def final_tokens(self) -> Tokens:
        """What a grader reads: the last generated turn, or the whole response if it is a single one."""
        last = next((turn for turn in reversed(self.turns) if turn.generated), None)
        return self.response_tokens if last is None else self.response_tokens[last.start : last.end]

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.weight_spans), default=0)

    def to_state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "finish_reason": self.finish_reason.value,
            "weight_spans": [[s.version, s.start, s.end] for s in self.weight_spans],
            "grade": None if self.grade is None else self.grade.to_state(),
            "turns": [[t.role, t.start, t.end, t.seconds, t.finish_reason, t.reward] for t in self.turns],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Sample:
        return cls(
            **{
                **state,
                "prompt_tokens": as_tokens(state["prompt_tokens"]),
                "response_tokens": as_tokens(state["response_tokens"]),
                "engine_logprobs": _read_logprobs(state["engine_logprobs"]),
                "finish_reason": FinishReason(state["finish_reason"]),
                "weight_spans": [WeightSpan(*span) for span in state["weight_spans"]],
                "grade": None if state["grade"] is None else Grade.from_state(state["grade"]),
                "routed_experts": _read_experts(state["routed_experts"]),
                "trained": None if state["trained"] is None else np.asarray(state["trained"], np.bool_),
                "teacher_logprobs": _read_logprobs(state["teacher_logprobs"]),
                "turns": [TurnSpan(*turn) for turn in state["turns"]],
            }
        )


def _read_experts(values: RoutedExperts | list[list[int]] | None) -> RoutedExperts | None:
    return values if values is None or isinstance(values, np.ndarray) else pack_experts(np.asarray(values, np.int64))


def pack_experts(values: NDArray[Any]) -> RoutedExperts:
    """Values of `RoutedExperts` in their smallest type."""
    if values.max(initial=0) <= np.iinfo(np.uint8).max:
        return values.astype(np.uint8)
    return values.astype(np.uint16)


def _read_logprobs(values: Any) -> Any:
    """[tokens], or None where there are none. A JSON state has texts for NaN and infinity."""
    return values if values is None else as_logprobs(values if isinstance(values, np.ndarray) else map(float, values))


@dataclass(slots=True)
class Group:
    """All samples of one prompt. Filtering and the normalisation of advantages work on whole groups, and in them on
    rollouts: several samples of one rollout have one grade, which counts once."""

    prompt: Prompt
    samples: list[Sample]  # the samples of one rollout follow each other

    @property
    def rollouts(self) -> list[list[Sample]]:
        """The samples of each rollout, in order."""
        found: list[list[Sample]] = []
        for sample in self.samples:
            if sample.part == 0:
                found.append([])
            found[-1].append(sample)
        return found

    @property
    def grades(self) -> list[Grade]:
        """The grade of every rollout that was graded, ungraded verdicts excepted, in order."""
        return [s.grade for s in self.samples if s.part == 0 and s.grade is not None and s.grade.correct is not None]

    @property
    def accuracies(self) -> list[bool]:
        """Correctness of every graded rollout, in order."""
        return [bool(grade.correct) for grade in self.grades]

    @property
    def oldest_version(self) -> int:
        return min((s.oldest_version for s in self.samples if s.weight_spans), default=0)

    def to_state(self) -> dict[str, Any]:
        return {"prompt": self.prompt.to_state(), "samples": [s.to_state() for s in self.samples]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Group:
        return cls(prompt=Prompt.from_state(state["prompt"]), samples=[Sample.from_state(s) for s in state["samples"]])


@dataclass(slots=True)
class StepBatch:
    """The input of one training step: the kept groups and the sampler's metrics. `rejected`: the first group of each
    reason, to be shown."""

    step: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, Group] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def to_state(self) -> dict[str, Any]:
        return {
            "step": self.step, "groups": [g.to_state() for g in self.groups], "metrics": self.metrics,
            "rejected": {reason: group.to_state() for reason, group in self.rejected.items()},
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StepBatch:
        rejected = {reason: Group.from_state(group) for reason, group in state.get("rejected", {}).items()}
        return cls(state["step"], [Group.from_state(g) for g in state["groups"]], dict(state["metrics"]), rejected)


@dataclass(slots=True, frozen=True)
class SamplerProgress:
    """The progress of `Sampler.collect`, for displays. Counts are groups unless the name says otherwise."""

    step: int
    needed: int
    kept: int
    dropped: dict[str, int]
    in_flight: int
    running_requests: int
    finished_samples: int
    response_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.response_tokens / self.seconds if self.seconds > 0 else 0.0
