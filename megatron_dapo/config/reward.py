"""`reward`: which grader scores the responses, and the processes it runs in."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import Section

BUILT_IN_GRADERS = ("math", "dapo", "exact")


class RewardConfig(Section):
    grader: str = Field(
        "math",
        description="math: equivalence (integers exactly, the rest by math-verify). dapo: the published run's rules. "
        "exact: the same text. python:module.function: your own.",
    )
    scores: Literal["plus-minus-one", "zero-one"] = Field(
        "plus-minus-one", description="Scores of correct and wrong responses: +1/−1, or 1/0."
    )
    dapo_rule: Literal["answer", "answer-or-box", "strict-box"] = Field(
        "answer",
        description="Of the dapo grader. answer: the last `Answer:` line, as the published run. answer-or-box: the "
        "last box where there is no such line. strict-box: only the last box, compared as it stands.",
    )
    workers: int | None = Field(None, ge=1, description="Grading processes; null: half the cores, at most 8.")
    cpu_seconds: float = Field(
        5.0, gt=0, description="CPU time (not wall time) that grading one response may use; a retry may use twice that."
    )
    memory_mb: int = Field(1024, ge=128, description="Resident memory that one grading process may use.")
    stuck_seconds: float = Field(
        120.0, gt=0, description="A grading process that sleeps this long without using CPU time is replaced."
    )
    retries: int = Field(1, ge=0, description="How often a response that hit a limit is graded again.")
    max_errors: int = Field(
        10, ge=1, description="The run stops when the grader raises this many times within error_window_seconds."
    )
    error_window_seconds: float = Field(
        3600.0, gt=0, description="Errors of the grader older than this no longer count towards max_errors."
    )
    concurrency: int = Field(
        64, ge=1, description="Responses that one process grades at a time if the function is async."
    )

    @property
    def worker_count(self) -> int:
        return self.workers or max(1, min(8, (os.cpu_count() or 2) // 2))

    @model_validator(mode="after")
    def _known_grader(self) -> RewardConfig:
        if self.grader not in BUILT_IN_GRADERS and not self.grader.startswith("python:"):
            raise ValueError(
                f"grader is {self.grader!r}, but must be one of {', '.join(BUILT_IN_GRADERS)}, or "
                "python:module.function for your own"
            )
        return self
