"""A training run in a forked process, so that it can be killed: the imports are shared, so it starts at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import environment

from megatron_dapo import fault_points
from megatron_dapo.config import check_config, parse_config
from megatron_dapo.observe.metric_names import is_wall_clock
from megatron_dapo.trainer.loop import train
from megatron_dapo.weights.verify import verify


def run(raw: dict[str, Any], before: Callable[[], None] | None = None, timeout: float = 120) -> int:
    """Trains in a forked process; `before` may plant something there. Returns the exit code (−9: killed)."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(raw, before))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"the run did not end within {timeout} s")
    assert process.exitcode is not None
    return process.exitcode


def _main(raw: dict[str, Any], before: Callable[[], None] | None) -> None:
    os.environ.update(environment())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if before is not None:
        before()
    config = parse_config(raw)
    sys.exit(train(config, check_config(config, 1)))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, count: int, action: Callable[[], None] = kill_self) -> Callable[[], None]:
    """Plants `action` before the `count`-th call of a method (it may be a coroutine function: it is called)."""

    def plant() -> None:
        original = getattr(owner, name)
        calls = 0

        def planted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                action()
            return original(*args, **kwargs)

        setattr(owner, name, planted)

    return plant


def at_point(name: str, count: int, action: Callable[[], None] = fault_points.kill) -> Callable[[], None]:
    """Plants `action` at the `count`-th arrival at a fault point."""
    return lambda: fault_points.on(name, action, count=count)


def records(run_dir: Path) -> list[tuple[int, str, dict[str, float]]]:
    """metrics.jsonl without wall-clock values."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["kind"], {n: v for n, v in line["metrics"].items() if not is_wall_clock(n)})
        for line in lines
    ]


def assert_same(run_dir: Path, expected: tuple[Path, Path], steps: int) -> None:
    """The same metrics and, bit for bit, the same weights as `expected` (its model's folder, its run directory)."""
    folder, other = expected
    assert records(run_dir) == records(other)
    compared = verify(*(d / "checkpoints" / f"step_{steps}" for d in (run_dir, other)), reference=folder)
    assert compared.same, compared.differences
