"""The observer: rank 0 tells it what happens, and it records and shows it. All other ranks have a `NullObserver`.

Promises:
- The line of a step is on disk in metrics.jsonl before `step` returns.
- After `rewind(n)` the files hold what a run that ended with step n would have left: a resumed run's metrics.jsonl and
  samples/ equal an uninterrupted run's, except for wall-clock metrics (`names.is_wall_clock`).
- A process that records without a `rewind` begins its run anew: what an earlier one recorded from that step on is
  forgotten.
- Nothing that is drawn, warned about or sent to a tracker can change or end the training. Only a metrics.jsonl that
  cannot be written does.

Steps count from 1: `step(3, …)` is the third, and the step of the checkpoint `step_3`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dapo.config.observe import ObserveConfig
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.choose_console import make_display
from megatron_dapo.observe.console import Display, SamplingProgress
from megatron_dapo.observe.diagnosis import Watch
from megatron_dapo.observe.metrics_file import EVAL, STEP, MetricsFile, Record, plain_numbers
from megatron_dapo.observe.trackers import Tracker, make_trackers
from megatron_dapo.types import Group


class Phase:
    """A part of a step that is being timed; `update` draws how far it is."""

    def __init__(self, name: str, show: Callable[[Callable[[Display], None]], None] = lambda draw: None) -> None:
        self.name, self._show = name, show
        self.started = time.monotonic()
        self.inner = 0.0  # seconds of phases within this one, which count as theirs

    def update(self, done: float, total: float, text: str = "") -> None:
        self._show(lambda display: display.progress(self.name, done, total, text))


class Stopwatch:
    """Seconds by phase since the last lap. Phases may nest, each second counts once, so they add up to the lap."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stack: list[Phase] = []
        self._lap_started: float | None = None

    def enter(self, phase: Phase) -> None:
        if self._lap_started is None:
            self._lap_started = phase.started
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        self._credit(phase, time.monotonic())
        self._stack.remove(phase)

    def _credit(self, phase: Phase, now: float) -> None:
        """Counts what has passed of a phase, for itself and against the phase around it."""
        elapsed, outer = now - phase.started, self._stack.index(phase) - 1
        self._seconds[phase.name] = self._seconds.get(phase.name, 0.0) + elapsed - phase.inner
        if outer >= 0:
            self._stack[outer].inner += elapsed
        phase.started, phase.inner = now, 0.0

    def lap(self) -> dict[str, float]:
        """`time/<phase>`, `time/other` and `time/step` since the last lap or, the first time, the first phase."""
        now = time.monotonic()
        for phase in reversed(self._stack):  # still open: what has passed belongs to this lap
            self._credit(phase, now)
        for phase in self._stack:
            phase.inner = 0.0
        total = 0.0 if self._lap_started is None else now - self._lap_started
        other = max(0.0, total - sum(self._seconds.values()))
        found = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds, self._lap_started = {}, now
        return found | {"time/other": other, "time/step": total}


class Observer:
    """Draws, records, warns. `first_step` steps were done before this process; `settings` is the resolved config."""

    def __init__(
        self, config: ObserveConfig, run_dir: Path, *, total_steps: int, settings: dict[str, Any], first_step: int = 0
    ) -> None:
        self._config, self._dir = config, Path(run_dir)
        self._total, self._step = total_steps, first_step
        self._trackers = make_trackers(config, self._dir, settings)  # first: it may find that a package is missing
        self._broken: set[str] = set()
        self._aligned = False  # whether what is on file is known to be the past of what this process records
        self._file = MetricsFile(self._dir / "metrics.jsonl")
        self._watch = self._replayed_watch()
        self._stopwatch = Stopwatch()
        self._recent: deque[float] = deque(maxlen=20)
        self._display = make_display(config.console, self._dir.name)

    def phase(self, name: str) -> AbstractContextManager[Phase]:
        """Times a part of the current step: `time/<name>` of the next `step`. Phases of one thread; they may nest."""
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name, self._show)
        self._stopwatch.enter(phase)
        self._show(lambda display: display.phase_started(name))
        try:
            yield phase
        finally:
            self._stopwatch.leave(phase)
            self._show(lambda display: display.phase_ended(name))

    def sampling(self, progress: SamplingProgress) -> None:
        """Draws the sampler's progress; cheap, and safe from any thread."""
        self._show(lambda display: display.sampling(progress))

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Records a finished step, with the times of the phases since the last one."""
        self._align(step)
        times = self._stopwatch.lap()
        record = Record(step, STEP, plain_numbers(metrics) | times)
        if transcripts.is_due(step, self._config.samples_every) and groups:
            self._write_transcripts(step, groups)
        self._file.append(record)  # after the transcripts: a step that is recorded has them
        self._step = step
        self._recent.append(times["time/step"])
        self._show(lambda display: display.step(step, self._total, record.metrics, self._remaining()))
        self._track(lambda tracker: tracker.log(step, record.metrics))
        for finding in self._watch.observe(step, record.metrics):
            if self._config.warnings:
                self.warn(finding.message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records scores after `step`. Scores that are on record for this step (a resumed run's) are not repeated."""
        self._align(step)
        record = Record(step, EVAL, plain_numbers(metrics))
        known = {name for r in self._file.records if (r.step, r.kind) == (step, EVAL) for name in r.metrics}
        if not set(record.metrics) <= known:
            self._file.append(record)
            self._track(lambda tracker: tracker.log(step, record.metrics))
        self._show(lambda display: display.evaluation(step, record.metrics))

    def warn(self, message: str) -> None:
        """Shown, and kept in logs/warnings.log."""
        self._show(lambda display: display.warn(message))
        with suppress(OSError):
            (self._dir / "logs").mkdir(exist_ok=True)
            with (self._dir / "logs" / "warnings.log").open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} step {self._step}: {message}\n")

    def rewind(self, step: int) -> None:
        """Forgets everything recorded after `step`: the run goes on from its checkpoint of that step."""
        self._aligned = True
        self._file.rewind(step)
        transcripts.rewind(self._dir / "samples", step)
        self._step, self._watch = step, self._replayed_watch()
        self._track(lambda tracker: tracker.rewind(step))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that a resumed run goes on in the same places. JSON values."""
        return {tracker.name: tracker.state() for tracker in self._trackers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before the first `step`."""
        for tracker in self._trackers:
            tracker.restore(state.get(tracker.name, {}))

    def close(self, status: str) -> None:
        """The last call; `status` is a word for the reader: finished, stopped, failed."""
        self._track(lambda tracker: tracker.close(status))
        self._file.close()
        if self._config.report and self._file.records:
            self._write_report()
        self._show(lambda display: display.close(status))

    def _write_transcripts(self, step: int, groups: Sequence[Group]) -> None:
        chosen = transcripts.choose(step, groups, self._config.samples_groups, self._config.samples_answers)
        try:
            transcripts.write(self._dir / "samples", step, chosen)
        except OSError as error:
            self.warn(f"no transcripts of step {step}: {error}")

    def _write_report(self) -> None:
        from megatron_dapo.observe.report import write_report

        try:
            write_report([self._dir], self._dir / "report.html", png=False)
        except Exception as error:  # a picture must not turn a finished run into a failed one
            self.warn(f"no report: {type(error).__name__}: {error}")

    def _show(self, draw: Callable[[Display], None]) -> None:
        """A terminal that is gone, or cannot draw, silences the display."""
        try:
            draw(self._display)
        except Exception:
            self._display = Display()

    def _track(self, action: Callable[[Tracker], None]) -> None:
        """Does it with every tracker; one that fails is left alone from then on, with a warning."""
        for tracker in self._trackers:
            if tracker.name in self._broken:
                continue
            try:
                action(tracker)
            except Exception as error:
                self._broken.add(tracker.name)
                self.warn(f"{tracker.name} failed and is switched off: {type(error).__name__}: {error}")

    def _replayed_watch(self) -> Watch:
        watch = Watch()
        for record in self._file.records:
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

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None: ...
