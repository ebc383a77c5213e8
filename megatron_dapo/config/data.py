"""The sections `data`, `reward` and `evaluate`: prompts, how responses are graded, and benchmarks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from megatron_dapo.config.base import Address, NonEmptyText, PathText, Section, TokenId

BUILT_IN_TEMPLATES = ("dapo", "plain", "chat", "dapo+chat")
METRIC_NAME = re.compile(r"[\w.+-]+")  # a part of a metric's name


def _known_template(template: str) -> str:
    if template not in BUILT_IN_TEMPLATES and "{question}" not in template:
        known = ", ".join(BUILT_IN_TEMPLATES)
        raise ValueError(f"{template!r} is neither one of {known} nor a text with {{question}} in it")
    return template


Template = Annotated[str, AfterValidator(_known_template)]


class PromptFileConfig(Section):
    """How one prompt file is read."""

    path: PathText = ""
    """A file (jsonl, JSON array, csv, each also .gz, or parquet), a folder or pattern of files, or a hub dataset name
    (owner/name); a list is shorthand for sources."""
    split: str = "train"
    """Split of a hub dataset or of a folder."""
    configuration: str | None = None
    """Configuration of a hub dataset, e.g. main of openai/gsm8k, or of a folder (. is its top); null: the only one
    there is."""
    template: Template = "dapo"
    """dapo: the published text. plain: the question alone. chat: the question in the tokenizer's chat template.
    dapo+chat: the published text in the chat template, as the 32B run did. Or a text with {question} in it; end it with
    +chat to put it into the chat template."""
    system: str = ""
    """System message of the chat template; empty: the template's own."""
    question_column: str | None = None
    """Dotted path, e.g. extra_info.raw_problem; null: prompt, question, problem or messages."""
    answer_column: str | None = None
    """Dotted path; null: reward_model.ground_truth, answer, ground_truth or solution."""
    tools_column: str | None = None
    """Dotted path to a list of tools (JSON schemas) for the chat template; null: tools, if any."""
    environment_column: str | None = None
    """Dotted path to a name, or an object with name and arguments, that rollout functions find in prompt.meta; null:
    environment, if any."""
    answer_marker: str = "####"
    """If an answer contains it, only the text after its last occurrence counts (GSM8K)."""
    too_long: Literal["drop", "cut-left"] = "drop"
    """Prompts longer than rollout.max_prompt_tokens: drop them, or keep their end."""
    max_unusable: float = Field(0.5, ge=0, le=1)
    """Loading fails if a larger share of the rows (repeated questions aside) is unusable: bad, too long, or with
    conflicting answers."""

    @model_validator(mode="before")
    @classmethod
    def _list_of_paths(cls, raw: Any) -> Any:
        """`path: [a, b]` is shorthand for `sources: [{path: a}, {path: b}]`."""
        paths = raw.get("path") if isinstance(raw, Mapping) else None
        if not isinstance(paths, list):
            return raw
        if raw.get("sources"):
            raise ValueError("path is a list and sources is not empty: list all files under one of them")
        return {**raw, "path": "", "sources": [{"path": path} for path in paths]}


def has_file_ending(path: str) -> bool:
    """As `aime.jsonl` has; a dataset of the hub may have a dot in its name, as AI-MO/NuminaMath-1.5."""
    return PurePath(path).suffix[1:].isalpha()


def file_stem(path: str) -> str:
    return PurePath(path).stem if has_file_ending(path) else PurePath(path).name


def file_label(path: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", file_stem(path))


class SourceConfig(Section):
    """One of several prompt files. Null: the setting of the section that lists it."""

    path: PathText = ""
    """As data.path, but no list."""
    name: str = ""
    """Its name in metrics; empty: the file name without its ending."""
    split: str | None = None
    """As data.split."""
    configuration: str | None = None
    """As data.configuration."""
    template: Template | None = None
    """As data.template."""
    system: str | None = None
    """As data.system."""
    question_column: str | None = None
    """As data.question_column."""
    answer_column: str | None = None
    """As data.answer_column."""
    tools_column: str | None = None
    """As data.tools_column."""
    environment_column: str | None = None
    """As data.environment_column."""
    answer_marker: str | None = None
    """As data.answer_marker."""

    def check(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a jsonl or parquet file")
        if self.name and not METRIC_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} becomes part of metric names: use letters, digits and . _ + - only")

    @property
    def label(self) -> str:
        return self.name or file_label(self.path)


class PromptFilesConfig(PromptFileConfig):
    """One file (`path`) or several (`sources`)."""

    if TYPE_CHECKING:
        sources: Sequence[SourceConfig]

    def check(self) -> None:
        if self.path and self.sources:
            raise ValueError(
                f"path is {self.path!r} and sources is not empty: move the path into sources, or remove one of them"
            )
        names = [source.label for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: two files are called {name!r} in metrics: give one of them another `name`")

    @property
    def files(self) -> dict[str, PromptFileConfig]:
        """Every file by its name in metrics, with the settings of the section where a source has none; empty if no file
        is named. All are validated already."""
        common = {name: getattr(self, name) for name in PromptFileConfig.model_fields}
        if not self.sources:
            return {file_label(self.path): PromptFileConfig.model_construct(**common)} if self.path else {}
        own = SourceConfig.model_fields.keys() & PromptFileConfig.model_fields.keys()
        return {
            source.label: PromptFileConfig.model_construct(
                **common | {name: value for name in own if (value := getattr(source, name)) is not None}
            )
            for source in self.sources
        }


class TrainSourceConfig(SourceConfig):
    """One of several files of training prompts. Null: the setting of `data`."""

    weight: float = Field(1.0, gt=0)
    """Its share of the prompts, relative to the other sources, whatever their sizes."""


class DataConfig(PromptFilesConfig):
    """Where prompts come from, and which template the model sees them in."""

    sources: list[TrainSourceConfig] = Field([])
    """Several files instead of `path`, mixed by weight."""

    @property
    def weights(self) -> dict[str, float]:
        return {source.label: source.weight for source in self.sources}


LOCAL_GRADERS = ("math", "dapo", "exact")
REMOTE_GRADERS = ("http", "judge")
BUILT_IN_GRADERS = LOCAL_GRADERS + REMOTE_GRADERS
JUDGE_PROMPT = (
    "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse to judge:\n{response}\n\n"
    "Is the response correct? The score is 1 if it is, and 0 if not."
)


class RemoteConfig(Section):
    """Requests to a server that grades. A response whose request fails for good is ungraded, never wrong."""

    urls: list[Address] = Field(default_factory=list)
    """Addresses of the server; several are used in turn, and a retry takes the next."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the bearer token; null: none is sent."""
    timeout: float = Field(60.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(3, ge=0)
    """How often a request is repeated after a time-out, a lost connection, or status 429 or 5xx."""
    backoff: float = Field(1.0, ge=0)
    """Seconds before the first retry; doubled for each further one, at most 60."""
    concurrency: int = Field(64, ge=1)
    """Requests at a time."""
    max_failures: int = Field(100, ge=1)
    """Stop the run after N responses in a row that the server could not grade."""

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.match(r"https?://[^/]", url):
                raise ValueError(f"expected addresses such as http://host:8000/grade, found {url!r}")
        return urls


class HttpRewardConfig(RemoteConfig):
    """The http grader; docs/grading.md describes request and reply."""

    batch: int = Field(16, ge=1)
    """Most responses in one request."""
    batch_wait: float = Field(0.05, ge=0)
    """Seconds that a response waits for others to share its request."""


class JudgeConfig(RemoteConfig):
    """The judge grader: a model behind an OpenAI-compatible server. An address ends before /chat/completions."""

    model: str = ""
    """The model's name in requests."""
    prompt: str = JUDGE_PROMPT
    """The user message; {question}, {answer} and {response} are replaced."""
    system: str = ""
    """The system message; empty: none."""
    score_pattern: str | None = None
    """For judges that were trained to reply in their own form: regular expression with one group, the score, which is
    searched in the last line of a reply. null: the judge is asked for a JSON object with an id that the response cannot
    know."""
    lowest: float = 0.0
    """Score of the worst response."""
    highest: float = 1.0
    """Score of the best response; lowest to highest is mapped onto the scale of reward.scores."""
    correct_from: float | None = None
    """Lowest score of a correct response; null: above the middle of the scale."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(1024, gt=0)
    """Most tokens of the judge's reply."""

    def check(self) -> None:
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest:g}) must be more than lowest ({self.lowest:g})")
        try:
            groups = 1 if self.score_pattern is None else re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"score_pattern needs one group, the number; it has {groups}")
        if "{response}" not in self.prompt:
            raise ValueError("prompt has no {response}: the judge would not see what it judges")


class WeightedGraderConfig(Section):
    """One of several graders."""

    name: str = ""
    """Its name in metrics; empty: that of the grader."""
    grader: str = "math"
    """As reward.grader."""
    weight: float = 1.0
    """Weight of this score in the sum; 0: report only."""
    http: HttpRewardConfig = HttpRewardConfig()
    judge: JudgeConfig = JudgeConfig()

    @property
    def label(self) -> str:
        return self.name or re.sub(r"[^\w.+-]+", "_", self.grader.rpartition(".")[2].removeprefix("python:"))

    def check(self) -> None:
        check_grader(self.grader, self.http, self.judge)
        if self.name and not METRIC_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} becomes part of metric names: use letters, digits and . _ + - only")


class RewardConfig(Section):
    """Which grader scores the responses, and the processes it runs in."""

    grader: str = "math"
    """math: equivalence (integers exactly, the rest by math-verify). dapo: the published run's rules. exact: the same
    text. http: your server. judge: a model behind an OpenAI-compatible server. python:module.function: a custom one."""
    http: HttpRewardConfig = HttpRewardConfig()
    judge: JudgeConfig = JudgeConfig()
    graders: list[WeightedGraderConfig] = Field(default_factory=list)
    """Several graders instead of `grader`: the score is the weighted sum of theirs, and the first one decides what is
    correct. A response that one of them with a weight cannot grade is ungraded."""
    scores: Literal["plus-minus-one", "zero-one"] = "plus-minus-one"
    """Scores of correct and wrong responses: +1/−1, or 1/0."""
    dapo_rule: Literal["answer", "answer-or-box", "strict-box"] = "answer"
    """Rule of the dapo grader. answer: the last `Answer:` line, as published. answer-or-box: the last box if there
    is no such line. strict-box: only the last box, compared as it stands."""
    workers: int | None = Field(None, ge=1)
    """Grading processes; null: half the cores, at most 8."""
    environment: list[str] = Field(default_factory=list)
    """Names of environment variables that your grader reads, e.g. the key of a service. Grading processes get no others
    except PATH, HOME, the locale and Python's."""
    cpu_seconds: float = Field(5.0, gt=0)
    """CPU time (not wall time) that grading one response may use; a retry may use twice that."""
    memory_mb: int = Field(1024, ge=128)
    """Resident memory that one grading process may use."""
    stuck_seconds: float = Field(120.0, gt=0)
    """Replace a grading process after N seconds without using CPU time."""
    retries: int = Field(1, ge=0)
    """How often a response that hit a limit is graded again."""
    max_errors: int = Field(10, ge=1)
    """Stop the run when the grader raises N times within error_window_seconds."""
    error_window_seconds: float = Field(3600.0, gt=0)
    """Errors of the grader older than this no longer count towards max_errors."""
    concurrency: int = Field(64, ge=1)
    """Responses that one process grades at a time if the function is async."""

    @property
    def worker_count(self) -> int:
        return self.workers or max(1, min(8, (os.cpu_count() or 2) // 2))

    def check(self) -> None:
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


def check_grader(name: str, http: HttpRewardConfig, judge: JudgeConfig) -> None:
    if name not in BUILT_IN_GRADERS and not name.startswith("python:"):
        raise ValueError(
            f"grader is {name!r}, but must be one of {', '.join(BUILT_IN_GRADERS)}, or "
            "python:module.function for a custom one"
        )
    if name == "http" and not http.urls:
        raise ValueError("grader is http, but http.urls is empty: name the address of the server that grades")
    if name == "judge" and not (judge.urls and judge.model):
        missing = "urls" if not judge.urls else "model"
        raise ValueError(f"grader is judge, but judge.{missing} is empty")


class EvalSourceConfig(SourceConfig):
    """One of several benchmarks. Null: the setting of `evaluate.data`."""

    samples: int | None = Field(None, ge=1)
    """Responses per problem; null: evaluate.samples."""


class EvalDataConfig(PromptFilesConfig):
    """One benchmark (`path`), or several (`sources`), each with its own metrics: `eval/NAME/avg@k`. `template` and
    `system` default to those of `data`."""

    sources: list[EvalSourceConfig] = Field([])
    """Several benchmarks instead of `path`; all are evaluated."""


class EvalConfig(Section):
    """The benchmarks, the number of responses per problem, and how they are sampled."""

    data: EvalDataConfig = EvalDataConfig()
    every: int = Field(5, ge=0)
    """Evaluate every N training steps; 0: never."""
    samples: int = Field(32, ge=1)
    """k: responses per problem, for avg@k, pass@k and maj@k."""
    temperature: float = Field(1.0, ge=0)
    """As rollout.temperature; 0: greedy, so samples: 1 is enough."""
    top_p: float = Field(0.7, gt=0, le=1)
    """Sample from the most likely tokens that together reach this probability. The published AIME scores were sampled
    with 0.7."""
    top_k: int = Field(-1, ge=-1)
    """Sample from the N most likely tokens; -1: from all."""
    stop: list[NonEmptyText] | None = None
    """Strings that end a response; null: rollout.stop."""
    stop_token_ids: list[TokenId] | None = None
    """Tokens that end a response beside the model's own; null: rollout.stop_token_ids."""
    max_response_tokens: int | None = Field(None, gt=0)
    """Longest response, in tokens; null: rollout.max_response_tokens."""
    concurrency: int = Field(512, ge=1)
    """Responses generated at one time."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the interval of avg@k."""
    pass_at: list[int] = Field(default_factory=list)
    """The k of pass@k; empty: the powers of two up to samples."""

    def for_set(self, name: str) -> EvalConfig:
        """The settings of one benchmark: its own number of samples, and the k of pass@k that it allows."""
        samples = {source.label: source.samples for source in self.data.sources}.get(name) or self.samples
        return self.model_copy(update={"samples": samples, "pass_at": [k for k in self.pass_at if k <= samples]})

    def metric_prefix(self, name: str) -> str:
        """`eval/`, or `eval/NAME/` where there are several benchmarks."""
        return f"eval/{name}/" if self.data.sources else "eval/"

    @property
    def during_training(self) -> bool:
        return bool(self.every and self.data.files)

    @property
    def pass_at_values(self) -> list[int]:
        if self.pass_at:
            return sorted(set(self.pass_at))
        powers = [2**i for i in range(self.samples.bit_length()) if 2**i < self.samples]
        return [*powers, self.samples]

    def check(self) -> None:
        most = max([self.samples, *(source.samples or 0 for source in self.data.sources)])
        for k in self.pass_at:
            if not 1 <= k <= most:
                raise ValueError(f"pass_at has {k}, but needs 1 ≤ k ≤ samples ({most}): raise samples")
