"""The examples of this installation: `megatron-dapo quickstart` and `megatron-dapo examples`.

In a checkout they are in `examples/`; the wheel holds a copy.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]


def examples_folder() -> Path:
    for folder in (PACKAGE / "_examples", PACKAGE.parent / "examples"):
        if (folder / "quickstart" / "quickstart.py").is_file():
            return folder
    raise UserError(f"this installation has no examples ({PACKAGE}): install the wheel, or use a checkout")


def copy_examples(target: Path) -> None:
    """Copies the examples, to be edited. Nothing that exists is changed."""
    if target.exists():
        raise UserError(f"{target} exists: name a new directory")
    try:
        shutil.copytree(examples_folder(), target, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(f"{target} cannot be created ({error.strerror}): name another directory") from None
    print(f"copied to {target}; start with {target / 'README.md'}")


def run_quickstart(arguments: Sequence[str]) -> int:
    script = examples_folder() / "quickstart" / "quickstart.py"
    before = sys.argv
    sys.argv = ["megatron-dapo quickstart", *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0
