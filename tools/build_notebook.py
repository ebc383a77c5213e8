"""Writes examples/tutorial.ipynb from docs/tutorial.md: text and code of the page become cells.

python tools/build_notebook.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs/tutorial.md", ROOT / "examples/tutorial.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)


def code_cells(page: str) -> list[str]:
    return BLOCK.findall(page)


def notebook(page: str) -> str:
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(BLOCK.split(page)):
        text = part.strip().splitlines(keepends=True)
        if number % 2:
            more: dict[str, Any] = {"execution_count": None, "outputs": []}
            cells.append({"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "source": text} | more)
        else:
            linked = re.sub(r"\]\((?!https?:|\.\.)([\w.#-]+)\)", r"](../docs/\1)", "".join(text))
            source = linked.replace("](../examples/", "](").splitlines(keepends=True)
            cells.append({"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": source})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main() -> int:
    text = notebook(PAGE.read_text())
    if "--check" not in sys.argv:
        NOTEBOOK.write_text(text)
    elif NOTEBOOK.read_text() != text:
        print(f"{NOTEBOOK.relative_to(ROOT)} is not up to date: run python tools/build_notebook.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
