"""Overlong handling in its parts, on the task examples/ablations/truncated.yaml: which part changes the score, and how.

    python examples/ablations/make_tasks.py
    python benchmarks/overlong.py --out runs/overlong --seeds 5        # 75 runs of 10 to 30 s, one after the other

The parts are filter, penalty, both, and neither, with and without dynamic sampling; a penalty of 0.01; the filter with
`algorithm.overlong.group_statistics: in_loss`; and a change that exists only here, to find the cause: no advantages in
groups without a right response. With the task's limit of 18 tokens a sum with 3 is cut after its answer, before the
end of text, and graded right; with 17 it is cut in its answer. The evaluation has 8 samples per prompt instead of 2.

The table has, for each part, the held-out score and its difference from neither (pairs of one seed, 95 % intervals).
Then how often held-out prompts whose counting is cut in training are answered by counting. Then the mean advantages of
responses in trained groups with a truncated one, before the filter. The same command continues.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from megatron_dapo.arguments import quiet_libraries
from megatron_dapo.config import Config, load_config
from megatron_dapo.evaluate.statistics import mean_interval
from megatron_dapo.launch.local import import_trainer, run_training
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.trainer import advantages, train_step
from megatron_dapo.types import StepBatch

CONFIG = Path(__file__).resolve().parent.parent / "examples/ablations/truncated.yaml"
LONGEST_DIRECT = 11  # tokens of a response without counting
LARGEST_THAT_FITS = 2  # the second number of a sum: counting further is cut


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    filter: bool
    penalty: bool
    dynamic_sampling: bool = False
    factor: float = 0.2
    limit: int = 18  # rollout.max_response_tokens
    statistics: str = "all"  # algorithm.overlong.group_statistics
    skip_all_wrong: bool = False  # no advantages in groups without a right response

    @property
    def folder(self) -> str:
        sampling = "+dynamic_sampling" if self.dynamic_sampling else ""
        return f"{self.name.replace(', ', '+').replace(' ', '_')}+{self.limit}{sampling}"

    @property
    def settings(self) -> list[str]:
        return [
            f"algorithm.overlong.filter={str(self.filter).lower()}",
            f"algorithm.overlong.penalty={'soft' if self.penalty else 'none'}",
            f"algorithm.overlong.factor={self.factor}",
            f"algorithm.overlong.group_statistics={self.statistics}",
            f"rollout.max_response_tokens={self.limit}",
            f"rollout.dynamic_sampling={str(self.dynamic_sampling).lower()}",
        ]


CLASSES = ("right", "wrong", "truncated_right", "truncated_wrong")  # of responses
FOUR = (("neither", False, False), ("filter", True, False), ("penalty", False, True), ("both", True, True))
PARTS = [
    *(Part(*names) for names in FOUR),
    Part("both, penalty 0.01", True, True, factor=0.01),
    Part("both, no advantages in all-wrong groups", True, True, skip_all_wrong=True),
    *(Part(*names, limit=17) for names in FOUR),
    Part("filter, truncated not in the statistics", True, False, limit=17, statistics="in_loss"),
    *(Part(*names, dynamic_sampling=True) for names in FOUR),
]
FIRST = PARTS[0]
HEADER = (
    "| limit | dynamic sampling | part | held-out score | difference from neither | counting where it was cut "
    "| advantage: right | wrong | truncated, right | truncated, wrong | in all-wrong groups |"
)


def observe(part: Part, record: Path) -> None:
    """Changes the advantages of this process as the part says, and appends those of each class to `record`."""
    shape, group_advantages = train_step.shape_batch, advantages.group_advantages
    current: dict[str, torch.Tensor] = {}

    def changed(rewards: torch.Tensor, groups: torch.Tensor, **options: Any) -> torch.Tensor:
        found = group_advantages(rewards, groups, **options)
        return torch.where(current["all_wrong"], 0.0, found) if part.skip_all_wrong else found

    def recorded(batch: StepBatch, config: Config) -> tuple[TrainBatch, dict[str, float]]:
        # One sample per rollout here, so samples and rollouts are the same.
        sizes = [len(group.samples) for group in batch.groups]
        truncated = np.array([sample.truncated for sample in batch.samples])
        all_wrong = np.repeat([not any(group.accuracies) for group in batch.groups], sizes)
        current["all_wrong"] = torch.from_numpy(all_wrong)
        shaped, metrics = shape(batch, config)
        with_truncated = np.repeat([any(s.truncated for s in group.samples) for group in batch.groups], sizes)
        right = np.array([bool(s.grade and s.grade.correct) for s in batch.samples])
        classes = {
            "right": right & ~truncated, "wrong": ~right & ~truncated,
            "truncated_right": right & truncated, "truncated_wrong": ~right & truncated,
        }  # fmt: skip
        line: dict[str, Any] = {
            name: shaped.advantages[chosen & with_truncated].tolist() for name, chosen in classes.items()
        }
        line["all_wrong"] = all_wrong[with_truncated].tolist()
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return shaped, metrics

    advantages.group_advantages, train_step.shape_batch = changed, recorded  # type: ignore[assignment]


def train(part: Part, seed: int, folder: Path, settings: Sequence[str]) -> None:
    """In a process of its own; output goes to a log."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    record = folder / "advantages.jsonl"
    record.unlink(missing_ok=True)
    observe(part, record)
    own = ["observe.console=plain", "observe.report=false", "trainer.checkpoint.at_end=false", "evaluate.samples=8"]
    config = load_config(
        str(CONFIG), [*settings, *part.settings, *own, f"trainer.seed={seed}", f"trainer.run_dir={folder}"]
    )
    code = run_training(config)
    if code == 0:
        (folder / "result.json").write_text(json.dumps(result(folder, config.trainer.steps)) + "\n")
    sys.exit(code)


def evaluation(folder: Path, step: int) -> dict[str, float | None]:
    """The held-out score, how often counting is chosen where training cuts it, and how often each kind is right."""
    problems = json.loads((folder / f"evaluations/step_{step}/results.json").read_text())["problems"]
    responses = [(int(p["question"].rstrip("=").split("+")[1]), r) for p in problems for r in p["responses"]]
    right: dict[bool, list[bool]] = {False: [], True: []}  # by whether the response counts
    for _, response in responses:
        right[response["tokens"] > LONGEST_DIRECT].append(bool(response["correct"]))
    return {
        "score": fmean(right[False] + right[True]),
        "counting": fmean(r["tokens"] > LONGEST_DIRECT for number, r in responses if number > LARGEST_THAT_FITS),
        "right_direct": fmean(right[False]) if right[False] else None,
        "right_counting": fmean(right[True]) if right[True] else None,
    }


def result(folder: Path, steps: int) -> dict[str, float | None]:
    found = evaluation(folder, steps)
    lines = [json.loads(line) for line in (folder / "advantages.jsonl").read_text().splitlines()]
    for name in (*CLASSES, "all_wrong"):
        values = [value for line in lines for value in line[name]]
        found[name] = fmean(values) if values else None
    return found


def show(out: Path, seeds: int) -> None:
    results = {
        part: {
            seed: json.loads(file.read_text())
            for seed in range(seeds)
            if (file := out / part.folder / f"seed_{seed}" / "result.json").exists()
        }
        for part in PARTS
    }
    print(HEADER + "\n|" + "---|" * (HEADER.count("|") - 1))
    for part, runs in sorted(results.items(), key=lambda item: (-item[0].limit, item[0].dynamic_sampling)):
        if not runs:
            continue
        base = results[replace(FIRST, dynamic_sampling=part.dynamic_sampling, limit=part.limit)]
        differences = [runs[seed]["score"] - base[seed]["score"] for seed in runs if seed in base]
        interval = mean_interval(differences, 0.95) if part.name != "neither" else None
        shown = "–" if interval is None else f"{fmean(differences):.1%} [{interval[0]:.1%}, {interval[1]:.1%}]"

        def mean(name: str, form: str, runs: dict[int, dict[str, float | None]] = runs) -> str:
            known = [value for run in runs.values() if (value := run[name]) is not None]
            return format(fmean(known), form) if known else "–"

        cells = [
            str(part.limit), "on" if part.dynamic_sampling else "off", part.name,
            f"{mean('score', '.1%')} ({len(runs)} seeds)", shown, mean("counting", ".1%"),
            *(mean(name, ".2f") for name in CLASSES), mean("all_wrong", ".1%"),
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    starts = [
        evaluation(folder, 0) for folder in (out / FIRST.folder).glob("seed_*") if (folder / "result.json").exists()
    ]
    kinds = {"without counting": "right_direct", "with counting": "right_counting"}
    for kind, name in kinds.items():
        known = [value for start in starts if (value := start[name]) is not None]
        if known:
            print(f"\nBefore training, held-out responses {kind} are right in {fmean(known):.1%}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    import_trainer(driver=True)
    gc.freeze()
    failed = 0
    for seed in range(args.seeds):
        for part in PARTS:
            folder = args.out / part.folder / f"seed_{seed}"
            if (folder / "result.json").exists():
                continue
            run = multiprocessing.get_context("fork").Process(target=train, args=(part, seed, folder, args.set))
            run.start()
            run.join()
            if run.exitcode:
                failed += 1
                print(f"{folder}: ended with code {run.exitcode}, see train.log", file=sys.stderr)
    show(args.out, args.seeds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
