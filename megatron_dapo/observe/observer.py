"""The observer: rank 0 reports what happens in a run; the observer records and shows it. Other ranks: `NullObserver`.

Promises:
- The record of a step is on disk in metrics.jsonl before `step` returns, unless the disk is full (see the last point).
- After `rewind(n)` the files hold what a run that ended with step n would have left: metrics.jsonl and samples/ of a
  resumed run equal those of an uninterrupted run, except for wall-clock metrics (`is_wall_clock`).
- A process that records without calling `rewind` first starts the run again: records of an earlier process from that
  step on are removed.
- Nothing that the observer prints, writes or sends can change or end the training. Records, transcripts and log lines
  that cannot be written are kept in memory and written later, in order (`RetryQueue`); unwritten records are part of
  `state`, so a checkpoint holds them and metrics.jsonl has no gap after a resume.

Steps count from 1: `step(3, …)` is the third step and belongs to the checkpoint `step_3`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.console import STATUS, Console, PlainConsole, StatusFile
from megatron_dapo.observe.diagnosis import Watch
from megatron_dapo.observe.metrics_file import (
    EVAL,
    STEP,
    AppendFile,
    MetricsFile,
    Record,
    RecordError,
    RetryQueue,
    plain_numbers,
)
from megatron_dapo.observe.runs import record_environment
from megatron_dapo.observe.timeline import Timeline, write_trace
from megatron_dapo.observe.trackers import make_trackers, make_webhook, with_aliases
from megatron_dapo.types import Group, SamplerProgress, printable

UNWRITTEN_RECORDS = 10_000  # about 3 KB each
UNWRITTEN_TRANSCRIPTS = 8
UNWRITTEN_LOG_LINES = 1_000
UNSENT_RECORDS = 1_000  # of a tracker
TRACKED_SAMPLES = 64  # of a step
TRACKER_PAUSE = 4  # records; an attempt to reach wandb's server may take a minute


class Observer:
    """`total_steps`: the length of the run. `settings`: the resolved configuration, for the trackers. `ranks`: of the
    trainer."""

    def __init__(
        self, config: ObserveConfig, run_dir: Path, *, total_steps: int, settings: dict[str, Any], ranks: int = 1
    ) -> None:
        self._config = config
        self._dir = Path(run_dir)
        self._total = total_steps
        self._step = 0
        self._ranks = ranks
        self._trackers = make_trackers(config, self._dir, settings)  # first: it raises if a package is missing
        self._webhook = make_webhook(config.webhook_env, self._dir.name)
        self._file = MetricsFile(self._dir / "metrics.jsonl")
        self._console = make_console(config.console, self._dir.name)
        self._status: Console = StatusFile(self._dir / "logs" / STATUS, total_steps)
        record_environment(self._dir, ranks)
        self._logs = {
            name: RetryQueue(f"logs/{name}", AppendFile(self._dir / "logs" / name).write, limit=UNWRITTEN_LOG_LINES)
            for name in ("warnings.log", "trainer.log")
        }
        self._records = RetryQueue(
            "metrics.jsonl", self._file.append, limit=UNWRITTEN_RECORDS, errors=RecordError, then="The loop waits"
        )
        self._transcripts = RetryQueue(
            "samples/", partial(transcripts.write, self._dir / "samples"), limit=UNWRITTEN_TRANSCRIPTS
        )
        self._unsent = [
            RetryQueue(tracker.name, tracker.send, limit=UNSENT_RECORDS, errors=Exception, pause=TRACKER_PAUSE)
            for tracker in self._trackers
        ]
        self._aligned = False  # whether the records on file are known to precede what this process records
        self._watch = self._replayed_watch()
        self._stopwatch = Stopwatch()
        self._timeline = Timeline()
        self._recent: deque[float] = deque(maxlen=20)
        self._warn_all(self._file.damage)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Times a part of the current step: `time/<name>` of the next `step`. One thread only; phases may nest."""
        phase, started = Phase(name, self._show), time.monotonic()
        self._stopwatch.enter(name)
        self._show(lambda console: console.phase_started(name))
        try:
            yield phase
        finally:
            self._stopwatch.leave()
            self._timeline.phase(name, started, time.monotonic())
            self._show(lambda console: console.phase_ended(name))

    def sampling(self, progress: SamplerProgress) -> None:
        """Shows the sampler's progress. Cheap; may be called from any thread."""
        self._show(lambda console: console.sampling(progress))

    def starting(self, seconds: float, limit: float, line: str) -> None:
        """Shows how long the engines have been starting, and the last line of their log. Any thread."""
        text = "s for the engines" + (f"; their log: {line}" if line else "")
        self._show(lambda console: console.progress("start", round(seconds), limit, text))

    def request(self, engine: str, name: str, started: float, tokens: int) -> None:
        """A request that `engine` has finished now, for the timeline. Any thread; `started`: time.monotonic()."""
        self._timeline.request(engine, name, started, time.monotonic(), tokens)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        arrays: transcripts.Arrays | None = None,
        rejected: Mapping[str, Group] | None = None,
    ) -> None:
        """Records a finished step, with the times of the phases since the last one. `arrays`, of all its samples, and
        a rejected group for each reason are for samples/."""
        self._align(step)
        times = self._stopwatch.lap()
        record = Record(step, STEP, plain_numbers(metrics) | times | self._speed(metrics, times))
        samples = self._keep_samples(step, groups, arrays, rejected)
        self._warn_all(self._records.put(record))  # after the transcripts: the transcripts of a recorded step exist
        self._step = step
        self._recent.append(times["time/step"])
        remaining = median(self._recent) * max(0, self._total - step)
        self._show(lambda console: console.step(step, self._total, record.metrics, remaining))
        self._track(record)
        if samples is not None:
            self._send(replace(samples, transcripts=samples.transcripts[:TRACKED_SAMPLES], arrays={}))
        self._write_trace(step)
        for finding in self._watch.observe(step, record.metrics):
            if self._config.warnings:
                self.warn(finding.message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records scores after `step`. Scores that are already recorded for this step are not recorded again."""
        self._align(step)
        record = Record(step, EVAL, plain_numbers(metrics))
        if not set(record.metrics) <= {name for known in self._evaluations(step) for name in known.metrics}:
            self._warn_all(self._records.put(record))
            self._track(record)
        self._show(lambda console: console.evaluation(step, record.metrics))

    def evaluation_of(self, step: int) -> dict[str, float]:
        """The scores recorded after `step`. There are some if a run was stopped after evaluating and resumed."""
        return {n: x for known in self._evaluations(step) for n, x in known.metrics.items()} if self._aligned else {}

    def _evaluations(self, step: int) -> list[Record]:
        recorded = (*self._file.records, *self._records.waiting)
        return [record for record in recorded if (record.step, record.kind) == (step, EVAL)]

    def warn(self, message: str) -> None:
        """Shown, written to logs/warnings.log, and sent to the webhook."""
        self._show(lambda console: console.warn(message))
        self._log("warnings.log", f"after step {self._step}: {printable(message)}")
        if self._webhook is not None:
            self._webhook.send(self._step, message)

    def log(self, message: str) -> None:
        """Written to logs/trainer.log only: what is worth keeping but is neither a metric nor a warning."""
        self._log("trainer.log", f"after step {self._step}: {printable(message)}")

    def report(self, message: str) -> None:
        """Shown, and written to logs/trainer.log."""
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
            self._warn_all(self._records.put(record))
        transcripts.rewind(self._dir / "samples", step)
        self._step, self._watch = step, self._replayed_watch()
        for tracker, queue in zip(self._trackers, self._unsent, strict=True):
            unsent = [record for record in queue.waiting if record.step <= step]
            queue.waiting.clear()
            queue.waiting.extend(unsent)
            tracker.rewind(step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that a resumed run continues its metrics. JSON values."""
        return {"unwritten": [record.to_line() for record in self._records.waiting]} if self._records.waiting else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before `rewind` and the first `step`."""
        self._records.waiting.extend(Record.from_line(line) for line in state.get("unwritten", ()))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises where `restore` would fail."""
        for line in state.get("unwritten", ()):
            Record.from_line(line)

    @property
    def unwritten(self) -> str:
        """Why there are records that could not be written; empty if there are none."""
        return self._records.failure if self._records.waiting else ""

    def write_kept(self) -> str:
        """Tries again to write the records that could not be written; `unwritten` after that."""
        self._warn_all(self._records.flush())
        return self.unwritten

    def close(self, status: str) -> None:
        """The last call; `status` says how the run ended: finished, stopped, failed."""
        for queue in (self._records, self._transcripts, *self._unsent):
            self._warn_all(queue.flush())
        for tracker in self._trackers:
            try:
                tracker.close(status)
            except Exception as error:
                self.warn(f"{tracker.name} could not be closed: {type(error).__name__}: {error}")
        self._file.close()
        if self._config.report and self._file.records:
            self._write_report()
        for log in self._logs.values():
            self._warn_all(log.flush())
        self._show(lambda console: console.close(status))
        if self._webhook is not None:
            if status != "finished":
                self._webhook.send(self._step, f"run {status}")
            self._webhook.close()

    def _keep_samples(
        self, step: int, groups: Sequence[Group], arrays: transcripts.Arrays | None,
        rejected: Mapping[str, Group] | None,
    ) -> transcripts.StepSamples | None:  # fmt: skip
        config = self._config
        if not transcripts.is_due(step, config.samples_every) or not groups:
            self._warn_all(self._transcripts.flush())
            return None
        samples = transcripts.choose(step, groups, config.samples_groups, config.samples_responses, arrays, rejected)
        self._warn_all(self._transcripts.put(samples))
        return samples

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
            write_report([self._dir], self._dir / "report.html")
        except Exception as error:  # a report must not turn a finished run into a failed one
            self.warn(f"no report: {type(error).__name__}: {error}")

    def _warn_all(self, messages: Sequence[str]) -> None:
        for message in messages:
            self.warn(message)

    def _log(self, name: str, line: str) -> None:
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n"
        self._warn_all(self._logs[name].put(text.encode("utf-8", errors="backslashreplace")))

    def _show(self, draw: Callable[[Console], None]) -> None:
        """A console that fails is replaced by a silent one."""
        for name in ("_console", "_status"):
            try:
                draw(getattr(self, name))
            except Exception:
                setattr(self, name, Console())

    def _track(self, record: Record) -> None:
        self._send(Record(record.step, record.kind, with_aliases(record.metrics, self._config.aliases)))

    def _send(self, item: Record | transcripts.StepSamples) -> None:
        for queue in self._unsent:
            self._warn_all(queue.put(item))

    def _replayed_watch(self) -> Watch:
        watch = Watch()
        for record in (*self._file.records, *self._records.waiting):
            if record.kind == STEP:
                watch.observe(record.step, record.metrics)
        return watch

    def _align(self, step: int) -> None:
        if not self._aligned:
            self.rewind(step - 1)


class NullObserver(Observer):
    """For ranks other than 0: the same methods, no file, no output."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        yield Phase(name)

    unwritten = ""

    def evaluation_of(self, step: int) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def _nothing(self, *args: Any, **options: Any) -> None: ...

    sampling = starting = request = step = evaluation = warn = log = report = rewind = restore = close = _nothing
    check = _nothing

    def write_kept(self) -> str:
        return ""


class Phase:
    """A part of a step that is being timed."""

    def __init__(self, name: str, show: Callable[[Callable[[Console], None]], None] = lambda draw: None) -> None:
        self.name = name
        self._show = show

    def update(self, done: float, total: float, text: str = "") -> None:
        """Shows how far the phase is."""
        self._show(lambda console: console.progress(self.name, done, total, text))

    def note(self, text: str) -> None:
        """Shows what the phase is doing or waiting for now."""
        self._show(lambda console: console.note(self.name, text))


class Stopwatch:
    """Seconds by phase since the last lap. Phases may nest: each second counts for the innermost one, so the phases and
    `other` add up to the step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stack = ["other"]
        self._since: float | None = None  # what is before it has been counted

    def enter(self, phase: str) -> None:
        self._count()
        self._stack.append(phase)

    def leave(self) -> None:
        self._count()
        self._stack.pop()

    def lap(self) -> dict[str, float]:
        """`time/<phase>`, `time/other` and `time/step` since the last lap or, the first time, the first phase."""
        self._count()
        found, self._seconds = {"other": 0.0, **self._seconds}, {}
        return {f"time/{name}": seconds for name, seconds in found.items()} | {"time/step": sum(found.values())}

    def _count(self) -> None:
        now, name = time.monotonic(), self._stack[-1]
        if self._since is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


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
