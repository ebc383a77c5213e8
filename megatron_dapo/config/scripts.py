"""Reads the settings in another tool's launch script or configuration: shell, YAML or Python. Nothing is executed."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from megatron_dapo.config.base import ConfigError, YamlError, leaves, merged, parse_yaml

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HYDRA = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
KEY = re.compile(rf"{FLAG.pattern}|{HYDRA.pattern}", re.DOTALL)
BLANK = re.compile(r"(?:[ \t]|\\\n)+")
REDIRECTION = re.compile(rf"(?:\d*|&)[<>]+[&|]?(?:{BLANK.pattern})?")
FIELD = re.compile(r"(?:\$\(.*?\)|\$\{.*?\}|\S)+", re.DOTALL)  # of an unquoted expansion
OPENING, CLOSING = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
BETWEEN = ("then", "do", "else", "elif", "{", "}", "time", "exec", "nohup", "!")
PAIRS = {"(": ")", "{": "}"}


@dataclass
class Script:
    """What a file sets, in its order, what could not be read, and the program that it starts."""

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    program: str = ""


def read_script(path: Path) -> Script:
    text = _text(path)
    readers: dict[str, Callable[[str], Script]] = {
        ".py": _read_python, ".yaml": partial(_read_yaml, path), ".yml": partial(_read_yaml, path),
    }  # fmt: skip
    try:
        found = readers.get(path.suffix, _read_shell)(text)
    except (YamlError, SyntaxError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:]}: {error}") from None
    if not found.settings:
        raise ConfigError(f"{path}: no settings found; expected a launch script (key=value or --key value), a YAML "
                          "file, or Python with a GRPOConfig(…)")  # fmt: skip
    return found


def _text(path: Path) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from None


def _read_yaml(path: Path, text: str) -> Script:
    """With the files that it names under `defaults`, where they are."""
    script = Script()
    script.settings = dict(leaves(_with_defaults(parse_yaml(text), path, script.notes)))
    for key, value in script.settings.items():
        script.settings[key] = _interpolated(key, value, script.settings)
    return script


def _with_defaults(raw: Any, path: Path, notes: list[str], depth: int = 0) -> dict[str, Any]:
    if not isinstance(raw, dict):
        return {}
    found: dict[str, Any] = {}
    names = raw.pop("defaults", None) or []
    for name in [names] if isinstance(names, str) else names:
        file = path.parent / str(name)
        if file.is_file() and depth < 9:
            found = merged(found, _with_defaults(parse_yaml(_text(file)), file, notes, depth + 1))
        elif name != "_self_":
            notes.append(f"defaults: {name}: not read, there is no such file beside this one")
    return cast(dict[str, Any], merged(found, raw))


def _interpolated(key: str, value: Any, settings: dict[str, Any], depth: int = 0) -> Any:
    """`${a.b}` is the value of that key, `${.b}` of a neighbour, `${mul:2, 3}` a product."""
    for dots, name in re.findall(r"\$\{(\.*)([\w.]+)\}", value) if isinstance(value, str) and depth < 9 else ():
        full = ".".join([*key.split(".")[: -len(dots)], name]) if dots else name
        if full in settings:
            other = _interpolated(full, settings[full], settings, depth + 1)
            value = other if value == f"${{{dots}{name}}}" else str(value).replace(f"${{{dots}{name}}}", str(other))
    product = re.fullmatch(r"\$\{mul:\s*(\d+),\s*(\d+)\}", value) if isinstance(value, str) else None
    return int(product[1]) * int(product[2]) if product else value


def _read_python(text: str) -> Script:
    """The constant arguments of TRL's configuration and trainer, and of load_dataset; without these, the command in the
    file's docstring."""
    tree, script, in_code = ast.parse(text), Script(), False
    calls = [(ast.unparse(node.func).rpartition(".")[2], node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    defaults = {
        f"args.{name}": value for name, node in calls if name == "add_argument" for name, value in _option(node)
    }
    for name, call in calls:
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords if keyword.arg not in (None, "args")}
        if name == "load_dataset" and call.args:
            keywords["dataset_name"] = call.args[0]
        elif not re.fullmatch(r"(GRPO|RLOO)(Config|Trainer)", name):
            continue
        in_code = in_code or (bool(keywords) and name.endswith("Config"))
        script.program = name if name != "load_dataset" else script.program
        script.settings |= {key: _constant(node, defaults) for key, node in keywords.items()}
    command = _read_shell(ast.get_docstring(tree) or "")
    if not in_code:
        given = command.settings
        for key, value in script.settings.items():  # model=model_args.model_name_or_path
            script.settings[key] = given.get(re.sub(r"\$\{\w*args\.(\w+)\}", r"\1", str(value)), value)
        script = Script({**script.settings, **given}, command.notes, script.program)
    elif command.settings:
        script.notes.append("the command in the docstring was not read, because the code has a configuration")
    script.settings |= {key: _constant(node, defaults) for key, node in _assigned(tree)}
    return script


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """As `training_args.beta = 0.1`."""
    for node in ast.walk(tree):
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and (found := re.fullmatch(r"(?:\w+_)?(?:args|config)\.(\w+)", target)):
            yield found[1], node.value


def _option(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The name and the default of `parser.add_argument("--name", default=…)`."""
    names = [node.value for node in call.args if isinstance(node, ast.Constant) and str(node.value).startswith("--")]
    for keyword in call.keywords:
        if keyword.arg == "default" and names:
            yield str(names[0])[2:].replace("-", "_"), keyword.value


def _constant(node: ast.expr, defaults: dict[str, ast.expr]) -> Any:
    """The value of an expression; `${…}` around one that is not a constant."""
    try:
        return ast.literal_eval(defaults.get(ast.unparse(node), node))
    except ValueError:
        return f"${{{ast.unparse(node)}}}"


def _read_shell(text: str) -> Script:
    shell = _Shell(text)
    shell.run()
    script = Script(notes=shell.notes)
    best: tuple[dict[str, Any], list[str]] = ({}, [])
    for words in shell.commands:
        start = _start_of_arguments(words)
        settings = dict(_arguments(words[start:]))
        if len(settings) > len(best[0]):
            best = settings, words[:start]
    script.settings, launcher = best
    script.program = " ".join(launcher[-2:])
    options = [word.partition("=")[0] for word in launcher if re.match("--?[a-z]", word) and word != "-m"]
    if options:
        script.notes.append(f"options of the launcher are not settings of a run: {' '.join(options)}")
    return script


def _start_of_arguments(words: list[str]) -> int:
    """After the program: a Python file, `-m module`, or `trl grpo` and the like. The last one counts, because a program
    may start another; but a Python file after `--flag` is probably its value."""
    start = 0
    for index, (before, word) in enumerate(pairwise(["", *words]), start=1):
        is_program = word.endswith(".py") or before in ("-m", "trl", "swift", "megatron")
        may_be_value = FLAG.fullmatch(before) and "=" not in before
        if is_program and not KEY.fullmatch(word) and not (start and may_be_value):
            start = index
    return start


def _arguments(words: list[str]) -> Iterator[tuple[str, Any]]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if flag := FLAG.fullmatch(word):
            values = [] if flag[2] is None else [flag[2]]
            while flag[2] is None and index < len(words) and not KEY.fullmatch(words[index]):
                values.append(words[index])
                index += 1
            yield flag[1].replace("-", "_"), _value(values)
        elif setting := HYDRA.fullmatch(word):
            yield setting[1], _value([setting[2]])


def _value(texts: list[str]) -> Any:
    """As YAML reads it; True for a switch, a list of several values."""
    if not texts:
        return True
    if len(texts) > 1:
        return [_value([text.rstrip(",")]) for text in texts]
    try:
        value = parse_yaml(texts[0])
    except YamlError:
        return texts[0]
    return None if value == "None" else value


class _Shell:
    """As much of a shell as launch scripts use: variables with defaults, arrays, arithmetic. Commands are collected,
    never run. Branches of `if` and `case` do not replace a value, only an empty one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        self.depth = 0

    def run(self) -> None:
        words: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if redirection := REDIRECTION.match(self.text, self.at):
                self.at = redirection.end()
                self._word()
            elif char in "\n;|&()":
                self.at += 1
                self._end(words)
                words = []
            elif blank := BLANK.match(self.text, self.at):
                self.at = blank.end()
            elif char == "#":
                self._skip_line()
            elif set(words) - {*BETWEEN} or not self._assignment():
                words += self._word()
        self._end(words)

    def _end(self, words: list[str]) -> None:
        while words and (words[0] in BETWEEN or words[0] in OPENING + CLOSING):
            self.depth += (words[0] in OPENING) - (words[0] in CLOSING)
            words = words[1:]
        if not words:
            return
        if words[0] in ("source", "."):
            self.notes.append(f"{' '.join(words)}: not read")
        elif words[0] in ("export", "local", "readonly"):
            for word in words[1:]:
                name, equals, value = word.partition("=")
                if equals:
                    self._assign(name, value)
        else:
            self.commands.append(words)

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _assignment(self) -> bool:
        """NAME=value or NAME=(words) at the start of a command."""
        found = ASSIGNMENT.match(self.text, self.at)
        if not found:
            return False
        self.at = found.end()
        if self.text[self.at : self.at + 1] != "(":
            at_end = self.at >= len(self.text) or self.text[self.at] in " \t\n;"
            self._assign(found[1] + found[2], "" if at_end else " ".join(self._word(split=False)))
            return True
        self.at += 1
        items: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "#":
                self._skip_line()
            elif blank := BLANK.match(self.text, self.at):
                self.at = blank.end()
            elif self.text[self.at] in "\n;|&(<>":
                self.at += 1
            else:
                items += self._word()
        self.at += 1
        if self.depth and self.arrays.get(found[1], found[2]) not in ([], ""):
            self.notes.append(f"{found[1]} also gets {' '.join(items)} under a condition, which was not followed")
        else:
            self.arrays[found[1]] = [*(self.arrays.get(found[1], []) if found[2] else []), *items]
        return True

    def _assign(self, name: str, value: str) -> None:
        if name.endswith("+"):
            name = name[:-1]
            value = self.variables.get(name, "") + value
        if self.depth and self.variables.get(name):
            if self.variables[name] != value:
                self.notes.append(f"{name} is also set to {value} under a condition; {self.variables[name]} was taken")
        else:
            if self.depth and name in self.variables:
                self.notes.append(f"{name} is set to {value} only under a condition, which was taken as true")
            self.variables[name] = value

    def _word(self, split: bool = True) -> list[str]:
        """One word, expanded: several where it is an array or, with `split`, an unquoted variable with spaces. A value
        behind `key=` stays whole."""
        parts, fields = "", []
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()<>":
            char = self.text[self.at]
            if char == "'":
                inner = self.text[self.at + 1 :].partition("'")[0]
                parts += inner
                self.at += len(inner) + 2
            elif char == '"':
                end = _closing_quote(self.text, self.at + 1)
                inner = self.text[self.at + 1 : end]
                self.at = end + 1
                if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", inner):
                    fields += self.arrays.get(array[1], [])
                else:
                    parts += self._expand(inner)
                    fields += [""] if not inner and not parts else []
            elif char == "$":
                inner = self.text[self.at : _end_of_expansion(self.text, self.at)]
                self.at += len(inner)
                array = re.fullmatch(r"\$\{(\w+)(\[[@*]\])?\}", inner)
                if array and (array[2] or array[1] in self.arrays):
                    fields += self.arrays.get(array[1], [])
                elif split and "=" not in parts and '"' not in inner:
                    *whole, last = FIELD.findall(f"{parts}{self._expand(inner)}\0")  # \0: the value may end in a space
                    fields, parts = fields + whole, last[:-1]
                else:
                    parts += self._expand(inner)
            else:
                step = 2 if char == "\\" else 1
                parts += self.text[self.at : self.at + step].removeprefix("\\").strip("\n")
                self.at += step
        return [*fields, parts] if parts else fields

    def _expand(self, text: str) -> str:
        """Variables, defaults and arithmetic in a text; what cannot be computed stays as it is written."""
        found, at = "", 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "$", "\\", "\n"):
                found += text[at + 1].strip("\n")
                at += 2
            elif text[at] == "$":
                end = _end_of_expansion(text, at)
                found += self._value_of(text[at:end])
                at = end
            else:
                found += text[at]
                at += 1
        return found

    def _value_of(self, written: str) -> str:
        if written.startswith("$(("):
            return _arithmetic(self._expand(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", written[3:-2]))) or written
        if written in ("$@", "$*", "${@}"):
            return ""
        match = re.fullmatch(r"\$\{?(\w+)(?:(:?[-=+])(.*))?\}?", written.removesuffix("}"), re.DOTALL)
        if written.startswith("$(") or not match:
            return written
        name, operator, other = match.groups()
        if name == "HOME":
            return "~"
        value = self.variables.get(name)
        if operator and operator[-1] == "+":
            return self._expand(other) if value else ""
        if value is not None and (value or not operator):
            return value
        return self._expand(other).replace('"', "") if operator else written


def _end_of_expansion(text: str, at: int) -> int:
    """After `$NAME`, `${…}`, `$(…)` or a lone `$` at `at`."""
    opening = text[at + 1 : at + 2]
    if opening not in PAIRS:
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?]").match(text, at + 1)
        return name.end() if name else at + 1
    depth, index = 0, at + 1
    while index < len(text):
        depth += (text[index] == opening) - (text[index] == PAIRS[opening])
        index += 1
        if not depth:
            break
    return index


def _closing_quote(text: str, at: int) -> int:
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        else:
            at = _end_of_expansion(text, at) if text[at : at + 2] in ("$(", "${") else at + 1
    return min(at, len(text))


def _arithmetic(text: str) -> str:
    """The value of a whole-number expression; empty if it is none."""
    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", text) or "**" in text:
        return ""
    try:
        return str(int(eval(text.replace("/", "//").replace("////", "//"), {"__builtins__": {}})))
    except (SyntaxError, ArithmeticError, ValueError):
        return ""
