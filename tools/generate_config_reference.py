#!/usr/bin/env python
"""Writes docs/configuration.md from the schema: every key with its type, default and description.

    python tools/generate_config_reference.py            # after a change of megatron_dapo/config
    python tools/generate_config_reference.py --check    # exit 1 when the file is not what the schema says

A section's introduction is its class's docstring, or else its module's. A test runs the check.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_dapo.config import Config, Section, load_config

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"
PUBLISHED = ROOT / "examples" / "qwen2.5_32b_dapo" / "dapo.yaml"

HEAD = """\
<!-- Written by tools/generate_config_reference.py: change the schema in megatron_dapo/config, then run it. -->
# Configuration

A run is one YAML file. Every key has a default. Those of the recipe are the published 32B run's
([examples/qwen2.5_32b_dapo](../examples/qwen2.5_32b_dapo/README.md)), except these, which that run sets:
@@DIFFERENCES@@.

`section.key=value` on the command line overrides a key, with or without `--set` before it; the value is read as YAML,
so `null`, `true`, `1e-6` and `[a, b]` work. An unknown key is an error that names the key you probably mean, our name
for a key of another tool ([migration.md](migration.md)), or the keys of that section. `megatron-dapo train CONFIG
--dry-run` checks a file against the model, the data and the number of ranks, and writes the resolved configuration with
every key to the run directory.

"""


def reference() -> str:
    """The whole page."""
    names = list(Config.model_fields)
    links = " · ".join(f"[{name}](#{name})" for name in names)
    parts = [HEAD.replace("@@DIFFERENCES@@", _differences()) + links + "\n"]
    described: dict[type[Section], str] = {}
    for name in names:
        for path, section in _sections(name, _section(Config.model_fields[name].annotation)):
            parts.append(_page(path, section, described))
    return "\n".join(parts)


def _differences() -> str:
    """Keys of the recipe, not of the layout or the files, that the published run sets to other values."""
    values = [dict(_values(load_config(file))) for file in (None, PUBLISHED)]
    recipe = ("algorithm.", "reward.", "rollout.sampler.", "data.template", "data.too_long")
    found = [(key, values[1][key]) for key, value in values[0].items() if key.startswith(recipe) and value is not None
             and values[1][key] != value]  # fmt: skip
    return ",\n".join(
        f"`{key}: {value:g}`" if isinstance(value, float) else f"`{key}: {value}`" for key, value in found
    )


def _values(section: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _sections(path: str, section: type[Section] | None) -> Iterator[tuple[str, type[Section]]]:
    """A section and those inside it, outermost first."""
    assert section is not None, f"{path} is not a section"
    yield path, section
    for name, field in section.model_fields.items():
        inner = _section(field.annotation) or _listed_section(field.annotation)
        if inner is not None:
            yield from _sections(f"{path}.{name}", inner)


def _page(path: str, section: type[Section], described: dict[type[Section], str]) -> str:
    """Keys that a base class shares with a section above are listed there only."""
    title = f"{'##' if '.' not in path else '###'} {path}\n"
    above = next((base for base in section.__mro__ if base in described), None)
    shared = set(above.model_fields) if above else set()
    for base in section.__mro__:
        if issubclass(base, Section) and base is not Section:
            described.setdefault(base, path)
    fields = {name: field for name, field in section.model_fields.items() if name not in shared}
    rows = [_row(path, name, field) for name, field in fields.items() if not _section(field.annotation)]
    table = "| key | type | default | what it does |\n|---|---|---|---|\n" + "".join(rows)
    text = f"{title}\n{_introduction(section)}\n"
    if above:
        names = f"`{next(iter(above.model_fields))}` to `{list(above.model_fields)[-1]}`"
        text += f"\nThe keys {names} are those of [{described[above]}](#{_anchor(described[above])}).\n"
    return f"{text}\n{table}" if rows else text


def _introduction(section: type[Section]) -> str:
    """The class's own docstring; without one, the module's after its leading "`name`: "."""
    own = section.__dict__.get("__doc__")
    text = inspect.cleandoc(own or sys.modules[section.__module__].__doc__ or "")
    if not own:
        text = text.partition("`: ")[2] or text
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _row(path: str, name: str, field: FieldInfo) -> str:
    kind = f"{_type(field.annotation)}{_limits(field)}"
    cells = [f"`{path}.{name}`", kind, f"`{_default(field)}`", field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _type(arg) for arg in args)
    if origin is list:
        return f"list of {'sections' if _section(args[0]) else _type(args[0])}"
    if origin is dict:
        return f"{_type(args[0])} → {_type(args[1])}"
    words = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "multiple of"}
    found = []
    for limit in field.metadata:
        found += [
            f"{sign} {getattr(limit, name)}" for name, sign in signs.items() if getattr(limit, name, None) is not None
        ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    """As one would write it in YAML."""
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _listed_section(annotation: Any) -> type[Section] | None:
    """Of a list of sections."""
    return _section(get_args(annotation)[0]) if get_origin(annotation) is list else None


def _anchor(path: str) -> str:
    """GitHub's anchor of a heading: dots are left out."""
    return path.replace(".", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is out of date")
    args = parser.parse_args()
    text = reference()
    if args.check:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(f"docs/{TARGET.name} is out of date: run python tools/generate_config_reference.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    print(f"written: docs/{TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
