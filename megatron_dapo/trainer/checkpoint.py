"""Checkpoints of a run: `checkpoints/step_N/` appears complete or not at all, and holds all that step N+1 needs.

    policy/          weights and optimizer (Megatron torch_dist, any layout)
    trainer.json     step, data cursor, unfinished and surplus groups, the batch being trained, observers, the layout
    rng/rank_N.json  random states

A checkpoint in the middle of a step (the run was asked to stop) is called `step_N+K`: step N is done, and K updates of
the next one. The newest ones are kept, and the best. Loading the newest one continues as if nothing had happened.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron_dapo import fault_points
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.files import fsync_path, fsync_tree, write_atomically
from megatron_dapo.policy.checkpoint import CheckpointError, load_policy, save_policy
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import Runtime
from megatron_dapo.types import json_default

NAME = re.compile(r"step_(\d+)(?:\+(\d+))?")
STATE, POLICY, RNG, BEST, SCORES = "trainer.json", "policy", "rng", "best.json", "scores.json"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How one save ended; the same on every rank. `error` is None when the checkpoint is published."""

    path: Path
    error: str | None
    waited_seconds: float  # for which the loop stood still
    seconds: float  # from the call of `save` until the checkpoint was published, or the save was given up


class Checkpoints:
    """The checkpoints of one run. `save`, `poll`, `finish`, `newest` and `load` are collective."""

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        runtime: Runtime,
        report: Callable[[SaveReport], None] = lambda report: None,
    ) -> None:
        """`report` is called on every rank once for each save, when it has ended: in `save`, `poll` or `finish`."""
        self.folder = Path(run_dir).resolve() / "checkpoints"
        self.config, self.runtime = config, runtime
        self._report = report

    def newest(self) -> Path | None:
        """Where to resume; the same on every rank, because rank 0 decides."""
        found: list[str | None] = [None]
        if self.runtime.rank == 0:
            complete = self._complete()
            found = [str(complete[-1])] if complete else [None]
        dist.broadcast_object_list(found, src=0)
        return Path(found[0]) if found[0] else None

    def save(
        self,
        policy: Policy,
        step: int,
        updates: int | None,
        state: dict[str, Any],
        score: float | None,
        *,
        wait: bool = False,
    ) -> Path:
        """Starts a save and returns its path; `step` steps are done, and `updates` of the next one (None: the step is
        complete). A save that is still running is finished first.

        The path exists when the save has ended without error: see `poll`. With `wait` the save has ended on return,
        and a failure is a CheckpointError on every rank."""
        began = time.monotonic()
        name = f"step_{step}" if updates is None else f"step_{step}+{updates}"
        building = self.folder / f".{name}.tmp"
        fault_points.reach("checkpoint/before_stage")
        if self.runtime.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
            (building / RNG).mkdir(parents=True)
        dist.barrier()
        fault_points.reach("checkpoint/before_write")
        save_policy(policy, building / POLICY)
        self._write(building / RNG / f"rank_{self.runtime.rank}.json", _random_state())
        if self.runtime.rank == 0:
            self._write(building / STATE, {**state, "step": step, "score": score, "layout": _layout(policy)})
        fault_points.reach("checkpoint/after_write")
        dist.barrier()
        if self.runtime.rank == 0:
            fsync_tree(building)
            fault_points.reach("checkpoint/before_publish")
            self._publish(building, self.folder / name)
            fault_points.reach("checkpoint/before_prune")
            self._prune()
        dist.barrier()
        seconds = time.monotonic() - began
        self._report(SaveReport(self.folder / name, None, seconds, seconds))
        return self.folder / name

    def poll(self) -> None:
        """Publishes the running save if all ranks have written their part. Returns at once; call it at every step."""

    def finish(self) -> None:
        """Waits until no save is running. If it failed, every rank raises CheckpointError."""

    def set_score(self, step: int, score: float) -> None:
        """Rank 0 only. The score of the checkpoint of `step`, known only after the evaluation that follows its save.
        The checkpoint may not be published yet."""
        self._write(self.folder / SCORES, {**self._scores(), f"step_{step}": score})
        self._prune()

    def _scores(self) -> dict[str, float]:
        path = self.folder / SCORES
        return dict(self._read(path)) if path.exists() else {}

    def load(self, policy: Policy, path: Path) -> dict[str, Any]:
        """Collective. Restores policy and random states; returns the rest."""
        state: dict[str, Any] = self._read(path / STATE)
        _check_layout(state["layout"], _layout(policy), path)
        load_policy(policy, path / POLICY)
        mine = path / RNG / f"rank_{self.runtime.rank}.json"
        if state["layout"]["world_size"] == self.runtime.world_size and mine.exists():
            _set_random_state(self._read(mine))
        return state

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. What is not renamed yet does not count."""
        paths = [p for p in self.folder.glob("step_*") if NAME.fullmatch(p.name) and (p / STATE).exists()]
        return sorted(paths, key=_order)

    def _publish(self, building: Path, target: Path) -> None:
        aside = self.folder / f".{target.name}.old"
        shutil.rmtree(aside, ignore_errors=True)
        if target.exists():
            target.rename(aside)
        building.rename(target)
        fsync_path(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self) -> None:
        complete = self._complete()
        keep = set(complete[-self.config.keep :])
        if self.config.keep_best and (best := self._best(complete)) is not None:
            keep.add(best)
            self._write(self.folder / BEST, {"checkpoint": best.name, "score": self._score(best)})
        for path in complete:
            if path not in keep:
                shutil.rmtree(path)

    def _best(self, complete: list[Path]) -> Path | None:
        scored = [(score, _order(p), p) for p in complete if (score := self._score(p)) is not None]
        return max(scored)[2] if scored else None

    def _score(self, path: Path) -> float | None:
        return self._scores().get(path.name, self._read(path / STATE)["score"])

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        write_atomically(path, orjson.dumps(value, default=json_default), fsync=False)

    def _read(self, path: Path) -> Any:
        try:
            return orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _order(path: Path) -> tuple[int, int]:
    """A plain step comes before the stops in the middle of the next one."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), -1 if match[2] is None else int(match[2])


def _layout(policy: Policy) -> dict[str, Any]:
    options = policy.config.policy
    return {
        "world_size": policy.runtime.world_size,
        "distributed_optimizer": options.distributed_optimizer,
        "experts_are_split": options.expert_parallel > 1,
    }


def _check_layout(saved: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """TP, PP, CP and DP may change between save and load; these two decide how the optimizer is written."""
    for name, key in (("distributed_optimizer", "distributed_optimizer"), ("experts_are_split", "expert_parallel > 1")):
        if saved[name] != ours[name]:
            raise CheckpointError(
                f"{path} was saved with policy.{key} {saved[name]}, this run has {ours[name]}: optimizer state cannot "
                "cross that; use the saved setting"
            )


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(tensor(state["cuda"]))
