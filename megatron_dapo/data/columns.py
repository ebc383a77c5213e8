"""Finds the question, the answer and the source in a row, whatever the columns are called.

Known without configuration: DAPO-Math-17k and verl's files (`prompt` is a list of messages, the answer is in
`reward_model.ground_truth`), AIME files (`problem` or `question`, `answer`) and GSM8K (the answer follows `####`). A
question that already has the DAPO template is unwrapped, so that no template is applied twice and the same problem
has the same id in every file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dapo.config.data import PromptFileConfig
from megatron_dapo.data.templates import DAPO_TEMPLATE

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
_DAPO_START, _DAPO_END = DAPO_TEMPLATE.split("{question}")


@dataclass(slots=True, frozen=True)
class Problem:
    question: str
    answer: str
    system: str = ""
    source: str = ""


class BadRow(ValueError):
    """The row is unusable; the message says why."""


class MissingColumn(BadRow):
    """A column is missing. If it is missing in every row, the configuration is wrong, not the data."""


def read_problem(row: dict[str, Any], config: PromptFileConfig) -> Problem:
    column, value = _find(row, config.question_column, QUESTION_COLUMNS, "question")
    question, system = _question(value, column)
    column, value = _find(row, config.answer_column, ANSWER_COLUMNS, "answer")
    source = row.get("data_source")
    return Problem(
        question, _answer(value, column, config.answer_marker), system, source if isinstance(source, str) else ""
    )


def _find(row: dict[str, Any], wanted: str | None, usual: tuple[str, ...], what: str) -> tuple[str, Any]:
    for column in (wanted,) if wanted else usual:
        value: Any = row
        for part in column.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            return column, value
    names = f"column {wanted!r}" if wanted else f"{what} column ({', '.join(usual)})"
    raise MissingColumn(f"no {names}; the row has {', '.join(sorted(map(str, row)))}")


_ABSENT = object()


def _question(value: Any, column: str) -> tuple[str, str]:
    """The question and the system message, from a text or a list of messages."""
    system = ""
    if isinstance(value, list):
        messages = [m for m in value if isinstance(m, dict)]
        if len(messages) != len(value) or not all(isinstance(m.get("content"), str) for m in messages):
            raise BadRow(f"{column}: expected messages with role and content")
        turns = [m["content"] for m in messages if m.get("role") != "system"]
        if len(turns) != 1:
            raise BadRow(f"{column}: expected one user message, found {len(turns)}")
        system = "\n".join(m["content"] for m in messages if m.get("role") == "system")
        value = turns[0]
    if value is None:
        raise BadRow(f"{column}: the prompt is null")
    if not isinstance(value, str):
        raise BadRow(f"{column}: expected text, found {type(value).__name__}")
    question = value.strip()
    if question.startswith(_DAPO_START) and question.endswith(_DAPO_END):
        question = question[len(_DAPO_START) : -len(_DAPO_END)].strip()
    if not question:
        raise BadRow(f"{column}: the prompt is empty")
    _check_encodable(question, column)
    return question, system


def _answer(value: Any, column: str, marker: str) -> str:
    if value is None:
        raise BadRow(f"{column}: the answer is null")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"{column}: expected text or a number, found {type(value).__name__}")
    answer = str(value)
    if marker and marker in answer:
        answer = answer.rpartition(marker)[2]
    if not answer.strip():
        raise BadRow(f"{column}: the answer is empty")
    _check_encodable(answer, column)
    return answer.strip()


def _check_encodable(text: str, column: str) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{column}: invalid Unicode (a lone surrogate) at character {error.start}") from None
