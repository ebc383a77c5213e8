"""`reward`: which grader scores the responses, and the processes it runs in."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_dapo.config.base import Section

LOCAL_GRADERS = ("math", "dapo", "exact")
REMOTE_GRADERS = ("http", "judge")
BUILT_IN_GRADERS = LOCAL_GRADERS + REMOTE_GRADERS
GRADER_NAME = re.compile(r"[\w.+-]+")  # a part of a metric's name
JUDGE_PROMPT = (
    "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse to judge:\n{response}\n\n"
    "Is the response correct? Reply with a last line of the form Score: N, where N is 1 if it is correct and 0 if not."
)


class RemoteConfig(Section):
    """Requests to a server that grades. A response whose request fails for good is ungraded, never wrong."""

    urls: list[str] = Field(
        default_factory=list,
        description="Addresses of the server; several are used in turn, and a retry takes the next.",
    )
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the bearer token; null: none is sent."
    )
    timeout: float = Field(60.0, gt=0, description="Seconds for one request.")
    retries: int = Field(
        3,
        ge=0,
        description="How often a request is repeated after a time-out, a lost connection, or status 429 or 5xx.",
    )
    backoff: float = Field(
        1.0, ge=0, description="Seconds before the first retry; doubled for each further one, at most 60."
    )
    concurrency: int = Field(64, ge=1, description="Requests at a time.")
    max_failures: int = Field(
        100, ge=1, description="The run stops when this many responses in a row could not be graded by the server."
    )

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.match(r"https?://[^/]", url):
                raise ValueError(f"expected addresses such as http://host:8000/grade, found {url!r}")
            if "@" in url.split("/")[2]:
                raise ValueError(
                    "an address holds a password, which would be written to the run directory: use api_key_env"
                )
        return urls


class HttpRewardConfig(RemoteConfig):
    """Of the http grader: docs/grading.md describes request and reply."""

    batch: int = Field(16, ge=1, description="Most responses in one request.")
    batch_wait: float = Field(0.05, ge=0, description="Seconds that a response waits for others to share its request.")


class JudgeConfig(RemoteConfig):
    """Of the judge grader: a model behind an OpenAI-compatible server. An address ends before /chat/completions."""

    model: str = Field("", description="The model's name in requests.")
    prompt: str = Field(JUDGE_PROMPT, description="The user message; {question}, {answer} and {response} are replaced.")
    system: str = Field("", description="The system message; empty: none.")
    score_pattern: str = Field(
        r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)",
        description="Regular expression with one group: the score is the number in its last match in the reply.",
    )
    lowest: float = Field(0.0, description="Score of the worst response.")
    highest: float = Field(
        1.0, description="Score of the best response; lowest to highest is mapped onto the scale of reward.scores."
    )
    correct_from: float | None = Field(
        None, description="The response counts as correct from this score on; null: above the middle of the scale."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge.")
    max_tokens: int = Field(1024, gt=0, description="Most tokens of the judge's reply.")

    @model_validator(mode="after")
    def _consistent(self) -> JudgeConfig:
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest:g}) must be more than lowest ({self.lowest:g})")
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"score_pattern needs one group, the number; it has {groups}")
        if "{response}" not in self.prompt:
            raise ValueError("prompt has no {response}: the judge would not see what it judges")
        return self


class WeightedGraderConfig(Section):
    """One of several graders."""

    name: str = Field("", description="Its name in metrics; empty: that of the grader.")
    grader: str = Field("math", description="As reward.grader.")
    weight: float = Field(1.0, description="Its score counts this much; 0: only reported.")
    http: HttpRewardConfig = HttpRewardConfig()
    judge: JudgeConfig = JudgeConfig()

    @property
    def label(self) -> str:
        return self.name or re.sub(r"[^\w.+-]+", "_", self.grader.rpartition(".")[2].removeprefix("python:"))

    @model_validator(mode="after")
    def _complete(self) -> WeightedGraderConfig:
        check_grader(self.grader, self.http, self.judge)
        if self.name and not GRADER_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} becomes part of metric names: use letters, digits and . _ + - only")
        return self


class RewardConfig(Section):
    grader: str = Field(
        "math",
        description="math: equivalence (integers exactly, the rest by math-verify). dapo: the published run's rules. "
        "exact: the same text. http: a server of yours. judge: a model behind an OpenAI-compatible server. "
        "python:module.function: your own.",
    )
    http: HttpRewardConfig = HttpRewardConfig()
    judge: JudgeConfig = JudgeConfig()
    graders: list[WeightedGraderConfig] = Field(
        default_factory=list,
        description="Several graders instead of `grader`: the score is the weighted sum of theirs, and the first one "
        "decides what is correct. A response that one of them with a weight cannot grade is ungraded.",
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
        names = [grader.label for grader in self.graders]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"graders: two are called {name!r} in metrics: give one of them another `name`")
        if not self.graders:
            check_grader(self.grader, self.http, self.judge)
        elif "grader" in self.model_fields_set and self.grader != "math":
            raise ValueError(f"grader is {self.grader!r} and graders is not empty: list all of them under graders")
        elif not any(grader.weight for grader in self.graders):
            raise ValueError("graders: every weight is 0, so every score would be 0: give one of them a weight")
        return self


def check_grader(name: str, http: HttpRewardConfig, judge: JudgeConfig) -> None:
    if name not in BUILT_IN_GRADERS and not name.startswith("python:"):
        raise ValueError(
            f"grader is {name!r}, but must be one of {', '.join(BUILT_IN_GRADERS)}, or "
            "python:module.function for your own"
        )
    if name == "http" and not http.urls:
        raise ValueError("grader is http, but http.urls is empty: name the address of the server that grades")
    if name == "judge" and not (judge.urls and judge.model):
        missing = "urls" if not judge.urls else "model"
        raise ValueError(f"grader is judge, but judge.{missing} is empty")
