"""Exact resume under random kills: kill −9 at random moments, and compare every number with an undisturbed run.

    python benchmarks/kills.py [--kills 60] [--ranks 1] [--seed 0]

A tiny run of eight steps with two updates each, evaluations and a checkpoint after every step is started and killed
after a random time, again and again, until it has finished; then in a new directory, until there were enough kills.
With `--ranks 2` the run has two ranks (TP2) and the kill hits one of them, or the launcher, at random. Grading
processes are spared: their restarts are metrics. Prints the numbers that differ, which must be 0, and where the kills
fell.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from forked import records  # noqa: E402
from tiny_run import command, environment, evaluated_config, write_config  # noqa: E402

STEPS = 8
FINISHED = 0


def make_config(model: Path, run_dir: Path, ranks: int) -> Path:
    raw = evaluated_config(model, run_dir, STEPS, policy__tensor_parallel=ranks, trainer__ranks=ranks)
    run_dir.mkdir(parents=True, exist_ok=True)
    return write_config(raw, run_dir.parent / f"{run_dir.name}.yaml")


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command(config),
            env=environment(),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def kill_one(process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """The command, or one of the ranks that it has forked. Whatever is hit, everything must end."""
    launcher = psutil.Process(process.pid)
    ranks = [child for child in launcher.children() if not any("supervisor" in word for word in child.cmdline())]
    chance.choice([launcher, *ranks]).send_signal(signal.SIGKILL)
    process.wait(60)


def doing(run_dir: Path) -> str:
    """What the run was doing when it was killed, by its status file."""
    try:
        status = json.loads((run_dir / "logs" / "status.json").read_text())
        phases = [phase["name"] for phase in status.get("phases", [])]
        return phases[-1] if phases else "between phases"
    except (OSError, ValueError, KeyError):
        return "before the first phase"


def numbers(run_dir: Path) -> dict[tuple[int, str, str], Any]:
    return {(step, kind, name): value for step, kind, found in records(run_dir) for name, value in found.items()}


def differing(ours: dict[Any, Any], theirs: dict[Any, Any]) -> list[Any]:
    """Keys whose values are not the same, bit for bit, or that only one side has."""
    return sorted(key for key in ours.keys() | theirs.keys() if repr(ours.get(key)) != repr(theirs.get(key)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, kills, runs, wrong = random.Random(args.seed), 0, 0, 0
    moments: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        straight = folder / "straight"
        began = time.monotonic()
        process = start(make_config(folder / "model", straight, args.ranks), folder / "straight.log")
        if process.wait(600) != FINISHED:
            sys.exit((folder / "straight.log").read_text()[-2000:])
        length, expected = time.monotonic() - began, numbers(straight)
        print(f"undisturbed run: {len(expected)} numbers in {length:.1f} s", flush=True)
        while kills < args.kills:
            runs += 1
            run_dir, log = folder / f"killed-{runs}", folder / f"killed-{runs}.log"
            config = make_config(folder / "model", run_dir, args.ranks)
            while True:
                process = start(config, log)
                try:
                    code = process.wait(chance.uniform(0.25, 1.0) * length)
                except subprocess.TimeoutExpired:
                    moments[doing(run_dir)] += 1
                    kill_one(process, chance)
                    kills += 1
                    continue
                if code != FINISHED:
                    sys.stderr.write(log.read_text()[-2000:])
                    sys.exit(f"run {runs} ended with code {code} without having been killed")
                break
            found = differing(numbers(run_dir), expected)
            wrong += len(found)
            print(f"run {runs}: {kills} kills so far, {len(found)} differing numbers", *found[:3], flush=True)
    where = ", ".join(f"{name} {count}" for name, count in moments.most_common())
    print(f"{kills} kills in {runs} runs ({where}): {wrong} of {runs * len(expected)} numbers differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
