"""The training loop: sample → grade → filter → shape → advantages → updates → weight sync → observe → save → evaluate.

One SPMD program. Rank 0 drives the engines (`rollouts`), every rank trains (`policy`). Sampling, grading and filtering
are the sampler's; shaping and advantages are `shaping`'s. On-policy by default; with `rollout.max_staleness: 1` the
next batch is generated while this one trains. Every step ends in a state that can be saved, and a run that is killed
at any moment and started again continues from the newest checkpoint with the same numbers.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_dapo.config import Config, dump_config
from megatron_dapo.errors import UserError
from megatron_dapo.evaluate import EvalResult
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.batch import Floats, TrainBatch
from megatron_dapo.policy.metrics import StepMetrics
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import Rendezvous, initialize, shutdown
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.checkpoint import Checkpoints, SaveReport
from megatron_dapo.trainer.collectives import Together
from megatron_dapo.trainer.colocation import Turns
from megatron_dapo.trainer.logprob_gate import check_gate
from megatron_dapo.trainer.rollout_driver import Rollouts
from megatron_dapo.trainer.signals import REQUEUE, Stopped, StopSignal
from megatron_dapo.trainer.watchdog import Watchdog, log_folder
from megatron_dapo.types import StepBatch, json_default
from megatron_dapo.weights.formats.torch_dist_reader import TorchDistAsHF
from megatron_dapo.weights.sync import discard


@dataclass(slots=True)
class Work:
    """A step's batch on this rank, and how far its updates are. `source` is rank 0's."""

    batch: TrainBatch
    mini: list[list[int]]
    metrics: dict[str, float]
    done: int = 0
    updates: StepMetrics = field(default_factory=StepMetrics)
    source: StepBatch | None = None


class Trainer:
    def __init__(
        self, config: Config, shape: Any, place: Rendezvous | None, stop: StopSignal, watchdog: Watchdog
    ) -> None:
        self.config = config
        self.runtime = initialize(config.policy, seed=config.trainer.seed, rendezvous=place)
        self.is_driver = self.runtime.rank == 0
        self.together = Together(self.runtime, stop, watchdog.mark)
        self.policy = Policy(config, shape, self.runtime)
        self.turns = Turns(config.rollout.shares_gpus, self.policy, self.together, self._log)
        self.observer: Observer = NullObserver()
        self.checkpoints = Checkpoints(
            config.trainer.run_dir,
            config.trainer.checkpoint,
            self.runtime,
            self._saved,
            warn=lambda line: self.observer.warn(line),
            mark=watchdog.mark,
        )
        self.rollouts: Rollouts | None = None
        self.steps_done = 0
        self.skipped_in_a_row = 0
        self.last_score: float | None = None
        self.gate_passed = not config.trainer.gate.enabled
        self.current: Work | None = None  # a step that was stopped in the middle
        self.next_batch: Future[StepBatch] | StepBatch | None = None  # generated ahead (rank 0)

    # ---- the loop ----

    def run(self) -> int:
        try:
            self._start()
            while self.steps_done < self.config.trainer.steps:
                work = self._take_batch(self.steps_done)
                self._generate_ahead(self.steps_done + 1)
                self._update(work)
                self.steps_done += 1
                self._await_ahead()
                self._sync_weights()
                self._evaluate_when_due()
                self._observe(work)
                self._save_when_due()
            self._finish("finished")
            return 0
        except Stopped as stopped:
            self._save_stopped(stopped)
            self._finish(f"stopped while {stopped}")
            return REQUEUE

    # ---- start ----

    def _start(self) -> None:
        """Weights from the model or the newest checkpoint; engines up and serving exactly those weights."""
        if self.is_driver:
            self._open_run()
        resume = self.checkpoints.newest()
        with self.observer.phase("start"):
            self.turns.clear_the_way()
            opening = self.rollouts.start() if self.rollouts else None
            if self.turns.shared:
                self.together.wait(opening, "starting the engine")
                self.turns.to_trainer(self.rollouts)
            self.policy.load_hf(self._first_weights())
            if self.policy.needs.reference:
                self.policy.keep_reference()
            state = self.checkpoints.load(self.policy, resume) if resume else None
            self.stream = self.policy.weight_buckets(self.config.rollout.weights.bucket_bytes)
            self.together.wait(opening, "starting the engine")
            if state is not None:
                self._restore(state)
            if state is not None or self.config.policy.megatron_checkpoint or self.turns.shared:
                self._sync_weights()
        if state is None:
            self._evaluate_when_due()

    def _first_weights(self) -> str | TorchDistAsHF:
        converted = self.config.policy.megatron_checkpoint
        return TorchDistAsHF(converted, self.policy.shape) if converted else self.config.policy.model

    def _open_run(self) -> None:
        trainer = self.config.trainer
        run_dir = Path(trainer.run_dir)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_config(self.config))
        settings = self.config.model_dump(mode="json")
        self.observer = Observer(self.config.observe, run_dir, total_steps=trainer.steps, settings=settings)
        self.rollouts = Rollouts(self.config, self.observer.sampling)

    def _restore(self, state: dict[str, Any]) -> None:
        self.steps_done = int(state["step"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self.last_score = state["score"]
        if self.rollouts is not None:
            self.rollouts.restore(state["rollouts"])
            self.observer.restore(state["observer"])
            self.observer.rewind(self.steps_done)
            if state["next_batch"] is not None:
                self.next_batch = StepBatch.from_state(state["next_batch"])
        self.current = self._restore_current(state["current"])

    # ---- one step ----

    def _take_batch(self, step: int) -> Work:
        """The batch of this step on every rank: sampled now, generated ahead, or left over from a stop."""
        if self.current is not None:
            work, self.current = self.current, None
            self._to_trainer()
            return work
        if self.turns.shared and self.turns.trainers_turn:
            self._sync_weights()
        with self.observer.phase("rollout"):
            batch = self.next_batch if isinstance(self.next_batch, StepBatch) else None
            self.next_batch = None
            if not self._agree_on(batch is not None):
                future = self.rollouts.collect(step) if self.rollouts else None
                batch = self.together.wait(future, f"sampling the batch of step {step}", stoppable=True)
        self._to_trainer()
        with self.observer.phase("advantages"):
            work = self._share(batch)
        self._score_before_update(work)
        return work

    def _share(self, batch: StepBatch | None) -> Work:
        shaped, mini = None, None
        metrics: dict[str, float] = {}
        if batch is not None:
            shaped, metrics = shape_batch(batch, self.config)
            mini = mini_batches(batch, self.config)
            metrics |= batch.metrics
        everywhere, indices = self.together.share_batch(shaped, mini)
        return Work(everywhere, indices, metrics, source=batch)

    def _score_before_update(self, work: Work) -> None:
        """Old log-probs where the ratio needs them, the gate on the first batch, the reference where KL needs it."""
        recompute = self.config.trainer.recomputes_old_logprobs
        with self.observer.phase("log_probs"):
            if recompute or not self.gate_passed:
                logprobs, _ = self.policy.log_probs(work.batch)
                if not self.gate_passed:
                    self._pass_gate(work, logprobs)
                if recompute:
                    work.batch.old_logprobs = logprobs
            if self.policy.needs.reference:
                work.batch.ref_logprobs = self.policy.reference_log_probs(work.batch)

    def _pass_gate(self, work: Work, logprobs: Floats) -> None:
        """Only tokens of the current weights can be compared; a batch from before a resume may hold older ones."""
        current = work.source is not None and all(
            span.version == self.steps_done for sample in work.source.samples for span in sample.weight_spans
        )
        if self._agree_on(current):
            self._log(check_gate(work.batch, logprobs, self.config.trainer.gate))
        else:
            self._log("the gate was not checked: this batch was sampled from older weights")
        self.gate_passed = True

    def _update(self, work: Work) -> None:
        with self.observer.phase("update") as phase:
            for index in range(work.done, len(work.mini)):
                work.updates.add(self._one_update(work, index))
                work.done = index + 1
                phase.update(work.done, len(work.mini), "updates")
                if work.done < len(work.mini) and self.together.stop_requested():
                    self.current = work
                    raise Stopped(f"training, {work.done} of {len(work.mini)} updates of step {self.steps_done} done")

    def _one_update(self, work: Work, index: int) -> dict[str, float]:
        try:
            metrics = self.policy.update(work.batch.select(work.mini[index]))
            self.skipped_in_a_row = 0
        except NonFiniteError as error:
            self.skipped_in_a_row += 1
            self._dump(work, index)
            self.observer.warn(f"step {self.steps_done}, update {index} skipped: {error}")
            if self.skipped_in_a_row > self.config.trainer.max_skipped_updates:
                raise UserError(
                    f"{self.skipped_in_a_row} updates in a row were skipped (trainer.max_skipped_updates is "
                    f"{self.config.trainer.max_skipped_updates}); the last: {error}"
                ) from error
            metrics = {"update_skipped": 1.0}
        return metrics

    def _sync_weights(self) -> None:
        """The engines serve version `steps_done` afterwards, all of it or nothing."""
        with self.observer.phase("sync"):
            future = None
            self.turns.make_room()
            stream = self.turns.sending(self.stream.buckets())
            if self.rollouts is not None:
                buckets = _Watched(stream)
                future = self.rollouts.update_weights(self.steps_done, buckets)
                buckets.wait(future)  # its collectives run in another thread: nothing else may use the ranks meanwhile
            else:
                discard(stream)
            report = self.together.wait(future, f"bringing weight version {self.steps_done} to the engines")
            self.turns.all_sent()
        if report is not None:
            rate = report.bytes / report.seconds / 1e9
            self._log(
                f"weights: {report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s "
                f"({rate:.1f} GB/s); {report.proof}"
            )

    def _to_trainer(self) -> None:
        if self.turns.shared:
            with self.observer.phase("hand_over"):
                self.turns.to_trainer(self.rollouts)

    # ---- generating ahead ----

    def _generate_ahead(self, step: int) -> None:
        if self.config.rollout.max_staleness and step < self.config.trainer.steps and self.rollouts is not None:
            self.next_batch = self.next_batch or self.rollouts.collect(step)

    def _await_ahead(self) -> None:
        """The next batch belongs to the weights it was begun with: it is complete before they change."""
        if not self.config.rollout.max_staleness or self.steps_done >= self.config.trainer.steps:
            return
        with self.observer.phase("rollout"):
            ahead = self.next_batch if isinstance(self.next_batch, Future) else None
            if self._agree_on(ahead is not None):
                self.next_batch = self.together.wait(ahead, f"sampling the batch of step {self.steps_done}")

    def _agree_on(self, fact: bool) -> bool:
        """Rank 0's view, on every rank."""
        found = self.together.share_array(np.array([fact], dtype=np.bool_) if self.is_driver else None)
        assert found is not None
        return bool(found[0])

    # ---- evaluate, observe, save ----

    def _evaluate_when_due(self) -> None:
        every = self.config.evaluate.every
        last = self.steps_done == self.config.trainer.steps
        if not every or not self.config.evaluate.data.path or (self.steps_done % every and not last):
            return
        with self.observer.phase("evaluate") as phase:
            future: Future[EvalResult] | None = None
            if self.rollouts is not None:
                future = self.rollouts.evaluate(self.steps_done, lambda done, total: phase.update(done, total))
            result = self.together.wait(future, f"evaluating after step {self.steps_done}")
        if result is not None:
            self.observer.evaluation(self.steps_done, result.metrics())
            result.write(Path(self.config.trainer.run_dir) / "evaluations" / f"step_{self.steps_done}")
            self.last_score = self._score(result.metrics())

    def _observe(self, work: Work) -> None:
        if self.rollouts is None or work.source is None:
            return
        metrics = {**work.metrics, **work.updates.result("train/"), **self.rollouts.reward_metrics()}
        if not self.config.evaluate.data.path:
            self.last_score = self._score(metrics)
        self.observer.step(self.steps_done, metrics, work.source.groups)

    def _score(self, metrics: dict[str, float]) -> float | None:
        wanted = self.config.trainer.checkpoint.best_metric
        names = [wanted] if wanted else [n for n in metrics if "avg@" in n][:1] or ["reward/accuracy"]
        return next((float(metrics[name]) for name in names if name in metrics), self.last_score)

    def _save_when_due(self) -> None:
        """Also when a stop was asked for: the step is complete, so nothing is in the middle."""
        self.checkpoints.poll()
        every, last = self.config.trainer.checkpoint.every, self.steps_done == self.config.trainer.steps
        stop = self.together.stop_requested() and not last
        if last or stop or (every and self.steps_done % every == 0):
            self._save(None)
        if stop:
            raise Stopped(f"between steps, {self.steps_done} steps done")

    def _save_stopped(self, stopped: Stopped) -> None:
        """A stop in the middle of a step; one between steps has been saved already."""
        if str(stopped).startswith("between steps"):
            return
        if isinstance(self.next_batch, Future):
            self.next_batch.cancel()
        if self.rollouts is not None and not isinstance(self.next_batch, StepBatch):
            self.next_batch = self.rollouts.settle(self.steps_done + (self.current is not None))
        self._save(self.current.done if self.current else 0)

    def _save(self, updates: int | None) -> None:
        self._to_trainer()
        with self.observer.phase("checkpoint"):
            ahead = self.next_batch if isinstance(self.next_batch, StepBatch) else None
            state = {
                "skipped_in_a_row": self.skipped_in_a_row,
                "observer": self.observer.state(),
                "rollouts": self.rollouts.state() if self.rollouts else None,
                "next_batch": ahead.to_state() if ahead else None,
                "current": self._record_current(),
            }
            self.checkpoints.save(self.policy, self.steps_done, updates, state, self.last_score)

    def _saved(self, report: SaveReport) -> None:
        if report.error is not None:
            self.observer.warn(f"{report.path} was not saved: {report.error}")
        else:
            self._log(
                f"{report.path.name} saved: {report.bytes / 1e9:.3f} GB in {report.seconds:.1f} s, of which the loop "
                f"waited {report.waited_seconds:.1f} s"
            )

    def _record_current(self) -> dict[str, Any] | None:
        work = self.current
        if work is None or work.source is None:
            return None
        return {
            "batch": work.source.to_state(),
            "metrics": work.metrics,
            "done": work.done,
            "updates": work.updates.to_state(),
            "old_logprobs": _listed(work.batch.old_logprobs),
            "ref_logprobs": _listed(work.batch.ref_logprobs),
        }

    def _restore_current(self, record: dict[str, Any] | None) -> Work | None:
        if record is None:
            return None
        work = self._share(StepBatch.from_state(record["batch"]) if self.is_driver else None)
        work.metrics, work.done = record["metrics"], record["done"]
        work.updates = StepMetrics.from_state(record["updates"])
        work.batch.old_logprobs = _array(record["old_logprobs"])
        work.batch.ref_logprobs = _array(record["ref_logprobs"])
        self.gate_passed = True
        return work

    def _log(self, line: str) -> None:
        """What is worth keeping but is no metric: it may differ between a resumed and an uninterrupted run."""
        if self.is_driver:
            with (Path(self.config.trainer.run_dir) / "logs" / "trainer.log").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} after step {self.steps_done}: {line}\n")

    def _dump(self, work: Work, index: int) -> None:
        """The mini-batch that gave a NaN, for whoever wants to look."""
        if self.is_driver and work.source is not None:
            folder = Path(self.config.trainer.run_dir) / "dumps"
            folder.mkdir(exist_ok=True)
            samples = [work.source.samples[i].to_state() for i in work.mini[index]]
            (folder / f"step_{self.steps_done}_update_{index}.json").write_bytes(
                orjson.dumps(samples, default=json_default)
            )

    def _finish(self, status: str) -> None:
        self.checkpoints.finish()
        self.observer.close(status)

    def close(self) -> None:
        if self.rollouts is not None:
            self.rollouts.close()
        shutdown()


class _Watched:
    """An iterator that says when it has been read to its end."""

    def __init__(self, items: Any) -> None:
        self._items, self._read = items, Future[None]()

    def __iter__(self) -> Any:
        try:
            yield from self._items
        finally:
            self._read.set_result(None)

    def wait(self, reader: Future[Any]) -> None:
        """Until the end has been reached, or the reader has ended without starting."""
        while not self._read.done():
            with contextlib.suppress(TimeoutError):
                self._read.result(timeout=0.05)
            if reader.done():
                return


def _listed(values: Floats | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _array(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float32)


def train(config: Config, shape: Any, place: Rendezvous | None = None) -> int:
    """Runs or resumes the run in `config.trainer.run_dir` on this rank; returns the exit code."""
    place = place or Rendezvous.from_environment()
    logs = log_folder(config.trainer.run_dir)
    with StopSignal() as stop, Watchdog(config.trainer.heartbeat, logs, place.rank, place.world_size) as watchdog:
        trainer = Trainer(config, shape, place, stop, watchdog)
        try:
            return trainer.run()
        finally:
            trainer.close()
