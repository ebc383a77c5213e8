"""What the loop itself costs: everything outside generation, grading, log-probs and the update, as a share of a step.

    python benchmarks/loop.py [--steps 12]

Runs the quickstart's configuration (a model of 0.3 M parameters on the CPU, where every millisecond of overhead shows;
a 32B step is a thousand times longer) without its warm-up, and prints the seconds of each phase beside the limit.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import torch

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_problems, write_arithmetic
from megatron_dapo.launch.local import run_training
from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
WORK = ("rollout", "log_probs", "update")  # grading runs inside the rollout, beside generation
OCCASIONAL = ("checkpoint", "evaluate")  # as rare as one likes
LIMIT = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    quickstart = runpy.run_path(str(QUICKSTART / "quickstart.py"))
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        quickstart["make_model"](model, seed=0, updates=1)
        write_arithmetic(prompts, arithmetic_problems(2, 700, seed=0))
        settings = [
            f"policy.model={model}", f"data.path={prompts}", f"trainer.run_dir={folder}/run", "evaluate.every=0",
            f"trainer.steps={args.steps}", "rollout.dynamic_sampling=false", "observe.console=off",
        ]  # fmt: skip
        run_training(load_config(QUICKSTART / "config.yaml", settings))
        seconds: dict[str, float] = defaultdict(float)
        for record in read_records(Path(folder) / "run" / "metrics.jsonl")[2:]:  # the first steps warm up
            for name, value in record.metrics.items():
                if name.startswith("time/") and "per_second" not in name:
                    seconds[name.removeprefix("time/")] += value
    step = seconds.pop("step") - sum(seconds.pop(name, 0.0) for name in OCCASIONAL)
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:<12} {value:8.2f} s  {value / step:6.1%}{'' if name in WORK else '   overhead'}")
    overhead = sum(value for name, value in seconds.items() if name not in WORK) / step
    print(f"overhead     {overhead:.1%} of a step (limit {LIMIT:.0%})")


if __name__ == "__main__":
    main()
