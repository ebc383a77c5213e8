"""What staleness costs in learning: the quickstart's curve with batches that are k weight versions old.

    python benchmarks/staleness.py [--steps 60] [--seeds 3] [--corrected] [--run "k = 4"] [--seed 2]

The quickstart's model, task and recipe on the CPU, evaluated on held-out problems every ten steps. k = 0 is on-policy.
With k > 0 and `rollout.weights.in_flight: false` every token of batch N comes from version N − k: the oldest that
`rollout.max_staleness: k` allows, so this is the worst case of each k. --corrected adds k = 4 with importance weights
(the decoupled objective), with the ratio of the objective taken to the engine's log-probs, and with masks: tokens, or
responses by their geometric mean, whose weight is outside 0.5 to 2. --run and --seed choose single runs. Each seed has
its own model; its runs differ in nothing else.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import warnings
from pathlib import Path
from statistics import fmean

import torch

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_problems, write_arithmetic
from megatron_dapo.launch.local import run_training
from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
EVERY = 10
# Timing must not change a batch: the runs of a seed start with the same samples.
REPEATABLE = ["rollout.sampler.oversampling=1", "rollout.sampler.order=prompt", "rollout.sampler.unfinished=finish"]
RUNS = {
    "k = 0": [],
    "k = 1": ["rollout.max_staleness=1"],
    "k = 4": ["rollout.max_staleness=4"],
}
CORRECTED = {
    "k = 4, importance weights": ["rollout.max_staleness=4", "algorithm.off_policy.importance_weight=token"],
    "k = 4, ratio to the engine": ["rollout.max_staleness=4", "trainer.old_logprobs=engine"],
    "k = 4, token mask": ["rollout.max_staleness=4", "algorithm.off_policy.token_mask=[0.5, 2.0]"],
    "k = 4, response mask": ["rollout.max_staleness=4", "algorithm.off_policy.geometric_mask=[0.5, 2.0]"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--corrected", action="store_true")
    parser.add_argument("--run", action="append", choices=[*RUNS, *CORRECTED], help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="only this one")
    args = parser.parse_args()
    known = RUNS | CORRECTED
    all_runs = {name: known[name] for name in args.run or (known if args.corrected else RUNS)}
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    steps = range(0, args.steps + 1, EVERY)
    print(f"| run | seed | {' | '.join(f'step {step}' for step in steps)} | staleness | mismatch_kl | clipped |")
    print(f"|---|---|{'---|' * (len(steps) + 3)}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in all_runs}
    for seed in range(args.seeds) if args.seed is None else [args.seed]:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), seed)
            for name, settings in all_runs.items():
                figures = train(Path(folder), name, seed, args.steps, settings)
                found[name].append(figures)
                print(row(name, str(seed), figures), flush=True)
    for name, runs in found.items():
        print(row(name, "mean", {key: fmean(run[key] for run in runs) for key in runs[0]}))


def prepare(folder: Path, seed: int) -> None:
    """The quickstart's model and files for one seed."""
    quickstart = runpy.run_path(str(QUICKSTART / "quickstart.py"))
    level = quickstart["LEVEL"]
    write_arithmetic(folder / "prompts.jsonl", arithmetic_problems(level, 700, seed=0))
    write_arithmetic(folder / "held_out.jsonl", arithmetic_problems(level, 100, seed=0, split="held-out"))
    quickstart["make_model"](folder / "model", seed)


def train(folder: Path, name: str, seed: int, steps: int, settings: list[str]) -> dict[str, float]:
    run_dir = folder / name
    common = [
        f"policy.model={folder / 'model'}", f"data.path={folder / 'prompts.jsonl'}", f"trainer.run_dir={run_dir}",
        f"evaluate.data.path={folder / 'held_out.jsonl'}", f"evaluate.every={EVERY}", f"trainer.steps={steps}",
        f"trainer.seed={seed}", "observe.console=off", "trainer.checkpoint.every=0", "rollout.weights.in_flight=false",
    ]  # fmt: skip
    run_training(load_config(QUICKSTART / "config.yaml", [*common, *REPEATABLE, *settings]))
    records = read_records(run_dir / "metrics.jsonl")
    trained = [record.metrics for record in records if record.kind == "step"]
    curve = {f"step {r.step}": r.metrics["eval/avg@8"] for r in records if r.kind == "eval"}
    return curve | {
        "staleness": max(m["rollout/staleness_max"] for m in trained),
        "mismatch": fmean(m["train/mismatch_kl"] for m in trained if "train/mismatch_kl" in m),
        "clipped": fmean(m["train/clip_fraction_high"] + m["train/clip_fraction_low"] for m in trained),
    }


def row(name: str, seed: str, figures: dict[str, float]) -> str:
    curve = [f"{value:.1%}" for key, value in figures.items() if key.startswith("step")]
    rest = [f"{figures['staleness']:.0f}", f"{figures['mismatch']:.1e}", f"{figures['clipped']:.1%}"]
    return f"| {' | '.join([name, seed, *curve, *rest])} |"


if __name__ == "__main__":
    main()
