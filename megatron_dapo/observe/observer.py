"""The observer: rank 0 reports what happens in a run; the observer records and shows it. Other ranks: `NullObserver`.

Promises:
- The record of a step is on disk in metrics.jsonl before `step` returns, unless the disk is full (see the last point).
- After `rewind(n)` the files hold what a run that ended with step n would have left: metrics.jsonl and samples/ of a
  resumed run equal those of an uninterrupted run, except for wall-clock metrics (`metric_names.is_wall_clock`).
- A process that records without calling `rewind` first starts the run again: records of an earlier process from that
  step on are removed.
- Nothing that the observer prints, writes or sends can change or end the training. Records, transcripts and log lines
  that cannot be written are kept in memory and written later, in order (`retry_queue`); unwritten records are part of
  `state`, so a checkpoint holds them and metrics.jsonl has no gap after a resume.

Steps count from 1: `step(3, …)` is the third step and belongs to the checkpoint `step_3`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe import environment, transcripts
from megatron_dapo.observe.console import NAME as STATUS
from megatron_dapo.observe.console import Console, PlainConsole, SamplingProgress, StatusFile
from megatron_dapo.observe.diagnosis import Watch
from megatron_dapo.observe.metric_names import with_aliases
from megatron_dapo.observe.metrics_file import EVAL, STEP, MetricsFile, Record, RecordError, plain_numbers
from megatron_dapo.observe.retry_queue import AppendFile, RetryQueue
from megatron_dapo.observe.timeline import Phase, Stopwatch, Timeline, write_trace
from megatron_dapo.observe.trackers import TrackerQueue, make_trackers
from megatron_dapo.types import Group

UNWRITTEN_RECORDS = 10_000  # about 3 KB each
UNWRITTEN_TRANSCRIPTS = 8
UNWRITTEN_LOG_LINES = 1_000


class Observer:
    """`total_steps`: the length of the run. `settings`: the resolved configuration, for the trackers. `ranks`: of the
    trainer."""

    def __init__(
        self, config: ObserveConfig, run_dir: Path, *, total_steps: int, settings: dict[str, Any], ranks: int = 1
    ) -> None:
        self._config, self._dir = config, Path(run_dir)
        self._total, self._step, self._ranks = total_steps, 0, ranks
        trackers = make_trackers(config, self._dir, settings)  # first: it raises if a package is missing
        self._file = MetricsFile(self._dir / "metrics.jsonl")
        self._console = make_console(config.console, self._dir.name)
        self._status: Console = StatusFile(self._dir / "logs" / STATUS, total_steps)
        environment.record(self._dir, ranks)
        self._logs = {name: self._log_queue(name) for name in ("warnings.log", "trainer.log")}
        self._records: RetryQueue[Record] = RetryQueue(
            "metrics.jsonl", self._file.append, self.warn, limit=UNWRITTEN_RECORDS, errors=RecordError
        )
        self._transcripts: RetryQueue[tuple[int, list[transcripts.Transcript]]] = RetryQueue(
            "samples/", self._write_transcripts, self.warn, limit=UNWRITTEN_TRANSCRIPTS
        )
        self._trackers = [TrackerQueue(tracker, self.warn) for tracker in trackers]
        self._aligned = False  # whether the records on file are known to precede what this process records
        self._watch = self._replayed_watch()
        self._stopwatch = Stopwatch()
        self._timeline = Timeline()
        self._recent: deque[float] = deque(maxlen=20)

    def phase(self, name: str) -> AbstractContextManager[Phase]:
        """Times a part of the current step: `time/<name>` of the next `step`. One thread only; phases may nest."""
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[Phase]:
        phase, started = Phase(name, self._show), time.monotonic()
        self._stopwatch.enter(phase)
        self._show(lambda console: console.phase_started(name))
        try:
            yield phase
        finally:
            self._stopwatch.leave(phase)
            self._timeline.phase(name, started, time.monotonic())
            self._show(lambda console: console.phase_ended(name))

    def sampling(self, progress: SamplingProgress) -> None:
        """Shows the sampler's progress. Cheap; may be called from any thread."""
        self._show(lambda console: console.sampling(progress))

    def starting(self, seconds: float, limit: float, line: str) -> None:
        """Shows how long the engines have been starting, and the last line of their log. Any thread."""
        text = "s for the engines" + (f"; their log: {line}" if line else "")
        self._show(lambda console: console.progress("start", round(seconds), limit, text))

    def request(self, engine: str, name: str, started: float, tokens: int) -> None:
        """A request that `engine` has finished now, for the timeline. Any thread; `started`: time.monotonic()."""
        self._timeline.request(engine, name, started, time.monotonic(), tokens)

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Records a finished step, with the times of the phases since the last one."""
        self._align(step)
        times = self._stopwatch.lap()
        record = Record(step, STEP, plain_numbers(metrics) | times | self._speed(metrics, times))
        self._keep_transcripts(step, groups)
        self._records.put(record)  # after the transcripts: the transcripts of a recorded step exist
        self._step = step
        self._recent.append(times["time/step"])
        self._show(lambda console: console.step(step, self._total, record.metrics, self._remaining()))
        self._track(record)
        self._write_trace(step)
        for finding in self._watch.observe(step, record.metrics):
            if self._config.warnings:
                self.warn(finding.message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records scores after `step`. Scores that are already recorded for this step are not recorded again."""
        self._align(step)
        record = Record(step, EVAL, plain_numbers(metrics))
        recorded = (*self._file.records, *self._records.waiting)
        known = {name for r in recorded if (r.step, r.kind) == (step, EVAL) for name in r.metrics}
        if not set(record.metrics) <= known:
            self._records.put(record)
            self._track(record)
        self._show(lambda console: console.evaluation(step, record.metrics))

    def has_evaluation(self, step: int) -> bool:
        """Whether scores after `step` are recorded, which is so if a run was stopped after evaluating and resumed."""
        recorded = (*self._file.records, *self._records.waiting)
        return self._aligned and any((r.step, r.kind) == (step, EVAL) for r in recorded)

    def warn(self, message: str) -> None:
        """Shown, and written to logs/warnings.log."""
        self._show(lambda console: console.warn(message))
        self._log("warnings.log", f"step {self._step}: {message}")

    def log(self, message: str) -> None:
        """Written to logs/trainer.log only: what is worth keeping but is neither a metric nor a warning."""
        self._log("trainer.log", f"after step {self._step}: {message}")

    def report(self, message: str) -> None:
        """Logged like that, and shown."""
        self._show(lambda console: console.line(message))
        self.log(message)

    def rewind(self, step: int) -> None:
        """Removes everything recorded after `step`: the run continues from its checkpoint of that step."""
        self._aligned = True
        self._file.rewind(step)
        on_file = {_key(record) for record in self._file.records}
        kept = [r for r in self._records.waiting if r.step <= step and _key(r) not in on_file]
        self._records.waiting.clear()
        for record in kept:
            self._records.put(record)
        transcripts.rewind(self._dir / "samples", step)
        self._step, self._watch = step, self._replayed_watch()
        for tracker in self._trackers:
            tracker.rewind(step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that a resumed run continues its trackers and its metrics. JSON values."""
        found: dict[str, Any] = {queue.name: queue.tracker.state() for queue in self._trackers}
        if self._records.waiting:
            found["unwritten"] = [record.to_line() for record in self._records.waiting]
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before `rewind` and the first `step`."""
        for queue in self._trackers:
            queue.tracker.restore(state.get(queue.name, {}))
        self._records.waiting.extend(Record.from_line(line) for line in state.get("unwritten", ()))

    def close(self, status: str) -> None:
        """The last call; `status` says how the run ended: finished, stopped, failed."""
        self._records.flush()
        self._transcripts.flush()
        for tracker in self._trackers:
            tracker.close(status)
        self._file.close()
        if self._config.report and self._file.records:
            self._write_report()
        for log in self._logs.values():
            log.flush()
        self._show(lambda console: console.close(status))

    def _keep_transcripts(self, step: int, groups: Sequence[Group]) -> None:
        if transcripts.is_due(step, self._config.samples_every) and groups:
            chosen = transcripts.choose(step, groups, self._config.samples_groups, self._config.samples_responses)
            self._transcripts.put((step, chosen))
        else:
            self._transcripts.flush()

    def _write_transcripts(self, item: tuple[int, list[transcripts.Transcript]]) -> None:
        transcripts.write(self._dir / "samples", *item)

    def _speed(self, metrics: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
        tokens, seconds = metrics.get("train/batch_tokens"), times["time/step"]
        return {"time/tokens_per_second_per_gpu": tokens / seconds / self._ranks} if tokens and seconds else {}

    def _write_trace(self, step: int) -> None:
        trace = self._timeline.take()
        if transcripts.is_due(step, self._config.trace_every):
            try:
                write_trace(self._dir, step, trace)
            except OSError as error:
                self.warn(f"no timeline of step {step}: {error}")

    def _write_report(self) -> None:
        from megatron_dapo.observe.report import write_report

        try:
            write_report([self._dir], self._dir / "report.html", png=False)
        except Exception as error:  # a report must not turn a finished run into a failed one
            self.warn(f"no report: {type(error).__name__}: {error}")

    def _log_queue(self, name: str) -> RetryQueue[bytes]:
        file = AppendFile(self._dir / "logs" / name)
        return RetryQueue(f"logs/{name}", file.write, self.warn, limit=UNWRITTEN_LOG_LINES)

    def _log(self, name: str, line: str) -> None:
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n"
        self._logs[name].put(text.encode("utf-8", errors="backslashreplace"))

    def _show(self, draw: Callable[[Console], None]) -> None:
        """A console that fails is replaced by a silent one."""
        for name in ("_console", "_status"):
            try:
                draw(getattr(self, name))
            except Exception:
                setattr(self, name, Console())

    def _track(self, record: Record) -> None:
        metrics = with_aliases(record.metrics, self._config.aliases)
        for tracker in self._trackers:
            tracker.put((record.step, metrics))

    def _replayed_watch(self) -> Watch:
        watch = Watch()
        for record in (*self._file.records, *self._records.waiting):
            if record.kind == STEP:
                watch.observe(record.step, record.metrics)
        return watch

    def _align(self, step: int) -> None:
        if not self._aligned:
            self.rewind(step - 1)

    def _remaining(self) -> float | None:
        return median(self._recent) * max(0, self._total - self._step) if self._recent else None


class NullObserver(Observer):
    """For ranks other than 0: the same methods, no file, no output."""

    def __init__(self) -> None:
        pass

    def phase(self, name: str) -> AbstractContextManager[Phase]:
        return self._silent_phase(name)

    @contextmanager
    def _silent_phase(self, name: str) -> Iterator[Phase]:
        yield Phase(name)

    def sampling(self, progress: SamplingProgress) -> None: ...

    def starting(self, seconds: float, limit: float, line: str) -> None: ...

    def request(self, engine: str, name: str, started: float, tokens: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def has_evaluation(self, step: int) -> bool:
        return False

    def warn(self, message: str) -> None: ...

    def log(self, message: str) -> None: ...

    def report(self, message: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None: ...


def make_console(kind: str, title: str) -> Console:
    """`auto`: rich on a terminal, plain elsewhere."""
    if kind == "off":
        return Console()
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if kind == "rich" or (kind == "auto" and terminal):
        from megatron_dapo.observe.rich_console import RichConsole

        return RichConsole(title)
    return PlainConsole()


def _key(record: Record) -> tuple[object, ...]:
    """Identifies a record: one step has one step record, and an evaluation for each set of scores."""
    return (record.step, record.kind, *record.metrics)
