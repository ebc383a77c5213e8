"""`data`: where prompts come from and which template the model sees them in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import PathText, Section

BUILT_IN_TEMPLATES = ("dapo", "plain", "chat", "dapo+chat")


class DataConfig(Section):
    path: PathText = Field("", description="jsonl or parquet file, or a hub dataset name (owner/name).")
    split: str = Field("train", description="Of a hub dataset: the split to read.")
    template: str = Field(
        "dapo",
        description="dapo: the published text. plain: the question alone. chat: the question in the tokenizer's chat "
        "template. dapo+chat: the published text in the chat template, as the 32B run did. Or your own text with "
        "{question} in it; end it with +chat to put it into the chat template.",
    )
    system: str = Field("", description="System message of the chat template; empty: the template's own.")
    question_column: str | None = Field(
        None, description="Dotted path, e.g. extra_info.raw_problem; null: prompt, question or problem."
    )
    answer_column: str | None = Field(
        None, description="Dotted path; null: reward_model.ground_truth, answer, ground_truth or solution."
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

    @model_validator(mode="after")
    def _template(self) -> DataConfig:
        if self.template not in BUILT_IN_TEMPLATES and "{question}" not in self.template:
            raise ValueError(
                f"template {self.template!r} is neither one of {', '.join(BUILT_IN_TEMPLATES)} nor a text with "
                "{question} in it"
            )
        if self.duplicates == "keep" and self.conflicts != "drop":
            raise ValueError(
                f"conflicts is {self.conflicts!r} but duplicates is 'keep', so every row keeps its own answer: "
                "set duplicates to 'drop'"
            )
        return self
