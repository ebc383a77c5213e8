"""Which display a run gets."""

from __future__ import annotations

import os
import sys

from megatron_dapo.observe.console import Display, PlainDisplay


def make_display(kind: str, title: str) -> Display:
    """`auto`: live on a terminal, plain elsewhere."""
    if kind == "off":
        return Display()
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if kind == "rich" or (kind == "auto" and terminal):
        from megatron_dapo.observe.rich_console import LiveDisplay

        return LiveDisplay(title)
    return PlainDisplay()
