"""Published methods on one task with equal steps and several seeds: held-out curves, a table, and a figure with bands.

    make quickstart                                          # creates the model and the prompts
    python benchmarks/presets.py --out DIR --set policy.model=runs/quickstart/start \\
        data.path=runs/quickstart/prompts.jsonl evaluate.data.path=runs/quickstart/held_out.jsonl trainer.steps=35

Trains the configuration (the quickstart's, unless --config names another) without its section `algorithm` and with
each `algorithm.preset`, as `megatron-dapo ablate` trains its combinations: --jobs at a time, and none twice. The preset
`own` stands for the configuration's own section. All train on the same number of responses; DAPO generates more,
because it replaces groups without a signal. With `--share` one SGLang server serves all runs, one after the other, as
in ablation.py; arguments after `--` go to it:

    python benchmarks/presets.py --config examples/ablations/gsm8k.yaml --set policy.model=MODEL --share 0.25 --out DIR

DIR/presets.jsonl has every curve. `--draw FILE …` trains nothing: it prints the table of such files and draws their
mean and range over the seeds (needs matplotlib). `--rows` chooses and names their runs:

    python benchmarks/presets.py --draw benchmarks/data/gsm8k_ablation.jsonl --figure docs/images/presets_gsm8k.png \\
        --rows dapo=switches/clip_higher+dynamic_sampling+token_loss+overlong \\
               presets/vapo presets/grpo presets/gspo presets/cispo
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from ablation import split_arguments, started_server

from megatron_dapo.ablation.runs import Job, Outcome, run_jobs
from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parents[1] / "examples/quickstart/config.yaml"
PRESETS = ["dapo", "grpo", "dr-grpo", "gspo", "cispo"]
OWN = "own"

Row = dict[str, Any]  # of a JSON-lines file: one run


def curves_of(job: Job) -> Row:
    found = json.loads(job.result_file.read_text())
    metrics = [r.metrics for r in read_records(job.folder / "metrics.jsonl") if r.kind == "step"]
    return {
        "task": job.task.name, "combination": job.combination, "seed": job.seed, "seconds": found["seconds"],
        "trained": sum(m["rollout/samples_trained"] for m in metrics),
        "generated": sum(m["rollout/samples_submitted"] for m in metrics), "curves": found["curves"],
    }  # fmt: skip


def held_out(row: Row) -> dict[int, float]:
    """In percent, by the number of steps that have trained the policy; not those that trained its critic alone."""
    curves = row["curves"]
    before = curves["entropy"]["x"][0] - 1 if "entropy" in curves else 0
    return {step - before: 100 * y for step, y in zip(*curves["held_out"].values(), strict=True) if step >= before}


def by_name(rows: list[Row], wanted: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of each name. `wanted`: [NAME=]TASK/COMBINATION; without any, all under TASK/COMBINATION."""
    names = {item.rpartition("=")[0] or short(item): item.rpartition("=")[2] for item in wanted}
    found = {name: [row for row in rows if label(row) == key] for name, key in names.items()}
    if missing := [names[name] for name, chosen in found.items() if not chosen]:
        raise SystemExit(f"no run of {', '.join(missing)}; there are {', '.join(sorted(set(map(label, rows))))}")
    return found or {key: [row for row in rows if label(row) == key] for key in dict.fromkeys(map(label, rows))}


def short(item: str) -> str:
    task, _, combination = item.partition("/")
    return task if combination == OWN else combination


def label(row: Row) -> str:
    return f"{row['task']}/{row['combination']}"


def scores_of(rows: list[Row]) -> dict[int, list[float]]:
    """By step, of the seeds that have reached it."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for step, score in held_out(row).items():
            found.setdefault(step, []).append(score)
    return dict(sorted(found.items()))


def table(named: dict[str, list[Row]]) -> str:
    scores = {name: scores_of(rows) for name, rows in named.items()}
    steps = sorted({step for found in scores.values() for step in found})
    lines = ["| run | seeds | trained | generated | " + " | ".join(f"step {step}" for step in steps) + " |"]
    lines += ["|---" * (len(steps) + 4) + "|"]
    for name, rows in named.items():
        cells = [spread(scores[name][step]) if step in scores[name] else "" for step in steps]
        known = [[row[key] for row in rows if key in row] for key in ("trained", "generated")]
        means = [f"{fmean(counts):,.0f}" if counts else "" for counts in known]
        lines.append("| " + " | ".join([name, str(len(rows)), *means, *cells]) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def draw(named: dict[str, list[Row]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, rows in named.items():
        scores = scores_of(rows)
        steps, values = list(scores), scores.values()
        (line,) = axes.plot(steps, [fmean(v) for v in values], label=name, linewidth=1.8)
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="held-out accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="of the runs; needed without --draw")
    parser.add_argument("--draw", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--rows", nargs="+", default=[], metavar="[NAME=]TASK/COMBINATION")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--share", type=float, help="of the GPU memory, for one server of all runs; --jobs is then 1")
    own, server_arguments = split_arguments()
    args = parser.parse_args(own)
    if server_arguments and args.share is None:
        parser.error("arguments after -- are for the server of --share")
    if (args.out is None) == (not args.draw):
        parser.error("name --out or --draw")
    rows = [json.loads(line) for file in args.draw for line in file.read_text().splitlines()]
    if args.out is not None:
        jobs, outcomes = train(args, server_arguments)
        if any(outcome.problem for outcome in outcomes):
            return 1
        rows = [curves_of(job) for job in sorted(jobs, key=lambda job: args.presets.index(job.combination))]
        (args.out / "presets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = by_name(rows, args.rows)
    print(table(named))
    if args.figure:
        draw(named, args.figure)
    return 0


def train(args: argparse.Namespace, server_arguments: list[str]) -> tuple[list[Job], list[Outcome]]:
    out, raw = args.out.resolve(), yaml.safe_load(args.config.read_text())
    out.mkdir(parents=True, exist_ok=True)
    own, preset = out / "own.yaml", out / "preset.yaml"
    own.write_text(yaml.safe_dump(raw))
    preset.write_text(yaml.safe_dump({section: keys for section, keys in raw.items() if section != "algorithm"}))
    files = {name: (own, ()) if name == OWN else (preset, (f"algorithm.preset={name}",)) for name in args.presets}
    server: AbstractContextManager[list[str]] = nullcontext([])
    if args.share is not None:
        server = started_server(str(own), args.settings, args.share, server_arguments, out / "server")
    with server as served:
        jobs = [
            Job(str(file), (*args.settings, *served, *own_settings), out, name, seed)
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for name, (file, own_settings) in files.items()
        ]
        at_a_time = args.jobs if args.share is None else 1
        return jobs, run_jobs(jobs, at_a_time, lambda found: print(found.job, found.problem or "done", flush=True))


if __name__ == "__main__":
    sys.exit(main())
