"""Writes the figures of benchmarks/results.yaml into the pages that quote them.

    python tools/figures.py             # rewrite the pages
    python tools/figures.py --check     # change nothing; exit code 1 if a page differs

A page marks a figure with a comment right behind it, which is not rendered: `1.05 ×<!-- head.ratio -->`. The key names
a value of results.yaml, or a row of values, which are joined by " | ". A figure is replaced if it has the form of the
value, that is the same text with other numbers. Anything else in front of a mark is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results.yaml"
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
MARK = re.compile(r"<!-- (\w+(?:\.\w+)+) -->")


def read() -> dict[str, dict[str, Any]]:
    """results.yaml with every value as it is written there: 1.10 stays 1.10."""
    return yaml.load(RESULTS.read_text(), Loader=yaml.BaseLoader)


def figures(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Key → text of every value, and of every row."""
    found: dict[str, str] = {}
    for group, entries in results.items():
        for name, entry in entries.items():
            if name == "section":
                continue
            row = entry if isinstance(entry, dict) else {}
            found |= {f"{group}.{name}.{cell}": value for cell, value in row.items()}
            found[f"{group}.{name}"] = " | ".join(row.values()) if row else entry
    return found


def form(value: str) -> str:
    """A pattern for `value` with any other numbers."""
    return r"(?<![\d.,])" + f"(?:{NUMBER.pattern})".join(map(re.escape, NUMBER.split(value)))


def rewritten(text: str, known: dict[str, str]) -> str:
    """`text` with the known figures in front of its marks. Fails on an unknown key and on text of another form."""
    for key in dict.fromkeys(MARK.findall(text)):
        if key not in known:
            raise ValueError(f"the mark {key} is not in {RESULTS.name}")
        mark = f"<!-- {key} -->"
        text, found = re.subn(form(known[key]) + re.escape(mark), known[key] + mark, text)
        if found != text.count(mark):
            raise ValueError(f"the mark {key} does not follow a figure like {known[key]!r}")
    return text


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit("usage: figures.py [--check]")
    known, differing = figures(read()), []
    for page in pages():
        before = page.read_text()
        try:
            after = rewritten(before, known)
        except ValueError as error:
            raise SystemExit(f"{page.relative_to(ROOT)}: {error}") from None
        if after != before:
            differing.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after)
    if differing:
        print(f"{'differ from results.yaml' if check else 'rewritten'}: {', '.join(differing)}")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
