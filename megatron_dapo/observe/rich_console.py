"""The console on a terminal: one permanent line per step, and below it the running phases with their progress."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from megatron_dapo.observe.console import Console, duration, evaluation_text, step_summary
from megatron_dapo.types import SamplerProgress, printable

HEADER_EVERY = 20


def escape(text: str) -> str:
    return escape_markup(printable(text))


def _width(title: str) -> int:
    return max(6, len(title)) + 2


class RichConsole(Console):
    """Redraws a few times a second; reporting progress only stores it."""

    def __init__(self, title: str, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or Terminal(highlight=False)
        self._title = title
        self._run = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"),
            expand=True, console=self._terminal,
        )  # fmt: skip
        self._phases = Progress(
            TextColumn("  [cyan]{task.description:<10}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), console=self._terminal,
        )  # fmt: skip
        self._steps = self._run.add_task(escape(title), total=None, text="starting")
        self._tasks: dict[str, TaskID] = {}
        self._lines = 0  # since the last header
        self._columns: list[str] = []  # its titles
        self._live = Live(
            Group(self._run, self._phases), console=self._terminal, refresh_per_second=5, transient=True,
            redirect_stdout=True, redirect_stderr=True,
        )  # fmt: skip
        self._live.start()

    def phase_started(self, name: str) -> None:
        if name not in self._tasks:  # `sampling` may have started it
            self._tasks[name] = self._phases.add_task(escape(name), total=None, text="")

    def phase_ended(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._phases.remove_task(task)

    def update(self, name: str, text: str, done: float | None = None, total: float | None = None) -> None:
        if name in self._tasks:
            self._phases.update(self._tasks[name], completed=done, total=total, text=escape(text))

    def sampling(self, progress: SamplerProgress) -> None:
        self.phase_started("rollout")
        super().sampling(progress)

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None:
        cells = self._fitting({"step": str(step), **step_summary(metrics)})
        if self._lines % HEADER_EVERY == 0 or list(cells) != self._columns:
            self._lines, self._columns = 0, list(cells)
            self._live.console.print(Text("".join(title.rjust(_width(title)) for title in cells), style="dim"))
        self._lines += 1
        self._live.console.print(Text("".join(text.rjust(_width(title)) for title, text in cells.items())))
        text = f"step {step}/{total}" + (f"  ETA {duration(remaining)}" if remaining else "")
        self._run.update(self._steps, completed=step, total=total, text=text)

    def _fitting(self, cells: Mapping[str, str]) -> dict[str, str]:
        """The columns that fit the terminal, from the left."""
        space, found = self._terminal.width, {}
        for title, text in cells.items():
            space -= _width(title)
            if space < 0:
                break
            found[title] = text
        return found

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.console.print(f"[bold green]step {step} evaluation[/]  {escape(evaluation_text(metrics))}")

    def warn(self, message: str) -> None:
        self._live.console.print(f"[bold yellow]warning[/] {escape(message)}")

    def line(self, text: str) -> None:
        self._live.console.print(escape(text))

    def close(self, status: str) -> None:
        self._live.stop()
        self._terminal.print(f"{escape(self._title)}: {escape(status)} at {time.strftime('%H:%M:%S')}")
