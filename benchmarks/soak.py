"""A long run on real CPU servers that are killed and lose connections: nothing may end it, lose a sample or leak.

    make sglang-cpu                                            # once: installs SGLang for the CPU
    python benchmarks/soak.py                                  # 200 steps, about 30 minutes
    python benchmarks/soak.py --steps 6 --kill-every 3 --gap 0 1
    python benchmarks/soak.py --max-staleness 1 --transport tensor --gap 0 1   # servers generate during the updates

Trains a tiny model with the real loop and two SGLang servers. In every step the trainer is idle for a random time in
`--gap` seconds; the servers close idle connections after 5 s, so 3 to 8 s meets every case. Every
`--kill-every` steps one server is killed with SIGKILL at a random moment. Each server is behind a proxy
(benchmarks/dropping_proxy.py) that resets the connection of `--drop-rate` of all calls.

Checks, from outside the trainer:

- exit code 0, and every step in metrics.jsonl exactly once;
- in every step: submitted + carried in = trained + dropped + failed + carried over, and what one step carries over the
  next one carries in;
- every trained sample is unique by (step, prompt, index, seed), and so is its seed in the whole run;
- resident memory and open file descriptors of the trainer and of the servers do not grow.

Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
PROXY = Path(__file__).resolve().parent / "dropping_proxy.py"
TRAINED, CALLS = "trained.jsonl", "calls"  # files of a soak, in its folder
STEP_TIMEOUT = 900.0
GONE = (psutil.NoSuchProcess, ProcessLookupError)  # processes may end while they are looked at


# ---- the trainer's process ----


def train(folder: Path, gap: tuple[float, float]) -> int:
    """`megatron-dapo train` with two additions after every step: an idle gap, and a list of the trained samples."""
    from megatron_dapo.cli import main
    from megatron_dapo.observe.observer import Observer

    chance, record_step = random.Random(0), Observer.step

    def step(self: Observer, number: int, metrics: Any, groups: Any, *others: Any) -> None:
        with (folder / TRAINED).open("a") as file:
            for sample in (sample for group in groups for sample in group.samples):
                file.write(json.dumps([number, sample.prompt_id, sample.index, sample.seed]) + "\n")
        record_step(self, number, metrics, groups, *others)
        time.sleep(chance.uniform(*gap))

    Observer.step = step  # type: ignore[method-assign,assignment]
    return main(["train", str(folder / "config.yaml")])


# ---- the soak's own process ----


def write_run(folder: Path, options: argparse.Namespace) -> Path:
    """The configuration of the run, and the executable that starts a server behind its proxy."""
    from tiny_run import raw_config, write_config

    pythons = sorted(ROOT.glob(".venv-sglang-*/bin/python"))
    if not pythons:
        raise SystemExit("SGLang for the CPU is not installed: run `make sglang-cpu`")
    (folder / CALLS).mkdir()
    proxied = folder / "python-behind-proxy"
    command = [
        sys.executable, PROXY, "--python", pythons[-1], "--log", folder / CALLS / "server", "--drop-rate",
        options.drop_rate, "--seed", options.seed, "--",
    ]  # fmt: skip
    proxied.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    proxied.chmod(0o755)
    raw = raw_config(
        folder / "model", folder / "run", trainer__steps=options.steps, trainer__mini_batch_prompts=4,
        trainer__checkpoint={"every": 10}, policy__optimizer={"lr": 1e-5},  # the task must not become too easy
        rollout__engine="sglang", rollout__weights={"transport": options.transport},
        rollout__max_staleness=options.max_staleness,
        rollout__servers={
            "device": "cpu", "dtype": "float32", "python": str(proxied), "count": 2, "share_gpus": options.colocated,
            "restarts": 100, "port": random.Random(os.getpid()).randrange(20000, 32000),  # below the ephemeral ports
            "environment": {"SGLANG_TIMEOUT_KEEP_ALIVE": "5"},  # SGLang's default, which external servers have
        },
    )  # fmt: skip
    return write_config(raw, folder / "config.yaml")


@dataclass
class Usage:
    """One measurement after a step. Servers: the mean of those that are up, each with its child processes."""

    step: int
    trainer_mb: float
    trainer_fds: int
    server_mb: float
    server_fds: float


def servers(trainer: psutil.Process) -> list[psutil.Process]:
    """The proxies of the servers that are up or starting, in the order of their ports."""

    def port(process: psutil.Process) -> int:
        line = process.cmdline()
        return int(line[line.index("--port") + 1])

    found = []
    for process in trainer.children(recursive=True):
        with contextlib.suppress(*GONE):
            if str(PROXY) in process.cmdline():
                found.append((port(process), process))
    return [process for _, process in sorted(found, key=lambda item: item[0])]


def measure(step: int, trainer: psutil.Process, calls: Path) -> Usage:
    sizes, descriptors = [], []
    for proxy in servers(trainer):
        if not list(calls.glob(f"*-{proxy.pid}.jsonl")):
            continue  # it is starting; the proxy listens when the server does
        with contextlib.suppress(*GONE):
            tree = [proxy, *proxy.children(recursive=True)]
            sizes.append(sum(process.memory_info().rss for process in tree) / 2**20)
            descriptors.append(sum(process.num_fds() for process in tree))
    return Usage(
        step, trainer.memory_info().rss / 2**20, trainer.num_fds(), fmean(sizes or [0.0]), fmean(descriptors or [0.0])
    )


@dataclass
class Soak:
    folder: Path
    options: argparse.Namespace
    usage: list[Usage] = field(default_factory=list)
    kills: list[tuple[int, int]] = field(default_factory=list)  # step, pid

    def run(self) -> int | None:
        """The exit code of the training run; None: it made no progress and was ended."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *sys.path])
        command = [sys.executable, __file__, "--train", str(self.folder), "--gap", *map(str, self.options.gap)]
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / "train.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            return self._watch(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _watch(self, process: subprocess.Popen[bytes]) -> int | None:
        trainer, last, changed = psutil.Process(process.pid), 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            steps = count_steps(self.folder)
            if steps > last:
                last, changed = steps, time.monotonic()
                with contextlib.suppress(*GONE):
                    self.usage.append(measure(last, trainer, self.folder / CALLS))
                self._kill_when_due(last, trainer)
                self._show(last)
            elif time.monotonic() - changed > STEP_TIMEOUT:
                print(f"no step for {STEP_TIMEOUT:.0f} s: ending the run", flush=True)
                return None
        return process.returncode

    def _kill_when_due(self, step: int, trainer: psutil.Process) -> None:
        every = self.options.kill_every
        if not every or step % every or step == self.options.steps:
            return
        target = (step // every) % 2
        delay = random.Random(f"{self.options.seed}-{step}").uniform(0, self.options.gap[1])
        threading.Timer(delay, self._kill, (step, target, trainer)).start()

    def _kill(self, step: int, target: int, trainer: psutil.Process) -> None:
        """SIGKILL to the server behind the proxy, as the OOM killer would. A server that is still starting after an
        earlier kill is given time to come up."""
        deadline = time.monotonic() + STEP_TIMEOUT
        while time.monotonic() < deadline and trainer.is_running():
            with contextlib.suppress(*GONE, IndexError):
                server = servers(trainer)[target].children()[0]
                server.kill()
                self.kills.append((step, server.pid))
                print(f"step {step}: killed server {target} (pid {server.pid})", flush=True)
                return
            time.sleep(0.2)

    def _show(self, step: int) -> None:
        if step % 10 == 0 or step == self.options.steps or self.options.steps < 20:
            now = self.usage[-1]
            print(
                f"step {step}: trainer {now.trainer_mb:.0f} MB, {now.trainer_fds} descriptors; "
                f"servers {now.server_mb:.0f} MB, {now.server_fds:.0f} descriptors",
                flush=True,
            )


def read_lines(path: Path) -> Iterator[Any]:
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be in the middle of a write
                yield json.loads(line)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / "run" / "metrics.jsonl") if record["kind"] == "step"]


def count_steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


# ---- figures and checks ----


def check_accounting(steps: Sequence[dict[str, Any]], problems: list[str]) -> dict[str, int]:
    """The totals of the run; what does not add up goes to `problems`."""
    totals = Counter(dict.fromkeys(("submitted", "trained", "dropped", "failed"), 0))
    carried = 0
    for record in steps:
        names = ("submitted", "carried_in", "trained", "dropped", "failed", "carried_over")
        count = {name: int(record["metrics"][f"rollout/samples_{name}"]) for name in names}
        entered = count["submitted"] + count["carried_in"]
        left = count["trained"] + count["dropped"] + count["failed"] + count["carried_over"]
        if entered != left:
            problems.append(f"step {record['step']}: {entered} samples entered and {left} left")
        if count["carried_in"] != carried:
            problems.append(
                f"step {record['step']}: {carried} samples were carried over, {count['carried_in']} came in"
            )
        carried = count["carried_over"]
        totals.update({name: count[name] for name in totals})
    totals["carried"] = carried
    return dict(totals)


def check_trained(folder: Path, steps: Sequence[dict[str, Any]], problems: list[str]) -> None:
    samples = [tuple(line) for line in read_lines(folder / TRAINED)]
    for what, values in (("sample", samples), ("seed", [sample[3] for sample in samples])):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            problems.append(f"{len(twice)} {what}s were trained twice, for example {twice[0]}")
    found = Counter(sample[0] for sample in samples)
    for record in steps:
        wanted = int(record["metrics"]["rollout/samples_trained"])
        if found[record["step"]] != wanted:
            problems.append(f"step {record['step']}: {found[record['step']]} samples recorded, {wanted} trained")


def trend(values: Sequence[float], tolerance: float) -> dict[str, Any]:
    """First and last quarter, and the fitted growth over the run without its first tenth, where caches fill."""
    settled = values[len(values) // 10 :]
    n, middle, mean = len(settled), (len(settled) - 1) / 2, fmean(settled)
    spread = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(settled)) / spread if spread else 0.0
    quarter = max(1, len(values) // 4)
    growth = slope * (n - 1)
    return {
        "first": fmean(values[:quarter]), "last": fmean(values[-quarter:]), "per_step": slope,
        "growth": growth, "verdict": "growing" if growth > tolerance else "flat",
    }  # fmt: skip


def trends(usage: Sequence[Usage]) -> dict[str, dict[str, Any]]:
    """Tolerances: 3 % or 24 MB of memory; a few connections more or less, since requests move to the other server while
    one restarts. One descriptor or 1 MB lost per step exceeds them in 200 steps."""

    def values(name: str) -> list[float]:
        return [value for one in usage if (value := float(getattr(one, name)))] or [0.0]  # 0: no server was up

    def memory(name: str) -> dict[str, Any]:
        return trend(values(name), max(24.0, 0.03 * fmean(values(name))))

    return {
        "trainer RSS, MB": memory("trainer_mb"),
        "server RSS, MB": memory("server_mb"),
        "trainer descriptors": trend(values("trainer_fds"), 40.0),
        "server descriptors": trend(values("server_fds"), 40.0),
    }


def figures_of(soak: Soak, code: int | None, seconds: float) -> dict[str, Any]:
    problems: list[str] = []
    steps = read_steps(soak.folder)
    if code != 0:
        problems.append(f"the run ended with exit code {code}")
    numbers = [record["step"] for record in steps]
    if numbers != list(range(1, soak.options.steps + 1)):
        problems.append(f"metrics.jsonl has {len(numbers)} steps, expected 1 to {soak.options.steps} once each")
    every = soak.options.kill_every
    expected = (soak.options.steps - 1) // every if every else 0
    if len(soak.kills) != expected:
        problems.append(f"{len(soak.kills)} servers were killed, expected {expected}")
    totals = check_accounting(steps, problems)
    check_trained(soak.folder, steps, problems)
    calls = [call for path in sorted((soak.folder / CALLS).iterdir()) for call in read_lines(path)]
    measured = trends(soak.usage) if len(soak.usage) > 1 else {}
    problems += [f"{name} is growing" for name, found in measured.items() if found["verdict"] == "growing"]
    return {
        "steps": len(numbers),
        "kills": len(soak.kills),
        "restarts": len(list((soak.folder / CALLS).iterdir())) - 2,
        "calls": len(calls),
        "dropped_calls": sum(call["dropped"] is not None for call in calls),
        "dropped_by_path": dict(Counter(call["path"] for call in calls if call["dropped"]).most_common()),
        "retries": sum(call["retry"] for call in calls),
        "samples": totals,
        "usage": measured,
        "minutes": seconds / 60,
        "problems": problems,
        "options": {name: str(value) for name, value in vars(soak.options).items()},
        "measurements": [asdict(one) for one in soak.usage],
    }


def show(figures: dict[str, Any]) -> None:
    samples = figures["samples"]
    left = " + ".join(f"{samples[name]} {name}" for name in ("trained", "dropped", "failed", "carried"))
    rows = {name: figures[name] for name in ("steps", "kills", "restarts", "calls", "dropped_calls", "retries")}
    rows["samples"] = f"{samples['submitted']} entered = {left}"
    for name, found in figures["usage"].items():
        quarters = f"{found['first']:.1f} first quarter, {found['last']:.1f} last quarter"
        rows[name] = f"{quarters}, {found['per_step']:+.3f} per step: {found['verdict']}"
    rows["minutes"] = f"{figures['minutes']:.1f}"
    print()
    for name, value in rows.items():
        print(f"{name.replace('_', ' '):<22} {value}")
    print("\n" + "\n".join(figures["problems"] or ["all checks passed"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-every", type=int, default=20, help="steps between two kills of a server; 0: none")
    parser.add_argument("--drop-rate", type=float, default=0.02, help="share of calls whose connection is reset")
    parser.add_argument("--gap", type=float, nargs=2, default=(3.0, 8.0), metavar="SECONDS", help="idle time per step")
    parser.add_argument("--transport", default="disk", choices=("disk", "tensor"), help="rollout.weights.transport")
    parser.add_argument("--max-staleness", type=int, default=0, help="rollout.max_staleness")
    parser.add_argument("--colocated", action="store_true", help="servers release their memory while training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep run, logs and calls there (default: temporary)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train, tuple(options.gap))
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_run(folder, options)
        soak, began = Soak(folder, options), time.monotonic()
        code = soak.run()
        figures = figures_of(soak, code, time.monotonic() - began)
        if figures["problems"]:
            print((folder / "train.log").read_text(errors="replace")[-4000:])
        if options.out:
            options.out.write_text(json.dumps(figures, indent=2) + "\n")
        show(figures)
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
