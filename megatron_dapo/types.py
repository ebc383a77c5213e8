"""The things that travel between rooms: Prompt, Sample, Group, StepBatch.

A sample carries its own truth (tokens, the engine's log-probs, why it ended, which weights made each
token, its grade), so that nobody re-derives what it already says. This module imports no torch: arrays are
numpy, int32 for tokens and float32 for log-probs. `to_record` / `from_record` turn each type into plain
JSON values and back, exactly; checkpoints and sample dumps are written with them, never with pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
LogProbs = NDArray[np.float32]


def as_tokens(ids: Iterable[int] | NDArray[Any]) -> Tokens:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)


def as_logprobs(values: Iterable[float] | NDArray[Any]) -> LogProbs:
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)


class FinishReason(StrEnum):
    """Why the engine stopped. `length` means truncated: it is what overlong masking looks at."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Prompt:
    """One question: what the engine sees (`tokens`) and what the grader needs (`answer`)."""

    id: str
    text: str
    tokens: Tokens
    answer: str = ""
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        return {
            "id": self.id, "text": self.text, "tokens": self.tokens.tolist(),
            "answer": self.answer, "source": self.source, "meta": self.meta,
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Prompt:
        return cls(**{**record, "tokens": as_tokens(record["tokens"])})


@dataclass(slots=True, frozen=True)
class Grade:
    """A grader's verdict. `correct is None` means *ungraded*: the sample is masked, never scored as wrong."""

    correct: bool | None
    score: float
    extracted: str | None = None
    reason: str = ""

    @property
    def ungraded(self) -> bool:
        return self.correct is None


@dataclass(slots=True, frozen=True)
class WeightSpan:
    """Response tokens [start, end) were sampled from weights `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Sample:
    """One response. `response_tokens` and `engine_logprobs` have the same length, always."""

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

    def __post_init__(self) -> None:
        if len(self.response_tokens) != len(self.engine_logprobs):
            raise ValueError(
                f"sample {self.prompt_id}#{self.index}: {len(self.response_tokens)} response tokens but "
                f"{len(self.engine_logprobs)} log-probs; the engine must return one log-prob per token"
            )

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    @property
    def length(self) -> int:
        return len(self.response_tokens)

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.weight_spans), default=0)

    def to_record(self) -> dict[str, Any]:
        return {
            "prompt_id": self.prompt_id, "index": self.index,
            "prompt_tokens": self.prompt_tokens.tolist(), "response_tokens": self.response_tokens.tolist(),
            "engine_logprobs": [x if math.isfinite(x) else str(x) for x in self.engine_logprobs.tolist()],
            "finish_reason": self.finish_reason.value,
            "weight_spans": [[s.version, s.start, s.end] for s in self.weight_spans],
            "seed": self.seed, "text": self.text,
            "grade": None if self.grade is None else [
                self.grade.correct, self.grade.score, self.grade.extracted, self.grade.reason],
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Sample:
        return cls(
            **{
                **record,
                "prompt_tokens": as_tokens(record["prompt_tokens"]),
                "response_tokens": as_tokens(record["response_tokens"]),
                "engine_logprobs": as_logprobs(float(x) for x in record["engine_logprobs"]),
                "finish_reason": FinishReason(record["finish_reason"]),
                "weight_spans": [WeightSpan(*span) for span in record["weight_spans"]],
                "grade": None if record["grade"] is None else Grade(*record["grade"]),
            }
        )


@dataclass(slots=True)
class Group:
    """All samples of one prompt: the unit that is filtered, and over which advantages are normalised."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def accuracies(self) -> list[bool]:
        """Correctness of every graded sample, in order."""
        return [s.grade.correct for s in self.samples if s.grade is not None and s.grade.correct is not None]

    @property
    def oldest_version(self) -> int:
        return min((s.oldest_version for s in self.samples), default=0)

    def to_record(self) -> dict[str, Any]:
        return {"prompt": self.prompt.to_record(), "samples": [s.to_record() for s in self.samples]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Group:
        return cls(
            prompt=Prompt.from_record(record["prompt"]),
            samples=[Sample.from_record(s) for s in record["samples"]],
        )


@dataclass(slots=True)
class StepBatch:
    """What one training step consumes: kept groups, and what the sampler counted on the way."""

    step: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def to_record(self) -> dict[str, Any]:
        return {"step": self.step, "groups": [g.to_record() for g in self.groups], "metrics": self.metrics}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StepBatch:
        return cls(record["step"], [Group.from_record(g) for g in record["groups"]], dict(record["metrics"]))


def count_tokens(samples: Sequence[Sample]) -> int:
    """Prompt plus response tokens: what the trainer has to process."""
    return sum(len(s.prompt_tokens) + len(s.response_tokens) for s in samples)
