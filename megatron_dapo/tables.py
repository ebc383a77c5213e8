"""Where tables are printed: as wide as the terminal, and wide enough to be read in a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console


def table_console(*, columns: int = 100, quiet: bool = False) -> Console:
    """`columns`: of a file or pipe, for which rich would take 80 and cut words."""
    return Console(width=None if sys.stdout.isatty() else columns, highlight=False, quiet=quiet)
