"""A long training run that is killed twice on purpose, and the curve that it draws all the same.

    python benchmarks/long_run.py examples/gsm8k_1gpu/gsm8k.yaml --kill-after 30 --kill-engine-at 40 \\
        --set policy.model=MODEL --set trainer.steps=60 --set trainer.checkpoint.every=30

1. Starts `megatron-dapo train`.
2. Kills the launcher with SIGKILL as soon as the checkpoint of step `--kill-after` is complete. Ranks, engines and
   graders must end by themselves; how long that takes is printed.
3. Starts the same command again, which resumes from that checkpoint.
4. Kills one engine process with SIGKILL after step `--kill-engine-at`. The run must go on.

Prints the evaluation curve, the seconds of each phase, and whether every step is there exactly once. Exit code 1 when a
promise is broken. Nothing here knows the model: any configuration of one node will do.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_dapo.config import load_config
from megatron_dapo.observe.metrics_file import Record, read_records

POLL = 0.5
PHASES = ("rollout", "log_probs", "update", "sync", "checkpoint", "evaluate", "step")


class Run:
    """One run directory and the process that trains in it."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self.command, self.run_dir = command, run_dir
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, start_new_session=True)

    def records(self) -> list[Record]:
        path = self.run_dir / "metrics.jsonl"
        return read_records(path) if path.exists() else []

    def steps_done(self) -> int:
        return max((record.step for record in self.records() if record.kind == "step"), default=0)

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_until(self, condition: object, what: str) -> None:
        assert self.process is not None and callable(condition)
        while not condition():
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended with exit code {self.process.returncode} before {what}")
            time.sleep(POLL)


def kill_launcher(run: Run) -> tuple[int, float]:
    """SIGKILL to the launcher alone; returns how many processes it had and the seconds until all had ended."""
    assert run.process is not None
    processes = run.tree()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    began = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=60)
    if alive:
        names = ", ".join(f"{process.pid} {process.name()}" for process in alive)
        raise SystemExit(f"60 s after the launcher was killed these processes live: {names}")
    return len(processes), time.monotonic() - began


def kill_engine(run: Run) -> str:
    """SIGKILL to the process of one engine that computes, as a driver error or the OOM killer would."""
    engines = [process for process in run.tree() if _is_scheduler(process)]
    if not engines:
        raise SystemExit("no engine process was found to kill")
    name = f"{engines[0].name()} (pid {engines[0].pid})"
    engines[0].kill()
    return name


def _is_scheduler(process: psutil.Process) -> bool:
    try:
        return "sglang::scheduler" in " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return False


def print_curve(records: list[Record]) -> None:
    evaluations = [record for record in records if record.kind == "eval"]
    names = sorted({name for record in evaluations for name in record.metrics if name.startswith("eval/")})
    shown = [name for name in names if "@" in name or name.endswith(("mean_tokens", "seconds"))]
    print("\nstep  " + "  ".join(f"{name.removeprefix('eval/'):>14}" for name in shown))
    for record in evaluations:
        print(f"{record.step:>4}  " + "  ".join(f"{record.metrics.get(name, float('nan')):14.4f}" for name in shown))


def print_times(records: list[Record]) -> None:
    steps = [record for record in records if record.kind == "step"]
    print("\nphase        median s   largest s")
    for name in PHASES:
        values = [record.metrics[f"time/{name}"] for record in steps if f"time/{name}" in record.metrics]
        if values:
            print(f"{name:<11} {statistics.median(values):9.2f} {max(values):11.2f}")
    speed = [record.metrics["rollout/tokens_per_second"] for record in steps]
    print(f"rollout tokens/s: median {statistics.median(speed):,.0f}, largest {max(speed):,.0f}")


def missing_steps(records: list[Record], steps: int) -> str:
    """What is wrong with the list of steps, or an empty string: each of 1…steps must be there once, in order."""
    found = [record.step for record in records if record.kind == "step"]
    return "" if found == list(range(1, steps + 1)) else f"expected steps 1 to {steps} once each, found {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="settings")
    parser.add_argument("--kill-after", type=int, default=30, help="checkpoint after which the launcher dies; 0: no")
    parser.add_argument("--kill-engine-at", type=int, default=40, help="step after which an engine is killed; 0: no")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    config = load_config(args.config, args.settings)
    settings = [part for setting in args.settings for part in ("--set", setting)]
    run = Run([sys.executable, "-m", "megatron_dapo", "train", args.config, *settings], Path(config.trainer.run_dir))
    figures: dict[str, object] = {"config": args.config, "settings": args.settings}
    began = time.monotonic()
    run.start()
    if args.kill_after:
        checkpoint = run.run_dir / "checkpoints" / f"step_{args.kill_after}"
        run.wait_until(checkpoint.exists, f"checkpoint step_{args.kill_after} was complete")
        at = run.steps_done()
        count, seconds = kill_launcher(run)
        print(f"killed the launcher after step {at}: {count} processes ended within {seconds:.1f} s", flush=True)
        figures |= {"killed_at": at, "processes": count, "seconds_until_gone": seconds}
        resumed = time.monotonic()
        run.start()
        run.wait_until(lambda: run.steps_done() > max(at, args.kill_after), "the first step after the resume")
        figures["resume_seconds"] = time.monotonic() - resumed
        print(f"resumed: the first new step ended after {figures['resume_seconds']:.0f} s", flush=True)
    if args.kill_engine_at:
        run.wait_until(lambda: run.steps_done() >= args.kill_engine_at, f"step {args.kill_engine_at}")
        at = run.steps_done()
        print(f"killed {kill_engine(run)} after step {at}", flush=True)
        killed = time.monotonic()
        run.wait_until(lambda: run.steps_done() > at + 1, "the second step after the engine was killed")
        figures["engine_recovery_seconds"] = time.monotonic() - killed
        print(f"the second step after it ended {figures['engine_recovery_seconds']:.0f} s later", flush=True)
    assert run.process is not None
    code = run.process.wait()
    records = run.records()
    print_curve(records)
    print_times(records)
    trouble = missing_steps(records, config.trainer.steps) or (f"exit code {code}" if code else "")
    figures |= {"minutes": (time.monotonic() - began) / 60, "exit_code": code, "trouble": trouble}
    figures["records"] = [{"step": r.step, "kind": r.kind, "metrics": r.metrics} for r in records]
    print(f"\n{figures['minutes']:.1f} minutes; " + (trouble or "every step is there once, exit code 0"))
    if args.out:
        args.out.write_text(json.dumps(figures))
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
