"""The main figures of one or more runs as one image, for a README, a slide or a machine without a browser.

    python examples/curves.py RUN_DIR... [--output curves.png]

`megatron-dapo report` has all figures, as a page. This needs matplotlib, which is not a dependency of the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_dapo.errors import UserError
from megatron_dapo.observe.figures import Figure, figures_of
from megatron_dapo.observe.runs import Run, load_runs

COLOURS = ("#0b6bb8", "#cf4f00", "#008f68", "#b0559a", "#b98600", "#4b4fb8", "#6d6d6d", "#9c3b3b")
DASHES = ("-", "--", ":", "-.", (0, (9, 3)), (0, (2, 1.5, 2, 4)))
WIDTHS = (1.5, 0.8, 2.4)
SHOWN = (
    "reward", "accuracy", "evaluation", "entropy", "length", "clip", "mismatch_kl", "grad_norm", "groups", "phases",
)  # fmt: skip
UNITS = {"percent": 100.0}
COLUMNS = 3
WIDTH = 6  # columns of the grid: divisible by 1, 2 and 3


def draw(runs: list[Run]) -> Any:
    """The figures in SHOWN that the runs have data for, three in a row; the last row is filled."""
    every = {figure.id: figure for figures in figures_of(runs).values() for figure in figures}
    panels: list[tuple[Figure, int | None]] = [
        panel for name in SHOWN if name in every for panel in _panels(every[name], runs)
    ]
    if not panels:  # a run with none of the usual metrics
        panels = [panel for figure in list(every.values())[:12] for panel in _panels(figure, runs)]
    rows = -(-len(panels) // COLUMNS)
    canvas = Canvas(figsize=(4.6 * COLUMNS, 3.0 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    for place, (figure, run) in zip(_places(canvas, len(panels)), panels, strict=True):
        axis = canvas.add_subplot(place)
        (_draw_stack if figure.stacked else _draw_lines)(axis, figure, runs, run)
        _style(axis, figure, f" · {runs[run].name}" if run is not None and len(runs) > 1 else "")
    if len(runs) > 1:
        marks = [
            Line2D([], [], color=COLOURS[i % len(COLOURS)], ls=DASHES[i % len(DASHES)], label=run.name)
            for i, run in enumerate(runs)
        ]
        canvas.legend(handles=marks, loc="outside upper center", ncols=min(4, len(runs)), frameon=False, handlelength=4)
    return canvas


def _places(canvas: Any, panels: int) -> list[Any]:
    """A cell for each panel, row by row; those of an incomplete last row are wider, so that no cell is empty."""
    rows = -(-panels // COLUMNS)
    grid = canvas.add_gridspec(rows, WIDTH)
    found = []
    for row in range(rows):
        count = min(COLUMNS, panels - row * COLUMNS)
        width = WIDTH // count
        found += [grid[row, i * width : (i + 1) * width] for i in range(count)]
    return found


def _panels(figure: Figure, runs: list[Run]) -> list[tuple[Figure, int | None]]:
    """A stacked figure needs one panel per run; lines share a panel."""
    if not figure.stacked:
        return [(figure, None)]
    return [(figure, i) for i in range(len(runs)) if figure.runs[i]]


def _labels(figure: Figure) -> list[str]:
    return list(dict.fromkeys(series.label for run in figure.runs for series in run))


def _draw_lines(axis: Any, figure: Figure, runs: list[Run], _: int | None) -> None:
    labels, scale = _labels(figure), UNITS.get(figure.format, 1.0)
    for i, run in enumerate(figure.runs):
        for series in run:
            index = labels.index(series.label)
            colour = COLOURS[(i if len(runs) > 1 else index) % len(COLOURS)]
            y = [float("nan") if value is None else value * scale for value in series.y]
            few = len(y) <= 24
            axis.plot(
                series.x, y, color=colour, lw=WIDTHS[index % 3] if len(runs) > 1 else 1.5,
                ls=DASHES[(i if len(runs) > 1 else index) % len(DASHES)],
                marker="o" if few else None, ms=3, label=series.label if i == 0 else None,
            )  # fmt: skip
            if series.low and series.high:
                low, high = (
                    [float("nan") if v is None else v * scale for v in side] for side in (series.low, series.high)
                )
                axis.fill_between(series.x, low, high, color=colour, alpha=0.13, lw=0)
    if figure.log and any(v is not None and v > 0 for run in figure.runs for series in run for v in series.y):
        axis.set_yscale("log")
    elif figure.zero:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]) if axis.dataLim.ymin < 0 else 0.0)
    if len(labels) > 1:
        _add_legend(axis)


def _draw_stack(axis: Any, figure: Figure, runs: list[Run], run: int | None) -> None:
    labels = _labels(figure)
    series = figure.runs[run or 0]
    colours = [COLOURS[labels.index(s.label) % len(COLOURS)] for s in series]
    values = [[value or 0.0 for value in s.y] for s in series]
    if len(series[0].x) <= 60:
        bottom = [0.0] * len(series[0].x)
        for s, heights, colour in zip(series, values, colours, strict=True):
            axis.bar(series[0].x, heights, bottom=bottom, color=colour, width=0.8, label=s.label)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    else:
        axis.stackplot(series[0].x, values, colors=colours, labels=[s.label for s in series])
    _add_legend(axis)


def _add_legend(axis: Any) -> None:
    """Below the axis, where it covers nothing."""
    axis.legend(frameon=False, fontsize=8, handlelength=2.8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def _style(axis: Any, figure: Figure, suffix: str) -> None:
    unit = {"percent": " (%)", "seconds": " (s)", "rate": " (1/s)"}.get(figure.format, "")
    axis.set_title(f"{figure.title}{unit}{suffix}", loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(which="both", labelsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.grid(axis="y", color="#e3e7ec", lw=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: curves.png in the first RUN_DIR")
    arguments = parser.parse_args()
    output = arguments.output or Path(arguments.runs[0], "curves.png")
    try:
        draw(load_runs(arguments.runs)).savefig(output)
    except (UserError, OSError) as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
