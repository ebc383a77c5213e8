"""Published methods on one task with equal steps and several seeds: held-out curves, a table, and a figure with bands.

    make quickstart                                          # creates the model and the prompts
    python benchmarks/presets.py --out DIR --set policy.model=runs/quickstart/start \\
        data.path=runs/quickstart/prompts.jsonl evaluate.data.path=runs/quickstart/held_out.jsonl trainer.steps=35

Runs `megatron-dapo train` with the configuration (the quickstart's, unless --config names another), without its section
`algorithm` and with each `algorithm.preset`; --jobs at a time. All train on the same number of responses; DAPO
generates more, because it replaces groups without a signal. A run that has finished is not repeated. DIR/presets.jsonl
has every curve; --figure FILE draws mean and range of the seeds (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megatron_dapo.observe.metrics_file import read_records

QUICKSTART = Path(__file__).resolve().parents[1] / "examples/quickstart/config.yaml"
PRESETS = ["dapo", "grpo", "dr-grpo", "gspo", "cispo"]


def run(preset: str, seed: int, raw: dict[str, Any], settings: list[str], out: Path) -> dict[str, Any]:
    folder = out / f"{preset}_{seed}"
    file = folder / "curve.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "preset.yaml"
        config.write_text(yaml.safe_dump({**raw, "algorithm": {"preset": preset}}))
        own = [f"trainer.seed={seed}", f"trainer.run_dir={folder / 'run'}", "trainer.checkpoint.at_end=false"]
        sets = [word for item in (*settings, "observe.console=plain", *own) for word in ("--set", item)]
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo", "train", str(config), *sets]
            subprocess.run(command, stdout=log, stderr=log, check=True)
        file.write_text(json.dumps({"preset": preset, "seed": seed, **curve(folder / "run")}))
        print(f"{preset}, seed {seed}: {file.read_text()}", flush=True)
    return json.loads(file.read_text())


def curve(folder: Path) -> dict[str, Any]:
    records = read_records(folder / "metrics.jsonl")
    scores = {
        r.step: next(v for k, v in r.metrics.items() if k.startswith("eval/avg@")) for r in records if r.kind == "eval"
    }
    generated = sum(r.metrics["rollout/samples_submitted"] for r in records if r.kind == "step")
    trained = sum(r.metrics["rollout/samples_trained"] for r in records if r.kind == "step")
    return {"held_out": scores, "trained": trained, "generated": generated}


def table(curves: list[dict[str, Any]]) -> str:
    steps = sorted({int(step) for found in curves for step in found["held_out"]})
    lines = ["| preset | seeds | generated | " + " | ".join(f"step {step}" for step in steps) + " |"]
    lines += ["|---" * (len(steps) + 3) + "|"]
    for preset in dict.fromkeys(found["preset"] for found in curves):
        mine = [found for found in curves if found["preset"] == preset]
        cells = [spread([100 * found["held_out"][str(step)] for found in mine]) for step in steps]
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
    for preset in dict.fromkeys(found["preset"] for found in curves):
        mine = [found["held_out"] for found in curves if found["preset"] == preset]
        steps = sorted(map(int, mine[0]))
        values = [[100 * found[str(step)] for found in mine] for step in steps]
        (line,) = axes.plot(steps, [fmean(v) for v in values], label=preset, linewidth=1.8)
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="held-out accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings")
    args = parser.parse_args()
    raw = yaml.safe_load(args.config.read_text())
    jobs = [(preset, seed) for seed in range(args.seeds) for preset in args.presets]
    with ThreadPoolExecutor(args.jobs) as pool:
        curves = list(pool.map(lambda job: run(job[0], job[1], raw, args.settings, args.out.resolve()), jobs))
    curves.sort(key=lambda found: (args.presets.index(found["preset"]), found["seed"]))
    (args.out / "presets.jsonl").write_text("".join(json.dumps(found) + "\n" for found in curves))
    print(table(curves))
    if args.figure:
        draw(curves, args.figure)


if __name__ == "__main__":
    main()
