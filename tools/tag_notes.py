"""Prints the section of CHANGELOG.md of a version: the text of its tag.

python tools/tag_notes.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(version: str) -> str:
    """The text below `## VERSION`, up to the next section."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section ## {version} with text: write what has changed")
    return found[1].strip() + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: tag_notes.py VERSION")
    print(notes(sys.argv[1].removeprefix("v")), end="")
