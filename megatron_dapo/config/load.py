"""Reads a configuration: the YAML file, then `--set a.b=c` overrides. Every mistake is an error with a remedy.

`policy.model` may be a name on the Hugging Face hub. A directory of that name wins. What the cache has is used as it
is; the rest is downloaded, unless HF_HUB_OFFLINE is set. `NAME@REVISION` selects a branch, tag or commit.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_dapo.config.base import YamlError, admits, dump_yaml, hide_secrets, leaves, merged, parse_yaml
from megatron_dapo.config.other_names import find_row
from megatron_dapo.config.schema import Config
from megatron_dapo.errors import ConfigError

# What a field takes, by the type of pydantic's error.
EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of keys and values",
    "model_type": "a section with its own keys",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
}
QUOTED_OR_NULL = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|null|Null|NULL|~|""", re.DOTALL)
LISTS = ("data.path", "evaluate.data.path")  # texts that may also be lists of texts


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in `path` (None: all defaults) with `key.path=value` overrides applied."""
    raw = _read_file(Path(path)) if path is not None else {}
    where = str(path) if path else "config"
    changed = apply_overrides(copy.deepcopy(raw), overrides)
    try:
        return parse_config(changed, where)
    except ConfigError:
        parse_config(raw, where)  # the file itself is wrong
        return parse_config(changed, "--set")


def _read_file(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The sections of a file, on top of those of the file that it names as `base`. `above`: files based on it."""
    file = Path(os.path.expanduser(path))
    try:
        raw = parse_yaml(file.read_text(encoding="utf-8-sig")) or {}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file" + (f" (the base of {above[-1]})" if above else "")) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); expected a YAML file") from None
    except YamlError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        found = "a list" if isinstance(raw, list) else "text"
        raise ConfigError(f"{path}: expected sections at the top level, found {found}")
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: base: expected the name of a YAML file, found {base!r}")
    below = file.parent / os.path.expanduser(base)
    if below.resolve() in [other.resolve() for other in (*above, file)]:
        raise ConfigError(f"{path}: base: {base} is based on this file")
    return merged(_read_file(below, (*above, file)), raw)


def parse_config(raw: dict[str, Any], where: str = "config") -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = _joined(line for e in error.errors() for line in _explain(e))
        message = f"{where}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])
        raise ConfigError(hide_secrets(message)) from None


def _joined(lines: Iterable[str]) -> list[str]:
    """One line for a value that is of none of several types: `expected 'adaptive' or a number of at least 1, …`."""
    found: dict[str, str] = {}
    for line in lines:
        key, expected, rest = line.partition(": expected ")
        known = found.get(key + expected)
        if known is not None and expected:
            line = f"{known.rpartition(', found')[0]} or {rest}"
        found[key + expected if expected else line] = line
    return list(found.values())


def apply_overrides(raw: dict[str, Any], items: Iterable[str]) -> dict[str, Any]:
    """`a.b=c` sets raw["a"]["b"]. The value is read as YAML. A key that takes text takes it as written, unless it is
    quoted, null, or a list for one of LISTS."""
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        shown = f"--set {hide_secrets(item)!r}"
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{shown}: expected section.key=value, for example --set policy.tensor_parallel=2")
        takes_text = admits(annotation_of(key), str)
        is_text = takes_text and not QUOTED_OR_NULL.fullmatch(text) and not (key in LISTS and text.startswith("["))
        try:
            value = text if is_text else parse_yaml(text)
        except YamlError as error:
            if not takes_text:
                raise ConfigError(f"{shown}: the value is not valid YAML: {error}") from None
            value = text
        set_value(raw, key, value)
    return raw


def set_value(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise ConfigError(f"{key}: {section!r} is a value, not a section")
    raw[name] = value


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """What to write behind --set."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every key written out."""
    return dump_yaml(config.model_dump(mode="json"))


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")
        yield f"{prefix}{name}"


def field_of(key: str) -> FieldInfo | None:
    """The field of a dotted key; None if there is no such key."""
    model: type[BaseModel] | None = Config
    *sections, name = key.split(".")
    for section in sections:
        field = model.model_fields.get(section) if model else None
        model = section_of(field.annotation) if field else None
    return model.model_fields.get(name) if model else None


def annotation_of(key: str) -> Any:
    """The type of a dotted key; None if there is no such key."""
    field = field_of(key)
    return field.annotation if field else None


def section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(error: Any) -> list[str]:
    """One line; of an unknown section with keys of another tool, one line for each of them."""
    path = ".".join(str(part) for part in error["loc"] if re.fullmatch(r"\w*", str(part)))  # no types of a union
    if error["type"] == "extra_forbidden":
        known = [key for key, _ in leaves(error["input"], path) if find_row(key)]
        return [f"unknown key {key!r}{suggestion(key)}" for key in known or [path]]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return [f"{path}: {message}" if path else message]
    hint = "; put it in quotes" if error["type"] == "string_type" and isinstance(error["input"], bool) else ""
    expected = EXPECTED.get(error["type"], "").format(**error.get("ctx", {}))
    if not expected:
        return [f"{path}: {message} (found {error['input']!r})"]
    return [f"{path}: expected {expected}, found {error['input']!r}{hint}"]


def suggestion(path: str) -> str:
    path = ".".join(part for part in path.split(".") if not part.isdigit())  # positions in a list of sections
    parent, _, leaf = path.rpartition(".")
    if row := find_row(path):
        return f"; {row.answer}"
    keys = list(known_keys())
    siblings = [key for key in keys if key.rpartition(".")[0] == parent]
    inside = [key for key in keys if parent and key.startswith(f"{parent}.")]
    # A name of another section must be almost the same: with 300 keys, some resemble any word.
    near = _near(leaf, siblings, 0.75) or _near(leaf, inside, 0.8) or _near(leaf, keys, 0.85, partial=False)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    if not siblings:  # the section is unknown, too
        return suggestion(parent)
    where = f"keys of {parent}" if parent else "sections"
    return f"; {where}: " + ", ".join(key.rpartition(".")[2] for key in siblings) + " (docs/configuration.md)"


def _near(leaf: str, keys: list[str], similarity: float, partial: bool = True) -> list[str]:
    """The keys, if they are few, whose last part is spelled like `leaf`, or (`partial`) one begins with the other:
    `question` and `question_column`, `time_limit` and `time`."""
    names = {key.rpartition(".")[2] for key in keys}
    near = difflib.get_close_matches(leaf, names, n=1, cutoff=similarity)
    if not near and partial:
        near = [name for name in names if (name.startswith(leaf) and len(leaf) > 3) or leaf.startswith(f"{name}_")]
    found = [key for key in keys if key.rpartition(".")[2] in near]
    return found if len(found) < 4 else []


HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]  # configuration and tokenizer
WEIGHTS = ["*.safetensors"]


def for_this_machine(config: Config, file: str | Path) -> Config:
    """What a command needs that uses the model: directories of models, and `python:` modules beside the file."""
    sys.path.append(str(Path(file).resolve().parent))
    return with_local_model(config)


def with_local_model(config: Config) -> Config:
    """The configuration with `policy.model` and `critic.model` as directories."""
    for section in ("policy", "critic"):
        given = getattr(config, section)
        directory = local_model(given.model, key=f"{section}.model")
        if directory != given.model:
            config = config.model_copy(update={section: given.model_copy(update={"model": directory})})
    return config


def fetch(name: str, patterns: list[str], kind: str = "model") -> str:
    """The directory of a repository on the hub. What the cache has is not fetched again. Raises OSError."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    return str(snapshot_download(repository, repo_type=kind, revision=revision or None, allow_patterns=patterns))


def local_model(name: str, *, weights: bool = True, key: str = "policy.model") -> str:
    """The directory of a model of the hub; any other text as it is. Without `weights`: of its small files."""
    if not name or Path(name).exists() or not HUB_ID.fullmatch(name) or name.endswith((".json", ".safetensors")):
        return name
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return fetch(name, [*TEXTS, *WEIGHTS] if weights else TEXTS)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        repository = name.partition("@")[0]
        folder, _, model = repository.partition("/")
        what = f"ORGANISATION/{model} --local-dir {repository}" if folder == "models" else repository
        raise ConfigError(
            f"{key}: there is no directory {name}. A model of that name on the hub is not in the cache, and "
            f"{'HF_HUB_OFFLINE is set' if HF_HUB_OFFLINE else 'the hub cannot be reached'}: name an existing "
            f"directory, or download it where there is a network (hf download {what})"
        ) from None
    except OSError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{key}: {name} is no directory, and the hub refused it: {first}") from None
