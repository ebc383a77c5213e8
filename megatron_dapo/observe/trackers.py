"""Weights & Biases and TensorBoard: imported only when the configuration enables them.

A missing package is an error at the start of the run. A tracker that fails later is reported once; its metrics are
kept and sent when it works again. metrics.jsonl has the same numbers.
"""

from __future__ import annotations

import importlib.util
import io
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_dapo.config.trainer import ObserveConfig, WandbConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.retry_queue import AppendFile, RetryQueue

UNSENT_RECORDS = 1_000
FIRST_PAUSE = 4  # records; an attempt to reach wandb's server may take a minute


class Tracker(Protocol):
    """A service or format that metrics are sent to. `log` may be called several times for one step (evaluations).

    `log` raises if it fails, and may be called again with the same metrics.
    """

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


class TrackerQueue(RetryQueue[tuple[int, Mapping[str, float]]]):
    """Sends (step, metrics) to one tracker. Nothing that the tracker raises leaves this class."""

    def __init__(self, tracker: Tracker, report: Callable[[str], None]) -> None:
        self.tracker = tracker
        super().__init__(
            tracker.name, lambda item: tracker.log(*item), report,
            limit=UNSENT_RECORDS, errors=Exception, pause=FIRST_PAUSE,
        )  # fmt: skip

    def rewind(self, step: int) -> None:
        kept = [item for item in self.waiting if item[0] <= step]
        self.waiting.clear()
        self.waiting.extend(kept)
        self.tracker.rewind(step)

    def close(self, status: str) -> None:
        self.flush()
        try:
            self.tracker.close(status)
        except Exception as error:
            self._report(f"{self.name} could not be closed: {type(error).__name__}: {error}")


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key} is set, but {package} is not installed: pip install 'megatron-dapo[{package}]', or disable it"
        )


class Wandb:
    """One wandb run for the whole training, across resumes: its id is part of the checkpoint.

    The wandb run starts with the first metrics, because `restore` may set the id before that. Metrics are plotted
    against our own `step`, because wandb's counter cannot decrease when a run resumes from an earlier checkpoint.
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
        """Later steps are logged again; with a deterministic engine the numbers are the same."""

    def state(self) -> dict[str, Any]:
        return {"id": self._id}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._id = str(state.get("id", self._id))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if status.startswith("failed") else 0)


class TensorBoard:
    """Event files in TensorBoard's own format. Needs no torch.

    TensorBoard's writer works in a thread that dies at the first error. We write each event ourselves, whole or not
    at all, so that it can be repeated.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        now = time.time_ns()  # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now:020d}"
        self._file = AppendFile(folder / name)
        self._started = False
        self._purge: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        now, events = time.time(), []
        if not self._started:
            events.append(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if self._purge is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append(event_pb2.Event(wall_time=now, step=self._purge, session_log=start))
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        events.append(event_pb2.Event(wall_time=now, step=step, summary=summary_pb2.Summary(value=values)))
        self._file.write(_framed(events))
        self._started, self._purge = True, None

    def rewind(self, step: int) -> None:
        """Tells TensorBoard to ignore what older event files say about later steps."""
        self._purge = step + 1

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None:
        self._file.close()


def _framed(events: list[Any]) -> bytes:
    """The events as records of an event file: length, checksum, content, checksum."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
