"""Settings of other tools and ours: the table other_tools.yaml, and what an error about one of their keys says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import parse_yaml

TABLE = Path(__file__).with_name("other_tools.yaml")


@dataclass(frozen=True)
class Row:
    """One setting of another tool; other_tools.yaml explains the fields."""

    name: str
    to: str = ""
    values: dict[Any, Any] = field(default_factory=dict)
    unit: str = ""
    note: str = ""
    same: Any = None
    when: dict[str, list[Any]] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    none: str = ""
    option: str = ""
    kind: str = ""
    like: str = ""

    def of(self, key: str) -> Row | None:
        """Itself, or the row that another tool has for the last part of the key."""
        other = tools()[self.like].rows.get(key.rpartition(".")[2]) if self.like else self
        return replace(other, name=self.name, when=self.when) if other else None

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def condition(self) -> str:
        return ", ".join(f"{name}={' or '.join(str(x).lower() for x in values)}" for name, values in self.when.items())

    @property
    def answer(self) -> str:
        """What an error message says about it."""
        note = plain(self.note)
        if self.to:
            return f"here it is called {self.to!r}" + (f" ({note})" if note else "")
        return f"there is no equivalent: {plain(self.none)}" if self.none else f"it is not needed here: {note}"


@dataclass(frozen=True)
class Tool:
    name: str
    title: str
    rows: dict[str, Row]
    own: dict[str, Row]  # without those of `base`
    marks: tuple[str, ...] = ()
    intro: str = ""
    prefix: str = ""
    flags: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def row(self, key: str) -> Row | None:
        """Of a key as it is written in a file of this tool; a row with `*` only where no other one fits."""
        key = key.removeprefix(self.prefix)
        patterns = (row.of(key) for name, row in self.rows.items() if "*" in name and fnmatchcase(key, name))
        return self.rows.get(key) or next(filter(None, patterns), None)


@cache
def tools() -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for name, raw in parse_yaml(TABLE.read_text()).items():
        if name != "spellings":
            own = _rows(raw.pop("rows", {}))
            base = found.get(raw.pop("base", ""), Tool("", "", {}, {}))
            more = found[raw.pop("more")].rows if "more" in raw else {}
            both = {key: getattr(base, key) | raw.get(key, {}) for key in ("defaults", "settings")}
            raw = {"prefix": base.prefix, "flags": base.flags, **raw, **both}
            found[name] = Tool(name, rows=more | base.rows | own, own=own, **raw)
    return found


def _rows(raw: dict[str, Any]) -> dict[str, Row]:
    """One for each of the names of a row."""
    pairs = (
        (name, {"to": row} if isinstance(row, str) else row) for names, row in raw.items() for name in names.split()
    )
    return {name: Row(name, **row) for name, row in pairs}


@cache
def spellings() -> dict[str, str]:
    return {name: ours for ours, names in parse_yaml(TABLE.read_text())["spellings"].items() for name in names.split()}


def find_row(path: str) -> Row | None:
    """The row of another tool's key, or the one that most tools have under its last part."""
    leaf = path.rpartition(".")[2]
    if ours := spellings().get(path):
        return Row(path, to=ours)
    for tool in tools().values():
        if row := tool.rows.get(path.removeprefix(tool.prefix)):
            return row
    if leaf in spellings():
        return Row(path, to=spellings()[leaf])
    # A single word, or the last part of the key of ours that is meant, says too little.
    rows = [row for tool in tools().values() for row in tool.own.values() if row.leaf == leaf and "_" in leaf]
    rows = [row for row in rows if "critic" in path or not row.to.startswith("critic.")]
    ours, count = Counter(row.to for row in rows).most_common(1)[0] if rows else ("", 0)
    if not rows or 2 * count <= len(rows) or ours.endswith(f".{leaf}"):
        return None
    return max((row for row in rows if row.to == ours), key=lambda row: bool(row.unit))  # a unit says more


def names_of(ours: str) -> dict[str, list[str]]:
    """What other tools call one of our keys, by the title of the tool, with the units that differ."""
    found: dict[str, list[str]] = {}
    for tool in tools().values():
        for row in (row for row in tool.own.values() if row.to == ours):
            unit = f" ({plain(row.note)})" if row.unit and row.note else ""
            found.setdefault(tool.title, []).append(shown(tool, row) + unit)
    return found


def shown(tool: Tool, row: Row) -> str:
    """A key as that tool writes it."""
    return f"--{row.name.replace('_', '-' if tool.name == 'slime' else '_')}" if tool.flags else row.name


def plain(note: str) -> str:
    """A note of the table without its Markdown."""
    return re.sub(r"\s*\(\[.*?\]\(.*?\)\)|`", "", note)
