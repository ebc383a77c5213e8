"""The learning curve of GSM8K runs, as a figure: strict accuracy with its 95 % interval, lenient accuracy beside it.

    python benchmarks/gsm8k_figure.py RUN_DIR [RUN_DIR …] --output docs/images/gsm8k.png
    python benchmarks/gsm8k_figure.py benchmarks/data/gsm8k_h200_{60,70}_steps.jsonl --output docs/images/gsm8k.png \
        --labels "engine and trainer take turns" "generating during updates"

A file instead of a run directory has the run's evaluation records, one JSON object a line, as in metrics.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_dapo.observe.metrics_file import read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="of the runs (default: their names)")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run, label in zip(args.runs, args.labels or [run.stem for run in args.runs], strict=True):
        records = read_records(run / "metrics.jsonl" if run.is_dir() else run)
        found = [(r.step, r.metrics) for r in records if "eval/avg@1" in r.metrics]
        steps = [step for step, _ in found]
        strict, low, high, lenient = (
            [100 * metrics[f"eval/{name}"] for _, metrics in found]
            for name in ("avg@1", "avg@1_low", "avg@1_high", "lenient@1")
        )
        (line,) = axes.plot(steps, strict, marker="o", markersize=4, label=f"{label}: strict, 95 % interval")
        axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
        axes.plot(steps, lenient, linestyle="--", color=line.get_color(), label="lenient (last number)")
    axes.set(xlabel="rollout step", ylabel="greedy accuracy on the 1319 test problems, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(args.output, dpi=130)


if __name__ == "__main__":
    main()
