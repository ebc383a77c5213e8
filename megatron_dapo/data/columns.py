"""Reads the rows of prompt files (jsonl, JSON arrays, csv, parquet; folders; the hub), and finds the question, the
answer, tools, environment and source in a row, whatever the columns are called.

Known without configuration: DAPO-Math-17k and verl's files (`prompt` is a list of messages, the answer is in
`reward_model.ground_truth`), AIME files (`problem` or `question`, `answer`) and GSM8K (the answer follows `####`). A
question that already has the DAPO template is unwrapped, so that no template is applied twice and the same problem
has the same id in every file.

A list of messages with more than one turn is kept as it is, for the chat template. Tools are a list of JSON schemas. An
environment is a name with arguments, for rollout functions; a row that has one needs no answer. Lists and objects may
be given as JSON text. Parquet fills absent fields of nested values with null; nulls are removed.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from glob import glob
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.data import PromptFileConfig, has_file_ending
from megatron_dapo.config.load import HUB_ID, fetch

Row = dict[str, Any]
BATCH_ROWS = 2048
PARQUET_ENDINGS = {".parquet", ".pq"}
JSON_ENDINGS = {".jsonl", ".json", ".ndjson"}
TEXT_ENDINGS = {*JSON_ENDINGS, ".csv", ".tsv"}  # also compressed: .jsonl.gz
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


class DataError(ConfigError):
    """A prompt file that cannot be used; the message says what was expected and what was found."""


def find_files(config: PromptFileConfig) -> list[Path]:
    """What `path` names: a file, the files of a folder or of a pattern, or those of a dataset on the hub."""
    path, file = config.path, Path(config.path).expanduser()
    if file.is_file():
        return [file]
    if path and file.is_dir():
        return _of_split(file, [found for found in sorted(file.rglob("*")) if _ending(found)], config)
    if set("*?[") & set(path):
        found = sorted(Path(name) for name in glob(str(file), recursive=True) if _ending(Path(name)))
        if not found:
            raise DataError(f"data.path: no file matches {path!r}")
        return found
    if HUB_ID.fullmatch(path) and not has_file_ending(path):
        return _of_split(*download(path), config)
    raise DataError(f"data.path: no file {path!r}" if path else "data.path is empty: name a jsonl or parquet file")


def _ending(file: Path) -> str:
    """The ending that says how a file is read, without .gz; empty if it cannot be."""
    ending = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    known = ending in TEXT_ENDINGS or (ending in PARQUET_ENDINGS and file.suffix != ".gz")
    return ending if known and file.is_file() else ""


def download(name: str) -> tuple[Path, list[Path]]:
    """The folder of a hub dataset, and its parquet files; if it has none, its text files."""
    try:
        for endings in (PARQUET_ENDINGS, TEXT_ENDINGS):
            folder = Path(fetch(name, [f"*{ending}{gz}" for ending in endings for gz in ("", ".gz")], "dataset"))
            files = sorted(f for f in folder.rglob("*") if _ending(f) in endings and "dataset_info" not in f.name)
            if files:
                break
    except OSError as error:
        offline = ", and unset HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise DataError(
            f"data.path: {name!r} is not a file, and the hub dataset of that name could not be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). Check the name "
            f"and the network{offline}, or download the parquet file and give its path"
        ) from error
    return folder, files


def _of_split(folder: Path, files: list[Path], config: PromptFileConfig) -> list[Path]:
    """The files of one split and one configuration. A file is of a split if its name begins with it or a folder has its
    name; the other folders above it are its configuration."""
    split, wanted = config.split, config.configuration
    names = {file: file.relative_to(folder) for file in files}
    names = {f: name for f, name in names.items() if not any(part.startswith(".") for part in name.parts)}
    files = list(names)  # without .ipynb_checkpoints and the like
    of_split = [f for f in files if names[f].name.startswith(split) or split in names[f].parts[:-1]]
    if not of_split and not any(part.startswith(SPLITS) for f in files for part in names[f].parts):
        of_split = files  # the dataset has no splits
    listed = ", ".join(str(name) for name in list(names.values())[:20]) or "no file that can be read"
    if not of_split:
        raise DataError(f"data.split: {config.path!r} has no file of split {split!r}; it has {listed}")
    found: dict[str, list[Path]] = {}
    for file in of_split:
        found.setdefault("/".join(part for part in names[file].parts[:-1] if part != split) or ".", []).append(file)
    known = ", ".join(found)
    if wanted is None and len(found) > 1:
        raise DataError(f"data.configuration: {config.path!r} has several configurations ({known}): name one of them")
    if wanted is not None and wanted not in found:
        raise DataError(f"data.configuration: {config.path!r} has no configuration {wanted!r}; it has {known}")
    return found[wanted] if wanted is not None else of_split


def read_rows(files: list[Path]) -> Iterator[tuple[int, Row | str]]:
    """(number from 1, the row or what is wrong with it). A row's number is its line; in parquet, csv and JSON arrays it
    counts rows, and in several files it goes on."""
    before = 0
    for file in files:
        ending, number = _ending(file), 0
        if not ending:
            raise DataError(
                f"data.path: {file} ends in {file.suffix!r}; expected one of {', '.join(sorted(TEXT_ENDINGS))} (.gz) "
                f"or {', '.join(sorted(PARQUET_ENDINGS))}"
            )
        rows = _parquet_rows(file) if ending in PARQUET_ENDINGS else _text_rows(file, ending)
        for number, row in rows:
            yield before + number, row
        before += number


def _text_rows(file: Path, ending: str) -> Iterator[tuple[int, Row | str]]:
    csv.field_size_limit(2**31 - 1)  # a long prompt is for the tokenizer to refuse
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        try:
            if ending not in JSON_ENDINGS:
                lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
                reader = csv.DictReader(lines, delimiter="\t" if ending == ".tsv" else ",")
                wide = "more values than columns: put a value with the separator in quotes"  # 1,234 would be 1
                yield from enumerate((wide if "".join(row.get(None, ())).strip() else row for row in reader), start=1)
                return
            for number, line in enumerate(stream, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if ending == ".json" and number == 1 and line.lstrip().startswith(b"["):
                    yield from enumerate(_json_array(line + stream.read(), file), start=1)
                    return
                if line.strip():
                    yield number, _json_row(line)
        except (OSError, EOFError, csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error


def _json_array(text: bytes, file: Path) -> list[Row | str]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} begins like a JSON array, but is none: {error}") from None
    return [row if isinstance(row, dict) else f"expected an object, found {type(row).__name__}" for row in rows]


def _json_row(line: bytes) -> Row | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return f"invalid JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError):
        return "invalid JSON: nested too deeply, or a number with too many digits"
    return row if isinstance(row, dict) else f"expected an object, found {type(row).__name__}"


def _parquet_rows(file: Path) -> Iterator[tuple[int, Row | str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS):
            # Through its text a float32 0.1 becomes 0.1, not 0.10000000149011612.
            exact = [c.cast("string").cast("double") if c.type == pa.float32() else c for c in batch.columns]
            for row in _batch_rows(pa.RecordBatch.from_arrays(exact, batch.schema.names)):
                number += 1
                yield number, row
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet after row {number}: {error}") from error


def _batch_rows(batch: Any) -> Iterator[Row | str]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # one bad string fails the whole batch: find its row
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield f"invalid UTF-8 at byte {error.start} of a value"


DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_TEXTS = {"dapo": DAPO_TEMPLATE, "plain": "{question}", "": "{question}"}
Message = dict[str, Any]
QUESTION_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
_DAPO_START, _DAPO_END = DAPO_TEMPLATE.split("{question}")


@dataclass(slots=True, frozen=True)
class Problem:
    question: str
    answer: str
    system: str = ""
    source: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)  # of several turns; empty: the question alone
    tools: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)  # name and arguments; empty: none

    @property
    def identity(self) -> str:
        """What makes it the same problem as another one."""
        turns = [f"{m['role']}: {m['content']}" for m in self.messages] or [self.question]
        more = [json.dumps(self.environment, sort_keys=True)] if self.environment else []
        return "\n".join([*turns, *more])


class BadRow(ValueError):
    """The row is unusable; the message says why."""


class MissingColumn(BadRow):
    """A column is missing. If it is missing in every row, the configuration is wrong, not the data."""


def read_problem(row: dict[str, Any], config: PromptFileConfig) -> Problem:
    column, value = _find(row, config.question_column, QUESTION_COLUMNS, "question")
    question, system, messages = _question(_messages_in(value), column, config.template)
    environment = _environment(row, config)
    column, value = _find(row, config.answer_column, ANSWER_COLUMNS, "answer", required=not environment)
    answer = "" if value is None and environment else _answer(value, column, config.answer_marker)
    source = row.get("data_source")
    return Problem(
        question,
        answer,
        system,
        source if isinstance(source, str) else "",
        messages,
        _tools(row, config),
        environment,
    )


def _messages_in(value: Any) -> Any:
    """The messages if the value is their JSON text, else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(value)
        if found and all(map(_role, found)):
            return found
    return value


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else ""


def _tools(row: dict[str, Any], config: PromptFileConfig) -> list[dict[str, Any]]:
    wanted = config.tools_column
    column, value = _find(row, wanted, ("tools",), "tools", required=bool(wanted))
    value = _parsed(value, column)
    if value in (None, []):
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"{column}: expected a list of tools (JSON schemas), found {type(value).__name__}")
    return list(_json_value(value, column))


def _environment(row: dict[str, Any], config: PromptFileConfig) -> dict[str, Any]:
    """{"name": …, "arguments": {…}} from a name, or from an object with both; empty if the row has none."""
    wanted = config.environment_column
    column, value = _find(row, wanted, ("environment",), "environment", required=bool(wanted))
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value, column)
    if value in (None, "", {}):
        return {}
    found = {"name": value} if isinstance(value, str) else value
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise BadRow(f"{column}: expected a name, or an object with `name` and `arguments`")
    arguments = _parsed(found.get("arguments"), f"{column}.arguments")
    if not isinstance(arguments, dict | None):
        raise BadRow(f"{column}.arguments: expected an object, found {type(arguments).__name__}")
    return {"name": found["name"], "arguments": _json_value(arguments or {}, column)}


def _parsed(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{column}: expected JSON, found {value[:60]!r} ({error})") from None


def _json_value(value: Any, column: str) -> Any:
    """Without nulls, with dates as text: graders, servers and checkpoints get it as JSON. NaN is a null of parquet."""
    if isinstance(value, dict):
        items = {key: _json_value(item, column) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_json_value(item, column) for item in value]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, str | int | float | None) and value not in (math.inf, -math.inf):
        return None if value != value else value
    raise BadRow(f"{column}: expected JSON values, found {value!r:.60}")


def _find(
    row: dict[str, Any], wanted: str | None, usual: tuple[str, ...], what: str, required: bool = True
) -> tuple[str, Any]:
    """The column and its value: the one that the configuration names, or the first of the usual ones."""
    for column in (wanted,) if wanted else usual:
        value: Any = row
        for part in [column] if column in row else column.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            return column, value
    if not required:
        return usual[0], None
    names = f"column {wanted!r}" if wanted else f"{what} column ({', '.join(usual)})"
    raise MissingColumn(f"no {names}; the row has {', '.join(sorted(map(str, row)))}")


_ABSENT = object()


def _question(value: Any, column: str, template: str) -> tuple[str, str, list[Message]]:
    """The question, the system message, and the messages if they are more than these two. A template's own text
    replaces DAPO's."""
    system, messages = "", list[Message]()
    if isinstance(value, list):
        system, value, messages = _of_messages(value, column, template)
    if value is None:
        raise BadRow(f"{column}: the prompt is null")
    if not isinstance(value, str):
        raise BadRow(f"{column}: expected text, found {type(value).__name__}")
    question = value if messages else value.strip()  # a conversation is kept as it is
    wrapped = question.startswith(_DAPO_START) and question.endswith(_DAPO_END)
    if wrapped and _text(template, question) != question:
        question = question[len(_DAPO_START) : -len(_DAPO_END)].strip()
    if not question:
        raise BadRow(f"{column}: the prompt is empty")
    for text in (question, *(message["content"] for message in messages)):
        _check_encodable(text, column)
    return question, system, messages


def _of_messages(value: list[Any], column: str, template: str) -> tuple[str, str, list[Message]]:
    """The system message, the last question, and the messages if they are of several turns."""
    turns = [m for m in value if _role(m) != "system"]
    several = len(turns) > 1
    messages = [{"content": "", **_json_value(m, column)} if several else m for m in value if isinstance(m, dict)]
    complete = all(isinstance(m.get("content"), str) and (_role(m) or not several) for m in messages)
    if len(messages) != len(value) or not complete:
        raise BadRow(f"{column}: expected messages with role and content")
    if len(turns) == 1:
        return "\n".join(m["content"] for m in messages if m not in turns), turns[0]["content"], []
    asked = [m["content"] for m in messages if m["role"] == "user"]
    if not asked:
        raise BadRow(f"{column}: no message is the user's")
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"{column}: the last message is the assistant's, so there is nothing to generate")
    if not uses_chat(template):
        raise BadRow(f"{column}: several messages need a chat template; set data.template to chat")
    return "", asked[-1], messages


def _answer(value: Any, column: str, marker: str) -> str:
    if value is None:
        raise BadRow(f"{column}: the answer is null")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise BadRow(f"{column}: expected text or a number, found {type(value).__name__}")
    answer = str(value)
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise BadRow(f"{column}: the answer is {value}")
        # No exponent, which the dapo grader does not read, and no `.0` of an integer in a column of floats.
        whole, point, rest = f"{Decimal(answer):f}".partition(".")
        answer = whole + (point + rest).rstrip("0").rstrip(".")
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


def uses_chat(template: str) -> bool:
    """Whether it goes into the tokenizer's chat template."""
    return template == "chat" or template.endswith("+chat")


def _without_chat(template: str) -> str:
    return "" if template == "chat" else template.removesuffix("+chat")


def _text(template: str, question: str) -> str:
    name = _without_chat(template)
    return _TEXTS.get(name, name).replace("{question}", question)  # not str.format: LaTeX is full of braces


def messages_of(problem: Problem, config: PromptFileConfig) -> list[Message]:
    """What goes into the chat template. The text of `data.template` replaces the last question."""
    messages = [dict(message) for message in problem.messages] or [{"role": "user"}]
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    messages[last]["content"] = _text(config.template, problem.question)
    system = config.system or problem.system
    if not system:
        return messages
    start = 1 if messages[0]["role"] == "system" else 0
    return [{"role": "system", "content": system}, *messages[start:]]


def render(problem: Problem, config: PromptFileConfig, tokenizer: Any) -> str:
    """The text for the model."""
    if not uses_chat(config.template):
        text, system = _text(config.template, problem.question), config.system or problem.system
        return f"{system}\n\n{text}" if system else text
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"data.template is {config.template!r}, but the tokenizer has no chat template: use "
            f"{_without_chat(config.template) or 'plain'!r}, or a tokenizer that has one (tokenizer_config.json, "
            "chat_template)"
        )
    messages, more = messages_of(problem, config), {"tools": problem.tools} if problem.tools else {}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
    except Exception as error:  # a template is code, and the messages of a row may not be what it expects
        raise DataError(
            f"{config.path}: the tokenizer's chat template failed on {problem.question[:60]!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
