"""`data`: where prompts come from, and which template the model sees them in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import PathText, Section

BUILT_IN_TEMPLATES = ("dapo", "plain", "chat", "dapo+chat")
NAME = re.compile(r"[\w.+-]+")  # a part of a metric's name


class PromptFileConfig(Section):
    """How one prompt file is read."""

    path: PathText = Field(
        "",
        description="jsonl or parquet file, or a hub dataset name (owner/name); a list of them is short for sources.",
    )
    split: str = Field("train", description="Of a hub dataset: the split to read.")
    template: str = Field(
        "dapo",
        description="dapo: the published text. plain: the question alone. chat: the question in the tokenizer's chat "
        "template. dapo+chat: the published text in the chat template, as the 32B run did. Or your own text with "
        "{question} in it; end it with +chat to put it into the chat template.",
    )
    system: str = Field("", description="System message of the chat template; empty: the template's own.")
    question_column: str | None = Field(
        None, description="Dotted path, e.g. extra_info.raw_problem; null: prompt, question, problem or messages."
    )
    answer_column: str | None = Field(
        None, description="Dotted path; null: reward_model.ground_truth, answer, ground_truth or solution."
    )
    tools_column: str | None = Field(
        None, description="Dotted path to a list of tools (JSON schemas) for the chat template; null: tools, if any."
    )
    environment_column: str | None = Field(
        None,
        description="Dotted path to a name, or an object with name and arguments, that rollout functions find in "
        "prompt.meta; null: environment, if any.",
    )
    answer_marker: str = Field(
        "####", description="If an answer contains it, the answer is what follows its last occurrence (GSM8K)."
    )
    duplicates: Literal["drop", "keep"] = Field("drop", description="What to do with rows that repeat a question.")
    conflicts: Literal["drop", "first", "majority"] = Field(
        "drop", description="Questions whose rows disagree about the answer: drop them, or which answer to take."
    )
    too_long: Literal["drop", "cut-left"] = Field(
        "drop", description="Prompts longer than rollout.max_prompt_tokens: drop them, or keep their end."
    )
    max_unusable: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Loading fails if more than this share of the rows (repeated questions aside) is unusable: bad, "
        "too long, or with conflicting answers.",
    )

    @model_validator(mode="before")
    @classmethod
    def _list_of_paths(cls, raw: Any) -> Any:
        """`path: [a, b]` is short for `sources: [{path: a}, {path: b}]`."""
        paths = raw.get("path") if isinstance(raw, Mapping) else None
        if not isinstance(paths, list):
            return raw
        if raw.get("sources"):
            raise ValueError("path is a list and sources is not empty: list all files under one of them")
        return {**raw, "path": "", "sources": [{"path": path} for path in paths]}

    @model_validator(mode="after")
    def _consistent(self) -> PromptFileConfig:
        _check_template(self.template)
        if self.duplicates == "keep" and self.conflicts != "drop":
            raise ValueError(
                f"conflicts is {self.conflicts!r} but duplicates is 'keep', so every row keeps its own answer: "
                "set duplicates to 'drop'"
            )
        return self


class SourceConfig(Section):
    """One of several prompt files. Null: the setting of the section that lists it."""

    path: PathText = Field("", description="jsonl or parquet file, or a hub dataset name (owner/name).")
    name: str = Field("", description="Its name in metrics; empty: the file name without its ending.")
    split: str | None = Field(None, description="Of a hub dataset: the split to read.")
    template: str | None = Field(None, description="As data.template.")
    system: str | None = Field(None, description="As data.system.")
    question_column: str | None = Field(None, description="As data.question_column.")
    answer_column: str | None = Field(None, description="As data.answer_column.")
    tools_column: str | None = Field(None, description="As data.tools_column.")
    environment_column: str | None = Field(None, description="As data.environment_column.")
    answer_marker: str | None = Field(None, description="As data.answer_marker.")

    @model_validator(mode="after")
    def _complete(self) -> SourceConfig:
        if not self.path:
            raise ValueError("path is empty: name a jsonl or parquet file")
        if self.template is not None:
            _check_template(self.template)
        if self.name and not NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} becomes part of metric names: use letters, digits and . _ + - only")
        return self

    @property
    def label(self) -> str:
        return self.name or file_label(self.path)


class TrainSourceConfig(SourceConfig):
    """One of several files of training prompts. Null: the setting of `data`."""

    weight: float = Field(
        1.0, gt=0, description="Its share of the prompts, relative to the other sources, whatever their sizes."
    )


class DataConfig(PromptFileConfig):
    sources: list[TrainSourceConfig] = Field(
        default_factory=list, description="Several files instead of `path`, mixed by weight."
    )

    @model_validator(mode="after")
    def _files(self) -> DataConfig:
        check_sources(self.path, self.sources)
        return self

    @property
    def files(self) -> dict[str, PromptFileConfig]:
        """Every file by its name in metrics; empty if no file is named."""
        return files_of(self, self.sources)

    @property
    def weights(self) -> dict[str, float]:
        return {source.label: source.weight for source in self.sources}


def file_label(path: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", PurePath(path).stem)


def files_of(section: PromptFileConfig, sources: Sequence[SourceConfig]) -> dict[str, PromptFileConfig]:
    """The settings of each source, with those of the section where the source has none."""
    common = {name: getattr(section, name) for name in PromptFileConfig.model_fields}
    if not sources:
        return {file_label(section.path): PromptFileConfig(**common)} if section.path else {}
    return {source.label: PromptFileConfig(**{**common, **_own(source)}) for source in sources}


def _own(source: SourceConfig) -> Mapping[str, Any]:
    names = SourceConfig.model_fields.keys() & PromptFileConfig.model_fields.keys()
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def check_sources(path: str, sources: Sequence[SourceConfig]) -> None:
    if path and sources:
        raise ValueError(
            f"path is {path!r} and sources is not empty: move the path into sources, or remove one of them"
        )
    names = [source.label for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"sources: two files are called {name!r} in metrics: give one of them another `name`")


def _check_template(template: str) -> None:
    if template not in BUILT_IN_TEMPLATES and "{question}" not in template:
        raise ValueError(
            f"template {template!r} is neither one of {', '.join(BUILT_IN_TEMPLATES)} nor a text with "
            "{question} in it"
        )
