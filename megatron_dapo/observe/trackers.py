"""Weights & Biases and TensorBoard: imported only when the configuration switches them on.

A package that is missing is an error at the start of the run. Anything that fails later is the observer's to report;
metrics.jsonl has the same numbers.
"""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_dapo.config.observe import ObserveConfig, WandbConfig
from megatron_dapo.errors import UserError


class Tracker(Protocol):
    """Somewhere else that metrics go to. `log` may be called several times for one step (its evaluation)."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None: ...


def make_trackers(config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    found: list[Tracker] = []
    if config.wandb.mode != "off":
        _require("wandb", "observe.wandb.mode")
        found.append(Wandb(config.wandb, run_dir, settings))
    if config.tensorboard:
        _require("tensorboard", "observe.tensorboard")
        found.append(TensorBoard(run_dir / "logs" / "tensorboard"))
    return found


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key} is set, but {package} is not installed: pip install 'megatron-dapo[{package}]', or switch it off"
        )


class Wandb:
    """One wandb run for the whole training, however often it is resumed: the id is part of the checkpoint.

    The run starts with the first metrics, when it is known which one to go on with. Metrics are plotted against our own
    `step`, because wandb's counter cannot go back when a run is resumed from an earlier checkpoint.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._config, self._dir, self._settings = config, run_dir, settings
        self._id = uuid.uuid4().hex[:12]
        self._run: Any = None

    def _start(self) -> Any:
        import wandb

        (self._dir / "logs").mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._config.project, entity=self._config.entity, name=self._config.name or self._dir.name,
            group=self._config.group, tags=self._config.tags, id=self._id, resume="allow", mode=self._config.mode,
            dir=str(self._dir / "logs"), config=dict(self._settings),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._start()
        self._run.log({"step": step, **metrics})

    def rewind(self, step: int) -> None:
        """The steps are logged again, with the same numbers where the engine is deterministic."""

    def state(self) -> dict[str, Any]:
        return {"id": self._id}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._id = str(state.get("id", self._id))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if status.startswith("failed") else 0)


class TensorBoard:
    """Event files, written with TensorBoard's own writer: torch is not needed for it."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._purge: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def rewind(self, step: int) -> None:
        """Tells TensorBoard to forget what older event files say about later steps."""
        self._purge = step + 1

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, event: Any) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
        if self._purge is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=self._purge, session_log=start))
            self._purge = None
        self._writer.add_event(event)
