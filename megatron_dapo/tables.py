"""Where tables are printed: as wide as the terminal, and wide enough to be read in a file or a pipe."""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console


def table_console(stream: IO[str] | None = None, *, columns: int = 100, quiet: bool = False) -> Console:
    """`columns`: of a file or pipe, for which rich would take 80 and cut words."""
    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else columns, highlight=False, quiet=quiet)
