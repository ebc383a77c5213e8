"""The same DAPO run with TRL's GRPOTrainer and with megatron-dapo: CPU time, tokens, held-out score, lines to write.

    python -m venv trl && trl/bin/pip install torch==2.13.0
    echo torch==2.13.0 > pins && trl/bin/pip install -c pins trl==1.16.0 transformers==5.22.2 numpy
    TRL_PYTHON=trl/bin/python python benchmarks/peers/compare_trl.py [--steps 60] [--seeds 3]

Both train the quickstart's model on its prompts, on the CPU with one thread: 32 prompts × 8 samples a step, two
updates of 128 samples, fp32, AdamW with the same settings, clip 0.2 and 0.28, token-level loss, no KL term,
temperature 1, responses of up to 8 tokens. Both results are HF directories, and our evaluation scores them: avg@8 on
100 held-out problems. Each is run as a user would: one process, timed from outside with its imports. A run of two
steps is subtracted from that to get the CPU time of a step.

What differs. TRL has no dynamic sampling: groups that are all right or all wrong stay in its batch, so ours is also
run without it, and TRL also for as many steps as it needs to generate as many tokens as ours. TRL divides an update's
loss by half of the tokens of the generated batch, ours by the tokens of the update. TRL adds 1e-4 to a group's
standard deviation, ours 1e-6. TRL's first update has learning rate 0. The order of the prompts and the random numbers
differ. TRL generates a batch at once and pads it; our engine is `embedded`, one process with the trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import fmean

import torch

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_problems, write_arithmetic
from megatron_dapo.evaluation import run as run_evaluation
from megatron_dapo.observe.metrics_file import read_records
from megatron_dapo.weights.convert import megatron_to_hf

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[1] / "examples" / "quickstart" / "quickstart.py"
YAML, SCRIPT = HERE / "dapo.yaml", HERE / "trl_script.py"
TRL, OURS, UNFILTERED = "TRL", "megatron-dapo", "megatron-dapo, no dynamic sampling"
LONGER = "TRL, as many tokens as megatron-dapo"
SAMPLES = 32 * 8
SHORT = 2  # steps of the run that is subtracted
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="only this one")
    args = parser.parse_args()
    if "TRL_PYTHON" not in os.environ:
        parser.error("TRL_PYTHON must name the Python of an environment with TRL, see --help")
    warnings.filterwarnings("ignore")
    os.environ |= ONE_THREAD
    torch.set_num_threads(1)
    titles = "steps | held-out before → after | generated tokens | wall | CPU | CPU of a step | tokens per CPU s"
    print(f"| run | seed | {titles} |")
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[str, list[dict[str, float]]] = {TRL: [], UNFILTERED: [], OURS: [], LONGER: []}
    for seed in range(args.seeds) if args.seed is None else [args.seed]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder, seed)
            before = score(folder, folder / "model")
            for system, runs in found.items():
                steps = args.steps
                if system == LONGER:  # ours also generates the groups that dynamic sampling drops
                    steps = round(steps * found[OURS][-1]["tokens"] / found[TRL][-1]["tokens"])
                figures = measure(folder, system, seed, steps) | {"before": before}
                runs.append(figures)
                print(row(system, str(seed), figures), flush=True)
    for system, runs in found.items():
        print(row(system, "mean", {key: fmean(run[key] for run in runs) for key in runs[0]}))
    print(f"lines that a user writes: TRL {lines(SCRIPT)} ({SCRIPT.name}), megatron-dapo {lines(YAML)} ({YAML.name})")


def prepare(folder: Path, seed: int) -> None:
    """The quickstart's model and files for one seed."""
    quickstart = runpy.run_path(str(QUICKSTART))
    level = quickstart["LEVEL"]
    write_arithmetic(folder / "prompts.jsonl", arithmetic_problems(level, 700, seed=0))
    write_arithmetic(folder / "held_out.jsonl", arithmetic_problems(level, 100, seed=0, split="held-out"))
    quickstart["make_model"](folder / "model", seed)


def measure(folder: Path, system: str, seed: int, steps: int) -> dict[str, float]:
    run_dir = folder / system.replace(", ", "-").replace(" ", "-")
    _, start = timed(command(folder, system, run_dir.with_suffix(".short"), SHORT, seed))
    wall, cpu = timed(command(folder, system, run_dir, steps, seed))
    if system in (TRL, LONGER):
        trained = run_dir
        logs = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
        tokens = SAMPLES * sum(log["completions/mean_length"] for log in logs if "completions/mean_length" in log)
    else:
        trained = run_dir / "hf"
        megatron_to_hf(run_dir / "checkpoints" / f"step_{steps}", trained, reference=folder / "model")
        records = [r.metrics for r in read_records(run_dir / "metrics.jsonl") if r.kind == "step"]
        tokens = sum(m["rollout/response_tokens"] for m in records)
    of_a_step = (cpu - start) / (steps - SHORT)
    return {
        "steps": steps, "after": score(folder, trained), "tokens": tokens, "wall": wall, "cpu": cpu, "step": of_a_step,
        "speed": tokens / steps / of_a_step,
    }  # fmt: skip


def command(folder: Path, system: str, run_dir: Path, steps: int, seed: int) -> list[str]:
    model, prompts = folder / "model", folder / "prompts.jsonl"
    if system in (TRL, LONGER):
        return [os.environ["TRL_PYTHON"], str(SCRIPT), str(model), str(prompts), str(run_dir), str(steps), str(seed)]
    settings = [
        f"policy.model={model}", f"data.path={prompts}", f"trainer.run_dir={run_dir}", f"trainer.steps={steps}",
        f"trainer.seed={seed}", f"rollout.dynamic_sampling={str(system == OURS).lower()}",
    ]  # fmt: skip
    return [sys.executable, "-m", "megatron_dapo", "train", str(YAML), *settings]


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of a command with its child processes."""
    started, before = time.monotonic(), os.times()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - started, cpu


def score(folder: Path, model: Path) -> float:
    """avg@8 on the held-out problems."""
    held_out = folder / "held_out.jsonl"
    config = load_config(YAML, [f"policy.model={model}", f"evaluate.data.path={held_out}", f"data.path={held_out}"])
    out = folder / "evaluations" / model.parent.name / model.name
    with contextlib.redirect_stdout(sys.stderr):  # it prints a table of its own
        (result,) = run_evaluation(config, str(out), seed=0).results.values()
    return result.avg


def lines(path: Path) -> int:
    """Without blank lines, comments and the docstring."""
    text = path.read_text()
    if path.suffix == ".py":
        text = text.split('"""', 2)[2]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def row(system: str, seed: str, f: dict[str, float]) -> str:
    cells = [
        system, seed, f"{f['steps']:.0f}", f"{f['before']:.1%} → {f['after']:.1%}", f"{f['tokens']:,.0f}",
        f"{f['wall']:.0f} s", f"{f['cpu']:.1f} s", f"{f['step']:.2f} s", f"{f['speed']:,.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
