"""The training loop: sample, compute advantages, update, record, save, sync weights, evaluate.

One SPMD program. Rank 0 drives the engines (`rollouts`), every rank trains (`policy`). Training is on-policy; with
`rollout.max_staleness` above 0 the next batches are generated while this one trains. The promises:

- A run that is killed at any moment and started again continues from its newest checkpoint with the same numbers.
- A run that is asked to stop, or that must end on an error while its weights are consistent, saves first.
- Errors of rank 0's work (sampling, grading, engines, files) are raised by every rank at the same point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo import fault_points
from megatron_dapo.checkpoints.checkpoints import Checkpoints, SaveReport
from megatron_dapo.checkpoints.folder import best_metric
from megatron_dapo.checkpoints.resume import record_settings
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data import RunData
from megatron_dapo.errors import CheckpointError, UserError
from megatron_dapo.evaluate import Evaluation
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.colocation import Colocation
from megatron_dapo.trainer.ending import RunEnded, not_saved, nothing_new, saved, say
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.trainer.run_lock import RunLock
from megatron_dapo.trainer.signals import Stopped, StopSignal
from megatron_dapo.trainer.train_step import TooManySkippedUpdates, TrainStep, Updates
from megatron_dapo.trainer.watchdog import Watchdog, log_folder
from megatron_dapo.trainer.weight_sync import WeightSync, describe, weight_buckets
from megatron_dapo.types import StepBatch
from megatron_dapo.weights.formats.megatron_reader import MegatronAsHF

SYNC_ATTEMPTS = 3


class Trainer:
    def __init__(
        self,
        config: Config,
        shape: Any,
        rendezvous: Rendezvous | None,
        stop: StopSignal,
        watchdog: Watchdog,
        lock: RunLock | None = None,
        data: RunData | None = None,
    ) -> None:
        """`lock`: rank 0's, of the run directory. `data`: the prompts, if they are loaded already."""
        self.config, self.lock, self.data = config, lock, data
        self.runtime = initialize(config.policy, seed=config.trainer.seed, rendezvous=rendezvous)
        self.collectives = Collectives(self.runtime, stop, watchdog.mark)
        self.policy = Policy(config, shape, self.runtime)
        self.updates = Updates(config, self.policy, self.collectives, self._log, self._warn)
        self.colocation = Colocation(config.rollout.shares_gpus, self.policy, self.collectives, self._log)
        self.checkpoints = Checkpoints(
            config.trainer.run_dir,
            config.trainer.checkpoint,
            self.runtime,
            warn=self._warn,
            mark=lambda doing: watchdog.mark(doing, False),  # a save that does not end is not progress
            guard=lock.verify if lock else lambda: None,
        )
        self.observer: Observer = NullObserver()
        self.rollouts: RolloutDriver | None = None  # rank 0
        self.steps_done = 0
        self.score: float | None = None
        self.current: TrainStep | None = None  # from its first update until it is recorded
        self.sampling = False  # whether the loop waits for the batch of the next step
        self.served_version: int | None = None  # by the engines
        self.unsaved = False  # whether anything has changed since the last save
        self.last_saved: Path | None = None  # or loaded; it exists

    # ---- the loop ----

    def run(self) -> int:
        try:
            self._start()
            while self.steps_done < self.config.trainer.steps:
                step = self._take_batch()
                self._generate_ahead()
                self._update(step)
                self._record(step)
                self._await_ahead()
                self._save_when_due()
                self._sync_weights()
                self._evaluate_when_due()
            self._finish()
            return 0
        except Stopped as stopped:
            return self._end_stopped(stopped)
        except ConfigError:
            raise
        except UserError as error:
            raise self._end_failed(error) from error
        except Exception as error:
            error.add_note(not_saved(error, self.last_saved))
            raise

    # ---- start ----

    def _start(self) -> None:
        """Weights from the model or the newest checkpoint; engines started and serving exactly those weights."""
        self.collectives.on_driver(self._open_run, "opening the run")
        resume = self.last_saved = self.checkpoints.newest()
        with self.observer.phase("start") as phase:
            phase.note("starting the engines")
            self.colocation.offload_all()
            opening = self.rollouts.start() if self.rollouts else None
            if self.colocation.shared:
                self.collectives.wait(opening, "starting the engines", stoppable=True)
                self.colocation.onload(self.rollouts)
            phase.note("loading weights")
            self.policy.load_hf(self._first_weights())
            if self.policy.needs.reference:
                self.policy.keep_reference()
            if resume:
                phase.note(f"loading checkpoint {resume.name}")
            state = self.checkpoints.load(self.policy, resume) if resume else None
            phase.note("waiting for the engines")
            buckets = weight_buckets(self.policy, self.config)
            self.weight_sync = WeightSync(buckets, self.collectives, self.config.rollout.weights.timeout)
            self.collectives.wait(opening, "starting the engines", stoppable=True)
            if resume:
                self._restore(state)
        if self.current is None:  # else the weights are between two versions, and no engine may serve them
            external = self.config.rollout.servers.urls  # an earlier run may have left other weights in them
            if resume or self.config.policy.megatron_checkpoint or self.colocation.shared or external:
                self._sync_weights()
            else:
                self.served_version = 0  # the engines have loaded the same model
            self._evaluate_when_due()

    def _first_weights(self) -> str | MegatronAsHF:
        converted = self.config.policy.megatron_checkpoint
        return MegatronAsHF(converted, self.policy.shape) if converted else self.config.policy.model

    def _open_run(self) -> None:
        config, run_dir = self.config, Path(self.config.trainer.run_dir)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        record_settings(run_dir, config, self.policy.shape)
        ranks, settings = self.runtime.world_size, config.model_dump(mode="json")
        self.observer = Observer(
            config.observe, run_dir, total_steps=config.trainer.steps, settings=settings, ranks=ranks
        )
        self.rollouts = RolloutDriver(self.config, self.observer, self.data)
        self.collectives.driver_progress = lambda: self.rollouts.progress if self.rollouts else 0

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Rank 0's state, on every rank."""

        def restore() -> Any:
            assert state is not None and self.rollouts is not None
            self.score = state["score"]
            batches = state["batches"] if "batches" in state else _older_batches(state)
            first = int(state["step"]) + (state["current"] is not None)
            self.rollouts.restore(state["rollouts"], batches, first + len(batches))
            self.observer.restore(state["observer"])
            self.observer.rewind(int(state["step"]))
            return np.array([state["step"], state["skipped_in_a_row"], state["current"] is not None], dtype=np.int64)

        numbers = self.collectives.share_array(self.collectives.on_driver(restore, "restoring the run's state"))
        assert numbers is not None
        self.steps_done, self.updates.skipped_in_a_row = int(numbers[0]), int(numbers[1])
        if numbers[2]:
            current = state["current"] if state is not None and self.rollouts is not None else None
            self.current = TrainStep.restore(current, self.config, self.collectives, self.policy)
            self.updates.gate_passed = True

    # ---- one step ----

    def _take_batch(self) -> TrainStep:
        """The next step on every rank: sampled now, generated ahead, or saved between two of its updates."""
        if self.current is not None:
            self._onload()
            return self.current
        batch = self._sample()
        self._onload()
        with self.observer.phase("advantages"):
            step = TrainStep.share(batch, self.config, self.collectives, self.policy)
        with self.observer.phase("log_probs"):
            self.updates.prepare(step, self.steps_done, self.observer.report)
        self.current, self.sampling = step, False
        if self.rollouts is not None:
            self.rollouts.remove_batch(self.steps_done)
        return step

    def _sample(self) -> StepBatch | None:
        """Rank 0 gets the next batch."""
        if self.served_version != self.steps_done:
            self._sync_weights()
        with self.observer.phase("rollout"):
            future = None
            if not self.collectives.agree(self.rollouts is not None and self.rollouts.has_batch(self.steps_done)):
                self.sampling = self.unsaved = True
            if self.rollouts is not None:
                self.rollouts.collect_to(self.steps_done)
                future = self.rollouts.batch(self.steps_done)
            return self.collectives.wait(future, f"sampling the batch of step {self.steps_done}", stoppable=True)

    def _update(self, step: TrainStep) -> None:
        updates = len(step.mini_batches)
        with self.observer.phase("update") as phase:
            while not step.complete:
                self.updates.make_one(step, self.steps_done)
                self.unsaved = True
                phase.update(step.updates_done, updates, "updates")
                if not step.complete:
                    doing = f"training, {step.updates_done} of {updates} updates of step {self.steps_done} done"
                    self.collectives.stop_if_requested(doing)

    def _record(self, step: TrainStep) -> None:
        """The step is done: from here on the run is between two steps."""
        self.steps_done += 1
        self.current = None

        def record() -> None:
            assert self.rollouts is not None and step.source is not None
            metrics = {**step.metrics(self.policy), **self.rollouts.reward_metrics()}
            if not self.config.evaluate.data.files:
                self.score = best_metric(metrics, self.config.trainer.checkpoint, self.score)
            self.observer.step(self.steps_done, metrics, step.source.groups)

        self.collectives.on_driver(record, f"recording step {self.steps_done}")

    def _onload(self) -> None:
        """Colocated: the trainer gets the GPUs back."""
        if self.colocation.engines_have_memory:
            with self.observer.phase("hand_over"):
                self.colocation.onload(self.rollouts)

    def _sync_weights(self) -> None:
        """The engines serve version `steps_done` afterwards. If no engine does, all weights are sent again: meanwhile
        servers are restarted."""
        for attempt in range(1, SYNC_ATTEMPTS + 1):
            self._onload()
            try:
                with self.observer.phase("sync"):
                    fault_points.reach("loop/before_sync")
                    self.colocation.offload_training_state()
                    self.weight_sync.send(self.steps_done, self.rollouts)
                    self.colocation.offload_weights()
                    report = self.weight_sync.serve(self.steps_done, self.rollouts)
                if report is not None:
                    self._log(describe(report))
                self.served_version = self.steps_done
                return
            except DriverError as error:
                if not error.by_engine or attempt == SYNC_ATTEMPTS:
                    raise
                self._warn(f"weight sync, attempt {attempt} of {SYNC_ATTEMPTS}: {error}")

    # ---- generating ahead ----

    def _generate_ahead(self) -> None:
        """Lets the engines generate what `rollout.max_staleness` admits. Not after a resume in the middle of a step:
        the weights of its beginning, which the engines must serve, do not exist any more."""
        rollout = self.config.rollout
        if not rollout.max_staleness or self.served_version is None or self.rollouts is None:
            return
        last = self.config.trainer.steps - 1
        self.rollouts.collect_to(last if rollout.in_flight else min(last, self.steps_done + rollout.max_staleness))

    def _await_ahead(self) -> None:
        """Unless weights change in flight, batches belong to the weights they were started with: they are complete
        before these change."""
        rollout = self.config.rollout
        if not rollout.max_staleness or rollout.in_flight or self.steps_done >= self.config.trainer.steps:
            return
        with self.observer.phase("rollout"):
            fault_points.reach("loop/before_await_ahead")
            ahead = self.rollouts.collected() if self.rollouts else None
            self.collectives.wait(ahead, f"sampling ahead of step {self.steps_done}", stoppable=True)

    @contextlib.contextmanager
    def _no_rollouts(self) -> Iterator[None]:
        """The engines generate nothing for a batch meanwhile; what it has so far is part of the state."""
        if self.config.rollout.in_flight:
            self._interrupt_rollouts()
        yield
        if self.config.rollout.in_flight:
            self._generate_ahead()

    def _interrupt_rollouts(self) -> None:
        interrupted = self.rollouts.interrupt() if self.rollouts else None
        self.collectives.wait(interrupted, "interrupting the rollouts")

    # ---- evaluate ----

    def _evaluate_when_due(self) -> None:
        """Also after a resume, if the run ended between the save and the end of this evaluation."""
        every, last = self.config.evaluate.every, self.steps_done == self.config.trainer.steps
        if not every or not self.config.evaluate.data.files or (self.steps_done % every and not last):
            return
        if self.collectives.agree(self.observer.has_evaluation(self.steps_done)):
            return
        with self.observer.phase("evaluate") as phase, self._no_rollouts():
            future: Future[Evaluation] | None = None
            if self.rollouts is not None:
                future = self.rollouts.evaluate(self.steps_done, lambda done, total: phase.update(done, total))
            result = self.collectives.wait(future, f"evaluating after step {self.steps_done}", stoppable=True)

        def record() -> None:
            assert result is not None
            self.score = best_metric(result.metrics(), self.config.trainer.checkpoint, self.score)
            if self.score is not None and not self.unsaved and self.steps_done:
                self.checkpoints.set_score(self.steps_done, self.score)
            result.write(Path(self.config.trainer.run_dir) / "evaluations" / f"step_{self.steps_done}")
            self.observer.evaluation(self.steps_done, result.metrics())

        self.collectives.on_driver(record, f"recording the evaluation after step {self.steps_done}")

    # ---- save and end ----

    def _save_when_due(self) -> None:
        """A stop is honoured here as well: the step is complete."""
        checkpoint, last = self.config.trainer.checkpoint, self.steps_done == self.config.trainer.steps
        self._check_lock()
        self._report_saves(self.checkpoints.poll())
        if checkpoint.at_end if last else checkpoint.every and self.steps_done % checkpoint.every == 0:
            with self._no_rollouts():
                self._save()
        if not last:
            self.collectives.stop_if_requested(f"between steps, {self.steps_done} steps done")

    def _save(self, *, wait: bool = False) -> None:
        self._check_lock()
        with self.observer.phase("checkpoint"):
            updates = self.current.updates_done if self.current else 0 if self.sampling else None
            state = {
                "skipped_in_a_row": self.updates.skipped_in_a_row,
                "observer": self.observer.state(),
                "rollouts": self.rollouts.state() if self.rollouts else None,
                "batches": self.rollouts.batches() if self.rollouts else [],
                "current": self.current.to_state() if self.current and self.rollouts else None,
            }
            self.unsaved = False  # unless the save fails: see _report_saves
            saves = self.checkpoints.save(self.policy, self.steps_done, updates, state, self.score, wait=wait)
        return self._report_saves(saves, must_succeed=wait)

    def _check_lock(self) -> None:
        """Nothing is written into a run directory that another run has taken over."""
        self.collectives.on_driver(lambda: self.lock.verify() if self.lock else None, "checking the run's lock")

    def _report_saves(self, saves: list[SaveReport], *, must_succeed: bool = False) -> None:
        """Every save ends here, on every rank, at once or at a later step. Training continues if one has failed."""
        for save in saves:
            if save.error is not None:
                self.unsaved = True
                self._warn(f"checkpoint {save.path.name} was not saved: {save.error}")
            else:
                self.last_saved = save.path
                self._log(
                    f"{save.path.name} saved: {save.bytes / 1e9:.3f} GB in {save.seconds:.1f} s, of which the loop "
                    f"waited {save.waited_seconds:.1f} s"
                )
        if must_succeed and saves and saves[-1].error is not None:
            raise CheckpointError(f"{saves[-1].path} was not saved: {saves[-1].error}")

    def _finish_saves(self) -> None:
        self._report_saves(self.checkpoints.finish(), must_succeed=True)

    def _finish(self) -> None:
        self._check_lock()
        self._finish_saves()
        self._close_together("finished")

    def _close_together(self, outcome: str) -> None:
        """The others wait until rank 0 has ended everything: Slurm ends a job soon after the first rank has ended."""
        self.observer.close(outcome)
        self.collectives.on_driver(self._close_rollouts, "ending the run")

    def _end_stopped(self, stopped: Stopped) -> int:
        outcome = self._save_what_changed()
        self._close_together(str(stopped))
        if self.rollouts is not None:
            say(f"{stopped}. {outcome}")
        return stopped.exit_code

    def _end_failed(self, error: UserError) -> RunEnded:
        may_save = isinstance(error, DriverError) and error.may_save
        if isinstance(error, TooManySkippedUpdates):  # raised by all ranks: they can wait for the save being written
            self._finish_saves()
        outcome = self._save_what_changed() if may_save else not_saved(error, self.last_saved)
        self.observer.close(f"failed: {error}")
        return RunEnded(f"{error}. {outcome}")

    def _save_what_changed(self) -> str:
        """Before the run ends. Collective; says what was saved and how to continue."""
        try:
            if not self.unsaved:
                self._finish_saves()
                return nothing_new(self.last_saved)
            self._stop_rollouts()
            self.colocation.onload_for_the_last_time(self.rollouts)
            self._save(wait=True)
            assert self.last_saved is not None
            return saved(self.last_saved)
        except (DriverError, CheckpointError) as error:
            return f"It could not be saved: {error}. {not_saved(error, self.last_saved)}"

    def _stop_rollouts(self) -> None:
        self._interrupt_rollouts()
        self.collectives.wait(self.rollouts.settled() if self.rollouts else None, "interrupting the rollouts")

    def close(self) -> None:
        self._close_rollouts()
        shutdown()

    def _close_rollouts(self) -> None:
        if self.rollouts is not None:
            self.rollouts.close()

    def _log(self, line: str) -> None:
        """What is worth keeping but is no metric: it may differ between a resumed and an uninterrupted run."""
        self.observer.log(line)

    def _warn(self, line: str) -> None:
        self.observer.warn(line)


def _older_batches(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Checkpoints once held at most one batch that was generated ahead."""
    return [] if state["next_batch"] is None else [state["next_batch"]]


def train(
    config: Config,
    shape: Any,
    rendezvous: Rendezvous | None = None,
    lock: RunLock | None = None,
    data: RunData | None = None,
) -> int:
    """Runs or resumes the run in `config.trainer.run_dir` on this rank; returns the exit code. `lock`: if the launcher
    holds it already. `data`: the prompts, if they are loaded already."""
    rendezvous = rendezvous or Rendezvous.from_environment()
    logs = log_folder(config.trainer.run_dir)
    with contextlib.ExitStack() as stack:
        if rendezvous.rank == 0 and lock is None:
            lock = stack.enter_context(RunLock(config.trainer.run_dir))
        stop = stack.enter_context(StopSignal())
        watchdog = stack.enter_context(Watchdog(config.trainer.heartbeat, logs, rendezvous.rank, rendezvous.world_size))
        trainer = Trainer(config, shape, rendezvous, stop, watchdog, lock, data)
        try:
            return trainer.run()
        finally:
            trainer.close()
