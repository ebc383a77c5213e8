"""What the curriculum saves: wasted tokens and learning, with and without it, on prompts of mixed difficulty.

    python benchmarks/curriculum.py [--steps 40] [--seeds 3]

The quickstart's model and recipe on the CPU. Half of the prompts are learnable: two digits and one, of which the model
knows a third at first and nearly all at the end, when their groups are all right. The other half are hopeless: three
terms, which the model has never seen, so their groups are all wrong. All runs start from one model. Seeds differ in the
order of the prompts and in the samples, the two runs of a seed in `data.curriculum.enabled` only.
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
from megatron_dapo.observe.metric_names import filter_yield
from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
LEARNABLE, HOPELESS = 2, 6  # levels of data/arithmetic.py
PROMPTS_PER_LEVEL = 100
LAST = 10  # steps that the figures are means of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{args.steps} steps; wasted tokens, yield and passed over are of the last {LAST}")
    print("| seed | curriculum | wasted tokens | yield (predicted) | generated tokens | passed over | avg@4 |")
    print("|---|---|---|---|---|---|---|")
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for seed in range(args.seeds):
            for enabled in (False, True):
                figures = train(Path(folder), seed, enabled, args.steps)
                found[enabled].append(figures)
                print(row(str(seed), enabled, figures), flush=True)
    for enabled, runs in found.items():
        print(row("mean", enabled, {name: fmean(run[name] for run in runs) for name in runs[0]}))
    off, on = (fmean(run["wasted"] for run in runs) for runs in (found[False], found[True]))
    tokens = fmean(run["tokens"] for run in found[True]) / fmean(run["tokens"] for run in found[False])
    print(f"\nwasted share of tokens {off:.1%} → {on:.1%}; tokens for the same {args.steps} batches × {tokens:.2f}")


def prepare(folder: Path) -> None:
    """The quickstart's model and the files."""
    runpy.run_path(str(QUICKSTART / "quickstart.py"))["make_model"](folder / "model", seed=0)
    mixed = [p for level in (LEARNABLE, HOPELESS) for p in arithmetic_problems(level, PROMPTS_PER_LEVEL, seed=0)]
    write_arithmetic(folder / "prompts.jsonl", mixed)
    write_arithmetic(folder / "held_out.jsonl", arithmetic_problems(LEARNABLE, 60, seed=0, split="held-out"))


def train(folder: Path, seed: int, enabled: bool, steps: int) -> dict[str, float]:
    run_dir = folder / f"seed-{seed}-{'on' if enabled else 'off'}"
    settings = [
        f"policy.model={folder / 'model'}", f"data.path={folder / 'prompts.jsonl'}", f"trainer.run_dir={run_dir}",
        f"evaluate.data.path={folder / 'held_out.jsonl'}", f"evaluate.every={steps}", f"trainer.steps={steps}",
        f"trainer.seed={seed}", "observe.console=off", "trainer.checkpoint.every=0",
        "trainer.prompts_per_step=16", "trainer.mini_batch_prompts=8", "evaluate.samples=4",
        f"data.curriculum.enabled={str(enabled).lower()}",
    ]  # fmt: skip
    run_training(load_config(QUICKSTART / "config.yaml", settings))
    records = read_records(run_dir / "metrics.jsonl")
    trained = [record.metrics for record in records if record.kind == "step"]
    scores = [record.metrics["eval/avg@4"] for record in records if record.kind == "eval"]
    last = trained[-LAST:]
    return {
        "wasted": sum(m["rollout/wasted_tokens"] for m in last) / sum(m["rollout/response_tokens"] for m in last),
        "yield": fmean(filter_yield(m) or 0.0 for m in last),
        "predicted": fmean(m.get("data/predicted_yield", 0.0) for m in last),
        "tokens": sum(m["rollout/response_tokens"] for m in trained),
        "passed over": fmean(m.get("data/passed_over_share", 0.0) for m in last),
        "before": scores[0],
        "after": scores[-1],
    }


def row(seed: str, enabled: bool, figures: dict[str, float]) -> str:
    predicted = f" ({figures['predicted']:.0%})" if enabled else ""
    cells = [
        seed, "on" if enabled else "off", f"{figures['wasted']:.1%}", f"{figures['yield']:.0%}{predicted}",
        f"{figures['tokens']:,.0f}", f"{figures['passed over']:.0%}",
        f"{figures['before']:.1%} → {figures['after']:.1%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
