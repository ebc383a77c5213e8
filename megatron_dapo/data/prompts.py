"""Prompt sets: every usable question of a file once, as the model will see it, and a report of the rows left out.

A prompt's id is a hash of its question alone, so it is the same in every file, order and run. Two questions are the
same if they differ only in white space; two answers, if they differ only in white space, leading zeros or a decimal
`.0`. A file of which more than `data.max_unusable` is unusable is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.config import ConfigError
from megatron_dapo.config.data import PromptFileConfig, file_stem
from megatron_dapo.data.columns import (
    BadRow,
    DataError,
    MissingColumn,
    Problem,
    find_files,
    messages_of,
    read_problem,
    read_rows,
    render,
    uses_chat,
)
from megatron_dapo.types import Prompt, as_tokens, printable

SHOWN = 5  # examples of each kind in the summary


@dataclass(slots=True)
class LoadReport:
    """Accounts for every row: kept + duplicates + in_conflict + bad + too_long = rows."""

    path: str
    rows: int = 0
    kept: int = 0
    duplicates: int = 0  # rows that repeat an earlier question
    # Questions dropped because rows disagree about the answer: id -> question, and answer -> lines.
    conflicts: dict[str, tuple[str, dict[str, list[int]]]] = field(default_factory=dict)
    bad: list[tuple[int, str]] = field(default_factory=list)  # line, what is wrong with it
    too_long: list[tuple[int, int]] = field(default_factory=list)  # line, tokens; dropped
    cut: int = 0  # prompts shortened from the left
    files: list[str] = field(default_factory=list)  # that were read

    @property
    def in_conflict(self) -> int:
        return len(self.conflicts)

    @property
    def unusable(self) -> int:
        """Rows dropped for another reason than repeating a question."""
        return len(self.bad) + len(self.too_long) + self.in_conflict

    def reasons(self) -> str:
        """Why rows are unusable, each reason with its first row; one line."""
        parts = []
        if self.bad:
            line, problem = self.bad[0]
            parts.append(f"{len(self.bad)} bad, first line {line}: {problem}")
        if self.too_long:
            line, tokens = self.too_long[0]
            parts.append(f"{len(self.too_long)} too long, first line {line}: {tokens} tokens")
        if self.in_conflict:
            question, answers = next(iter(self.conflicts.values()))
            parts.append(f"{self.in_conflict} with conflicting answers, first {question[:40]!r}: {', '.join(answers)}")
        return "; ".join(parts)

    def summary(self) -> str:
        """The counts in one line, then some examples of every problem."""
        kinds = {
            "duplicates": self.duplicates, "with conflicting answers": self.in_conflict,
            "bad rows": len(self.bad), "too long": len(self.too_long), "cut": self.cut,
        }  # fmt: skip
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines = [f"{self.path}: {self.kept} prompts of {self.rows} rows ({counts})"]
        if self.files != [self.path]:
            lines += [f"  read: {file}" for file in self.files[:SHOWN]]
            lines += [f"  read: … and {len(self.files) - SHOWN} more files"] if len(self.files) > SHOWN else []
        for question, answers in list(self.conflicts.values())[:SHOWN]:
            said = "; ".join(f"{answer} (line {', '.join(map(str, at))})" for answer, at in answers.items())
            lines.append(f"  conflicting answers to {question[:60]!r}: {said}")
        lines += [f"  line {line}: {problem}" for line, problem in self.bad[:SHOWN]]
        lines += [f"  line {line}: {tokens} tokens, too long" for line, tokens in self.too_long[:SHOWN]]
        hidden = sum(max(0, len(kind) - SHOWN) for kind in (self.conflicts, self.bad, self.too_long))
        return printable("\n".join([*lines, *([f"  … and {hidden} more"] if hidden else [])]))


@dataclass(slots=True, frozen=True)
class PromptSet(Sequence[Prompt]):
    """The prompts of a file, in file order, and the report on its rows."""

    prompts: tuple[Prompt, ...]
    report: LoadReport

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Any) -> Any:
        return self.prompts[index]


@dataclass(slots=True)
class _Entry:
    """All rows of one question."""

    problem: Problem
    id: str
    line: int
    answers: dict[str, list[int]] = field(default_factory=dict)  # as first written -> lines
    keys: dict[str, str] = field(default_factory=dict)  # normalised -> as first written

    def add(self, answer: str, line: int) -> None:
        written = self.keys.setdefault(answer_key(answer), answer)
        self.answers.setdefault(written, []).append(line)


def load_prompts(config: PromptFileConfig, tokenizer: Any, max_prompt_tokens: int | None = None) -> PromptSet:
    """The prompts of `config.path`. Raises DataError if nothing, or too little, of the file is usable."""
    report = LoadReport(config.path)
    entries = _collect(config, report)
    prompts = _tokenise(_without_conflicts(entries, report), config, tokenizer, max_prompt_tokens, report)
    report.kept = len(prompts)
    _check_usable(report, config.max_unusable)
    return PromptSet(tuple(prompts), report)


def _check_usable(report: LoadReport, limit: float) -> None:
    remedy = "repair it, or change data.question_column, data.answer_column, data.template or rollout.max_prompt_tokens"
    if not report.kept:
        why = f"its {report.rows} rows are unusable ({report.reasons()})" if report.rows else "it has no rows"
        raise DataError(f"nothing usable is left of {report.path}: {why}: {remedy}")
    rows = report.rows - report.duplicates
    if report.unusable > limit * rows:
        raise DataError(
            f"{report.path}: {report.unusable} of {rows} rows are unusable ({report.reasons()}): {remedy}, or raise "
            f"data.max_unusable ({limit:g})"
        )


def prompt_id(question: str) -> str:
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=8).hexdigest()


def _collect(config: PromptFileConfig, report: LoadReport) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    missing = ""
    files = find_files(config)
    report.files = [str(file) for file in files]
    for line, row in read_rows(files):
        report.rows += 1
        try:
            if isinstance(row, str):
                raise BadRow(row)
            problem = read_problem(row, config)
        except BadRow as error:
            missing = missing or (str(error) if isinstance(error, MissingColumn) else "")
            report.bad.append((line, str(error)))
            continue
        identity = prompt_id(problem.identity)
        report.duplicates += identity in entries
        entries.setdefault(identity, _Entry(problem, identity, line)).add(problem.answer, line)
    if missing and not entries:
        raise DataError(f"{config.path}: {missing}. Set data.question_column and data.answer_column to dotted paths")
    return list(entries.values())


def _without_conflicts(entries: list[_Entry], report: LoadReport) -> list[_Entry]:
    """Those whose rows agree about the answer."""
    report.conflicts = {e.id: (e.problem.question, e.answers) for e in entries if len(e.answers) > 1}
    return [entry for entry in entries if entry.id not in report.conflicts]


def _tokenise(
    entries: list[_Entry], config: PromptFileConfig, tokenizer: Any, limit: int | None, report: LoadReport
) -> list[Prompt]:
    texts = [render(entry.problem, config, tokenizer) for entry in entries]
    bare, whole = (tokenizer(["0"], add_special_tokens=special)["input_ids"][0] for special in (False, True))
    begin = whole[: whole.index(bare[0])] if bare else []  # Llama's BOS; chat templates write it themselves
    token_lists = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    prompts = []
    for entry, text, tokens in zip(entries, texts, token_lists, strict=True):
        if not tokens:
            report.bad.append((entry.line, "the tokenizer makes no tokens of it"))
            continue
        if not uses_chat(config.template) and tokens[: len(begin)] != begin:
            tokens = [*begin, *tokens]
        if limit is not None and len(tokens) > limit:
            if config.too_long == "drop":
                report.too_long.append((entry.line, len(tokens)))
                continue
            report.cut += 1
            kept = len(begin) if tokens[: len(begin)] == begin else 0
            tokens = tokens[:kept] + tokens[len(tokens) - limit + kept :]
            text = tokenizer.decode(tokens)
        meta = {"question": entry.problem.question, "line": entry.line, **_more_meta(entry.problem, config)}
        source = entry.problem.source or file_stem(config.path)
        (answer,) = entry.answers
        prompts.append(Prompt(entry.id, text, as_tokens(tokens), answer, source, meta))
    return prompts


def _more_meta(problem: Problem, config: PromptFileConfig) -> dict[str, Any]:
    """What a conversation and its rollout function need of the row, where it is not the question alone."""
    found: dict[str, Any] = {}
    if uses_chat(config.template):
        messages = messages_of(problem, config)
        if messages != [{"role": "user", "content": problem.question}]:
            found["messages"] = messages
    if problem.tools:
        found["tools"] = problem.tools
    return found | ({"environment": problem.environment} if problem.environment else {})


def answer_key(answer: str) -> str:
    """Equal for answers that differ only in white space, leading zeros or a decimal `.0`."""
    compact = "".join(answer.split())
    number = re.fullmatch(r"([+-]?)0*(\d+)(?:\.0*)?", compact.replace(",", ""))
    return number[1].replace("+", "") + number[2] if number else compact


# The model's tokenizer, checked: a directory without one, or with another model's, is an error that says so.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(model: str | Path, vocab: int) -> Any:
    """The tokenizer of a model directory. `vocab`: the model's vocabulary size, which must cover every token."""
    from transformers import AutoTokenizer

    folder = Path(model)
    # Without these files transformers returns an empty tokenizer, and every prompt would be empty.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy.model: {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): "
            "copy the tokenizer files of the model there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file can raise anything
        reason = next(iter(str(error).splitlines()), "no details")
        raise ConfigError(
            f"policy.model: the tokenizer in {folder} does not load ({type(error).__name__}: {reason}): "
            "copy the tokenizer files of the model there again"
        ) from error
    if not len(tokenizer):
        raise ConfigError(f"policy.model: the tokenizer in {folder} has no tokens: copy the model's tokenizer files")
    if len(tokenizer) > vocab:
        raise ConfigError(
            f"policy.model: the tokenizer in {folder} has {len(tokenizer)} tokens, but the model's vocabulary has "
            f"{vocab}: they belong to different models; use the tokenizer of the weights"
        )
    return tokenizer
