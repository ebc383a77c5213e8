"""Training runs in forked processes: they can be killed, and they start at once because the imports are shared."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tiny_run import environment

from megatron_dapo import cli, fault_points
from megatron_dapo.config import ConfigError, check_config, parse_config
from megatron_dapo.errors import UserError
from megatron_dapo.observe.metrics_file import is_wall_clock
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks
from megatron_dapo.trainer.loop import train
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.trainer.signals import Stopped
from megatron_dapo.weights.verify import verify


def run(raw: dict[str, Any], before: Callable[[], None] | None = None, timeout: float = 300) -> int:
    """Trains in a forked process, in which `before` is called first. Returns the exit code (−9: killed)."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(raw, before))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"the run did not end within {timeout} s")
    assert process.exitcode is not None
    return process.exitcode


def run_in_ranks(
    raw: dict[str, Any], before: Callable[[Rendezvous], None] | None = None, ranks: int = 2, timeout: float = 300
) -> list[int]:
    """Trains in so many forked ranks, in each of which `before` is called first. Returns the exit codes."""
    return run_ranks(ranks, _rank, raw, before, timeout=timeout)


def _rank(rendezvous: Rendezvous, raw: dict[str, Any], before: Callable[[Rendezvous], None] | None) -> int:
    os.environ.update(environment())
    if before is not None:
        before(rendezvous)
    config = parse_config(raw)
    return train(config, check_config(config, rendezvous.world_size), rendezvous)


def start_command(config: Path) -> ForkProcess:
    """Starts `megatron-dapo train CONFIG` in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(config,))
    process.start()
    return process


def _command(config: Path) -> None:
    os.environ.update(environment())
    sys.exit(cli.main(["train", str(config)]))


def run_straight(make_config: Callable[[Path, Path], dict[str, Any]], folders: Any) -> tuple[Path, Path]:
    """A run without an error or interruption, for comparison: its model's folder and its run directory. `folders` is
    pytest's `tmp_path_factory`."""
    folder, run_dir = folders.mktemp("model"), folders.mktemp("straight")
    assert run(make_config(folder, run_dir)) == 0
    return folder, run_dir


def _main(raw: dict[str, Any], before: Callable[[], None] | None) -> None:
    os.environ.update(environment())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.freeze()  # Megatron collects garbage at every save; the imported modules need not be searched each time
    if before is not None:
        before()
    config = parse_config(raw)
    try:
        sys.exit(train(config, check_config(config, 1)))
    except UserError as error:  # as the command does
        print(f"megatron-dapo: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def fail_with(error: Exception) -> Callable[[], None]:
    """An action that raises."""

    def action() -> None:
        raise error

    return action


def send_signal(number: int, hold: bool = False) -> Callable[[], None]:
    """An action that signals this process. `hold`: the rollout thread, until the loop asks it to interrupt rollouts or
    has cancelled an evaluation."""

    def action() -> None:
        interrupting, submit, init = threading.Event(), RolloutDriver.submit, Stopped.__init__

        def submitted(self: RolloutDriver, work: Any, **options: Any) -> Any:
            future = submit(self, work, **options)
            if work.__qualname__ == RolloutDriver.stop.__qualname__:
                interrupting.set()
            return future

        def stopped(self: Stopped, doing: str, *more: Any) -> None:
            init(self, doing, *more)
            if doing.startswith("evaluating"):
                interrupting.set()

        RolloutDriver.submit = submitted  # type: ignore[method-assign]
        Stopped.__init__ = stopped  # type: ignore[method-assign]
        os.kill(os.getpid(), number)
        if hold and not interrupting.wait(120):
            os._exit(1)  # nobody would see an error of this thread

    return action


def at_point(name: str, count: int = 1, action: Callable[[], None] = fault_points.kill) -> Callable[[], None]:
    """For `run`: does `action` when the run arrives at the fault point for the `count`-th time."""
    return lambda: fault_points.on(name, action, count=count)


def from_point(name: str, first: int, action: Callable[[], None]) -> Callable[[], None]:
    """As `at_point`, at this and all later arrivals."""
    return lambda: [fault_points.on(name, action, count=count) for count in range(first, 100)] and None


def records(run_dir: Path) -> list[tuple[int, str, dict[str, float]]]:
    """metrics.jsonl without wall-clock values."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["kind"], {n: v for n, v in line["metrics"].items() if not is_wall_clock(n)})
        for line in lines
    ]


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [metrics for _, kind, metrics in records(run_dir) if kind == "step"]


def assert_same(run_dir: Path, expected: tuple[Path, Path], steps: int) -> None:
    """The same metrics and, bit for bit, the same weights as `expected` (its model's folder, its run directory)."""
    folder, other = expected
    assert records(run_dir) == records(other)
    compared = verify(*(d / "checkpoints" / f"step_{steps}" for d in (run_dir, other)), reference=folder)
    assert compared.same, compared.differences
