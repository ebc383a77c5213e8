"""The table of the self-check: one line per case, and the largest difference of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dapo.selfcheck.cases import Case
from megatron_dapo.selfcheck.trace import AFTER_ADAM_FACTOR, Difference

COLUMNS = (
    "layout", "ranks", "model", "objective", "aggregation", "loss", "gradients", "grad norm", "weights", "seconds", "",
)  # fmt: skip
TEXTS = ("layout", "model", "objective", "aggregation", "")


@dataclass(slots=True)
class Result:
    """One case's outcome on rank 0: a difference, or why there is none."""

    case: Case
    seconds: float
    difference: Difference | None = None
    error: str = ""

    def within(self, tolerance: float) -> bool:
        return self.difference is not None and self.difference.within(tolerance)


def print_results(console: Console, results: Sequence[Result], tolerance: float, updates: int, title: str = "") -> None:
    heading = f"Largest relative difference to a single process, {updates} DAPO updates, fp32"
    grid = Table(title=f"{title}: {heading[0].lower()}{heading[1:]}" if title else heading)
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column in TEXTS else "right")
    for result in results:
        grid.add_row(*_row(result, tolerance))
    console.print(grid)
    limit = tolerance * AFTER_ADAM_FACTOR
    bad = sum(not result.within(tolerance) for result in results)
    found = [result.difference for result in results if result.difference is not None]
    worst = max((difference.gradients for difference in found), default=float("nan"))
    console.print(f"{len(results)} cases, {bad} failed; largest difference of a gradient {worst:.1e}", highlight=False)
    console.print(f"tolerance {tolerance:g} (weights and the gradients of later updates {limit:g}, after Adam)")


def _row(result: Result, tolerance: float) -> list[str]:
    case, found = result.case, result.difference
    if found is None:
        numbers, verdict = ["—"] * 4, f"[red]ERROR[/] {escape(result.error)}"
    else:
        numbers = [f"{x:.1e}" for x in (found.loss, found.gradients, found.grad_norm, found.weights)]
        worst = f"gradient of {found.gradients_at}" if not found.gradients <= tolerance else "see the numbers"
        if not found.later_gradients <= tolerance * AFTER_ADAM_FACTOR:
            worst = f"later gradient of {found.later_gradients_at}: {found.later_gradients:.1e}"
        verdict = "[green]ok[/]" if found.within(tolerance) else f"[red]FAIL[/] {worst}"
    names = [case.name, str(case.layout.world_size), case.model, case.objective, case.aggregation]
    return [*names, *numbers, f"{result.seconds:.1f}", verdict]
