"""`megatron-dapo explain KEY`: what one of our keys does, or what to write instead of another tool's key."""

from __future__ import annotations

import inspect
import json
import types
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_dapo.config.base import ConfigError, differences
from megatron_dapo.config.load import annotation_of, field_of, known_keys, load_config, section_of, suggestion
from megatron_dapo.config.other_names import find_row, names_of

SCHEMA = Path(__file__).with_name("config.schema.json")
BASH = """\
_megatron_dapo() {
    local word="${COMP_WORDS[COMP_CWORD]}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@COMMANDS@"
    elif [[ "$word" == *.* || "${COMP_WORDS[1]}" == explain && "$word" != -* ]]; then
        words="@KEYS@"
        [ "${COMP_WORDS[1]}" = explain ] || compopt -o nospace
    else
        case "${COMP_WORDS[1]}" in
@OPTIONS@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _megatron_dapo megatron-dapo"""


def completion(shell: str, options: dict[str, list[str]]) -> str:
    """A script for bash or zsh: commands, their options, and the settings, which a dot begins."""
    lines = [f'            {name}) words="{" ".join(words)}";;' for name, words in options.items()]
    keys = [key for key in known_keys() if section_of(annotation_of(key)) is None]
    parts = {"@COMMANDS@": " ".join(options), "@KEYS@": " ".join(keys), "@OPTIONS@": "\n".join(lines)}
    script = reduce(lambda text, part: text.replace(*part), parts.items(), BASH)
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def explain(key: str) -> str:
    field = field_of(key)
    if field is None:
        if row := find_row(key.lstrip("-").replace("-", "_")):
            return f"{key}: {row.answer}" + (f"\n\n{explain(row.to)}" if row.to else "")
        raise ConfigError(f"there is no key {key!r}{suggestion(key)}")
    section = section_of(field.annotation)
    if section is not None:
        keys = [name for name in known_keys(section) if "." not in name]
        return f"{key}: {inspect.cleandoc(section.__doc__ or '')}\nkeys: {', '.join(keys)}"
    kind = type_text(field.annotation).replace("`", "") + limits_text(field)
    names = [f"  {title}: {', '.join(found)}" for title, found in names_of(key).items()]
    return "\n".join([f"{key}: {kind}; default {default_text(field)}", description(key), *names])


def description(key: str) -> str:
    """From the JSON schema, which is made of the docstrings below the fields."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    *sections, name = key.split(".")
    node = schema
    for section in sections:
        inner = node["properties"][section]
        node = schema["$defs"][inner.get("items", inner)["$ref"].rpartition("/")[2]]
    return str(node["properties"][name]["description"])


def diff(first: str, second: str | None) -> str:
    """The settings of a run, or of a file, that differ from those of another, or from the defaults; one a line."""
    old, new = (_settings(second), _settings(first)) if second else (_settings(None), _settings(first))
    lines = [f"{key}: {dump(a)} → {dump(b)}" for key, a, b in differences(old, new)]
    return "\n".join(lines) or f"no setting differs from {second or 'the defaults'}"


def _settings(place: str | None) -> dict[str, Any]:
    if place is not None and Path(place).is_dir():
        place = str(Path(place, "config.yaml"))
    return load_config(place).model_dump(mode="json")


def dump(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def type_text(annotation: Any) -> str:
    """The values that a key takes, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_text(arg) for arg in args)
    if origin is list:
        return f"list of {'sections' if section_of(args[0]) else type_text(args[0])}"
    if origin is dict:
        return f"{type_text(args[0])} → {type_text(args[1])}"
    words = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def limits_text(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "multiple of"}
    limits = [(sign, getattr(limit, name, None)) for limit in field.metadata for name, sign in signs.items()]
    found = [f"{sign} {value}" for sign, value in limits if value is not None]
    return f", {', '.join(found)}" if found else ""


def default_text(field: FieldInfo) -> str:
    """As one would write it in YAML."""
    return dump(field.get_default(call_default_factory=True))
