"""Published methods on one task with equal steps and several seeds: held-out curves, a table, and a figure with bands.

    make quickstart                                          # creates the model and the prompts
    python benchmarks/presets.py --out DIR --set policy.model=runs/quickstart/start \\
        data.path=runs/quickstart/prompts.jsonl evaluate.data.path=runs/quickstart/held_out.jsonl trainer.steps=35

Trains the configuration (the quickstart's, unless --config names another) without its section `algorithm` and with each
`algorithm.preset`, as `megatron-dapo ablate` trains its combinations: --jobs at a time, and none twice. All train on
the same number of responses; DAPO generates more, because it replaces groups without a signal. DIR/presets.jsonl has
every curve; --figure FILE draws mean and range of the seeds (needs matplotlib). With `--share` one SGLang server serves
all runs, one after the other, as in ablation.py; arguments after `--` go to it:

    python benchmarks/presets.py --config examples/ablations/gsm8k.yaml --set policy.model=MODEL --share 0.25 --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from ablation import split_arguments, started_server

from megatron_dapo.ablation.results import load_results
from megatron_dapo.ablation.runs import Job, run_jobs
from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parents[1] / "examples/quickstart/config.yaml"
PRESETS = ["dapo", "grpo", "dr-grpo", "gspo", "cispo"]


def curve(job: Job) -> dict[str, Any]:
    runs, _ = load_results(job.task, [job.combination], [job.seed])
    scores = runs[job.combination][job.seed]["held_out"]
    metrics = [r.metrics for r in read_records(job.folder / "metrics.jsonl") if r.kind == "step"]
    return {
        "preset": job.combination, "seed": job.seed, "held_out": dict(zip(scores["x"], scores["y"], strict=True)),
        "trained": sum(m["rollout/samples_trained"] for m in metrics),
        "generated": sum(m["rollout/samples_submitted"] for m in metrics),
    }  # fmt: skip


def by_preset(curves: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [c for c in curves if c["preset"] == name] for name in dict.fromkeys(c["preset"] for c in curves)}


def table(curves: list[dict[str, Any]]) -> str:
    steps = list(curves[0]["held_out"])
    lines = ["| preset | seeds | generated | " + " | ".join(f"step {step}" for step in steps) + " |"]
    lines += ["|---" * (len(steps) + 3) + "|"]
    for preset, mine in by_preset(curves).items():
        cells = [spread([100 * found["held_out"][step] for found in mine]) for step in steps]
        generated = fmean(found["generated"] for found in mine)
        lines.append(f"| {preset} | {len(mine)} | {generated:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def draw(curves: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for preset, mine in by_preset(curves).items():
        steps = list(mine[0]["held_out"])
        values = [[100 * found["held_out"][step] for found in mine] for step in steps]
        (line,) = axes.plot(steps, [fmean(v) for v in values], label=preset, linewidth=1.8)
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
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--share", type=float, help="of the GPU memory, for one server of all runs; --jobs is then 1")
    own, server_arguments = split_arguments()
    args = parser.parse_args(own)
    if server_arguments and args.share is None:
        parser.error("arguments after -- are for the server of --share")
    out, raw = args.out.resolve(), yaml.safe_load(args.config.read_text())
    out.mkdir(parents=True, exist_ok=True)
    task = out / "task.yaml"
    task.write_text(yaml.safe_dump({section: keys for section, keys in raw.items() if section != "algorithm"}))
    server: AbstractContextManager[list[str]] = nullcontext([])
    if args.share is not None:
        server = started_server(str(task), args.settings, args.share, server_arguments, out / "server")
    with server as served:
        jobs = [
            Job(str(task), (*args.settings, *served, f"algorithm.preset={preset}"), out, preset, seed)
            for seed in range(args.seeds)
            for preset in args.presets
        ]
        at_a_time = args.jobs if args.share is None else 1
        outcomes = run_jobs(jobs, at_a_time, lambda outcome: print(outcome.job, outcome.problem or "done", flush=True))
    if any(outcome.problem for outcome in outcomes):
        return 1
    curves = [curve(job) for job in sorted(jobs, key=lambda job: args.presets.index(job.combination))]
    (out / "presets.jsonl").write_text("".join(json.dumps(found) + "\n" for found in curves))
    print(table(curves))
    if args.figure:
        draw(curves, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
