#!/usr/bin/env python
"""Writes what follows from megatron_dapo/config: docs/configuration.md, every key with its type, default and
description; config.schema.json, the same for editors; docs/migration.md, the table of other tools' settings.

    python tools/generate_config_reference.py            # after a change of megatron_dapo/config
    python tools/generate_config_reference.py --check    # exit 1 when a file is out of date

A description is the docstring below a field, a section's introduction its class's docstring, or else its module's. A
test runs the check.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_dapo.config import Section

Section.model_config["use_attribute_docstrings"] = True  # before there are sections: a run need not read its sources

from megatron_dapo.config import Config, load_config  # noqa: E402
from megatron_dapo.config.explain import default_text, limits_text, type_text  # noqa: E402
from megatron_dapo.config.other_names import Row, Tool, shown, tools  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "examples" / "qwen2.5_32b_dapo" / "dapo.yaml"

HEAD = """\
<!-- Written by tools/generate_config_reference.py: change the schema in megatron_dapo/config, then run it. -->
# Configuration

A run is one YAML file with the settings that differ from the defaults. `megatron-dapo init` writes one for your model
and machine, `megatron-dapo train CONFIG --dry-run` checks it against the model, the data and the number of ranks, and
writes the resolved configuration with every key to the run directory.

- **Defaults.** Those of the algorithm, the batch sizes and the lengths are from the published 32B run
  ([examples/qwen2.5_32b_dapo](../examples/qwen2.5_32b_dapo/README.md)), too large for a first run. That run differs
  from them in: @@DIFFERENCES@@.
- **Command line.** `section.key=value` overrides a key, with or without `--set` before it. The value is read as YAML,
  so `null`, `true`, `1e-6` and `[a, b]` work. Text is taken as written, also ` #` and `: `, unless it is in quotes or
  null.
- **Another file.** `base: other.yaml` starts from another file, whose path is relative to this one.
- **Unknown keys** are errors that name the key you probably mean, our name for a key of another tool
  ([migration.md](migration.md)), or the keys of that section.
- **Editors.** For completion and help, begin a file with `# yaml-language-server: $schema=PATH`;
  `megatron-dapo explain --schema` prints the path.

"""

MIGRATION = """\
<!-- Written by tools/generate_config_reference.py: change megatron_dapo/config/other_tools.yaml, then run it. -->
# Migration from other tools

```bash network
megatron-dapo import run_qwen3_8b.sh --output run.yaml
```

`import` reads a launch script (shell, without executing it), a YAML file or a Python file of verl, slime, AReaL, TRL,
ms-swift or NeMo-RL and writes a configuration.

- Units are converted: slime's `--global-batch-size` counts samples, our `trainer.mini_batch_prompts` counts prompts.
- Where a tool's default differs from ours, the tool's default is written. Tools that wait for every response of a batch
  get `rollout.sampler.oversampling: 1`, which does the same: it trains as there, and engines wait for the longest
  response. Remove it to keep them busy ([rollout.md](rollout.md)).
- Comments name the setting behind each key, what you have to fill in or check, and what has no equivalent. No setting
  is dropped silently.

The tables below are what it knows; "there" is the other tool. A YAML file with one of these names is refused with a
message that gives our name, and `megatron-dapo explain KEY` lists other tools' names for one of our keys. Names in
other tools change between versions. The last section lists settings that you can leave out.
"""


def migration() -> str:
    """One section for each tool; last, what needs no setting here."""
    parts = [MIGRATION]
    for tool in tools().values():
        found = [(f"`{shown(tool, row)}`", row) for row in tool.own.values()]
        rows = _grouped((f"`{row.to}` | {_note(row)}", name) for name, row in found if row.to)
        lost = _grouped((row.none, name) for name, row in found if not row.to and row.none and row.same is None)
        parts.append(f"## {tool.title}\n\n" + (f"{tool.intro}\n\n" if tool.intro else "")
                     + (f"| {tool.title} | here | note |\n|---|---|---|\n{rows}" if rows else "")
                     + (f"\n| no equivalent | because |\n|---|---|\n{lost}" if lost else ""))  # fmt: skip
    parts.append("## Nothing to set\n\nLeave these settings out. Where a value is given: only with that value.\n")
    for tool in tools().values():
        if same := _grouped(_same(tool)):
            parts.append(f"| {tool.title} | here |\n|---|---|\n{same}")
    return "\n".join(parts)


def _note(row: Row) -> str:
    return "; ".join(filter(None, [row.note, row.condition and f"only with {row.condition}"]))


def _same(tool: Tool) -> Iterator[tuple[str, str]]:
    for row in tool.own.values():
        if row.same is not None and not row.to:
            values = [] if row.same == "any" else [f"`{json.dumps(value)}`" for value in row.same]
            value = f": {' or '.join(values)}" if values else ""
            yield row.note or "what a run here does anyway", f"`{shown(tool, row)}`{value}"


def _grouped(rows: Iterable[tuple[str, str]]) -> str:
    """Rows `| names | cells |` of a table: (cells, name) with the same cells are one row."""
    names: dict[str, list[str]] = {}
    for cells, name in rows:
        names.setdefault(cells, []).append(name)
    text = "".join(f"| {', '.join(found)} | {cells} |\n" for cells, found in names.items())
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def schema() -> str:
    """JSON schema of a configuration file, with `base` beside the sections."""
    found = Config.model_json_schema()
    for section in found["$defs"].values():
        for field in section["properties"].values():
            if "description" in field:
                field["description"] = _one_line(field["description"])
    about = "Another YAML file, relative to this one, whose settings this file changes."
    base = {"type": "string", "description": about}
    found |= {"title": "megatron-dapo", "properties": {"base": base, **found["properties"]}}
    text = json.dumps(found, ensure_ascii=False)
    return text.replace('"}, "', '"},\n"') + "\n"  # a key in a line


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
    return ",\n  ".join(
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
    text = _one_line(text)
    return text[:1].upper() + text[1:]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _row(path: str, name: str, field: FieldInfo) -> str:
    kind = f"{type_text(field.annotation)}{limits_text(field)}"
    cells = [f"`{path}.{name}`", kind, f"`{default_text(field)}`", _one_line(field.description or "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


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
    targets = {"docs/configuration.md": reference, "docs/migration.md": migration,
               "megatron_dapo/config/config.schema.json": schema}  # fmt: skip
    texts = {ROOT / name: text() for name, text in targets.items()}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in old:
        name = path.relative_to(ROOT)
        if args.check:
            print(f"{name} is out of date: run python tools/generate_config_reference.py", file=sys.stderr)
        else:
            path.write_text(texts[path])
            print(f"written: {name}")
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
