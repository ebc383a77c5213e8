"""The training loop: sample, compute advantages, update, record, save, sync weights, evaluate.

One SPMD program. Rank 0 drives the engines (`rollouts`), every rank trains (`policy`). Training is on-policy; with
`rollout.max_staleness` above 0 the next batches are generated while this one trains. A critic is trained last, while
engines with GPUs of their own generate the next batch with the step's final policy. The promises:

- A run that is killed at any moment and started again continues from its newest checkpoint with the same numbers.
- A run that is asked to stop, or that must end on an error while its weights are consistent, saves first.
- Errors of rank 0's work (sampling, grading, engines, files) are raised by every rank at the same point.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.algorithm.advantages import reads_values
from megatron_dapo.checkpoints.folder import record_settings
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data import RunData
from megatron_dapo.errors import CheckpointError, EngineError, UserError
from megatron_dapo.files import explain, has_room
from megatron_dapo.observe.metrics_file import RecordError
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.loss_func import StepMetrics
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.colocation import Colocation
from megatron_dapo.trainer.rollouts import Rollouts
from megatron_dapo.trainer.run_lock import RunLock
from megatron_dapo.trainer.saves import CONTINUE, RunEnded, Saves
from megatron_dapo.trainer.signals import FAILED, Stopped, StopSignal
from megatron_dapo.trainer.train_step import TooManySkippedUpdates, TrainStep, Updates
from megatron_dapo.trainer.watchdog import Watchdog, log_folder
from megatron_dapo.weights.formats.megatron_reader import MegatronAsHF

BATCH_ATTEMPTS = 3  # to sample a batch that passes the gate


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
        self.config = config
        self.data = data
        self.observer: Observer = NullObserver()
        self.runtime = initialize(config.policy, seed=config.trainer.seed, rendezvous=rendezvous)
        self.collectives = Collectives(self.runtime, stop, watchdog.mark)
        self.rollouts = Rollouts(config, self.collectives)
        self.policy = Policy(config, shape, self.runtime)
        self.critic = Critic(config, self.policy) if reads_values(config.algorithm) else None
        self.updates = Updates(config, self.policy, self.collectives, self.critic)
        self.colocation = Colocation(config.rollout.shares_gpus, self.policy, self.collectives, self.rollouts)
        self.saves = Saves(config.trainer, self.collectives, lock, watchdog, self.critic)
        self.steps_done = 0
        self.current: TrainStep | None = None  # from its first update until it is recorded

    # ---- the loop ----

    def run(self) -> int:
        try:
            self._open_run()
            self._start()
            while self.steps_done < self.config.trainer.steps:
                step = self._take_batch()
                self._collect_ahead(step)
                self._update(step)
                self._record(step)
                self.rollouts.await_ahead(self.steps_done)
                self._save_when_due()
                self._sync_weights(self.steps_done)
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
            error.add_note(self.saves.not_saved(error))
            raise

    # ---- start ----

    def _open_run(self) -> None:
        config, run_dir = self.config, Path(self.config.trainer.run_dir)
        with self.collectives.on_driver("opening the run") as mine:
            if mine:
                (run_dir / "logs").mkdir(parents=True, exist_ok=True)
                settings, ranks = config.model_dump(mode="json"), self.runtime.world_size
                self.observer = Observer(
                    config.observe, run_dir, total_steps=config.trainer.steps, settings=settings, ranks=ranks
                )
                self.saves.observer = self.updates.observer = self.colocation.observer = self.observer
                self.rollouts.open(self.observer, self.data)

    def _start(self) -> None:
        """Weights from the model or the newest checkpoint; engines started and serving exactly those weights."""
        resume = self.saves.newest = self.saves.checkpoints.newest(self._check_state)
        if not resume:
            self._record_settings()
        with self.observer.phase("start") as phase:
            phase.note("starting the engines")
            self.colocation.offload_all()
            self.rollouts.start()
            if self.colocation.shared or self.config.rollout.shares_base:
                self.rollouts.await_start()
                self.colocation.onload()
            phase.note("loading weights")
            converted = self.config.policy.megatron_checkpoint
            if self.config.rollout.shares_base:
                self.policy.use_base(self.rollouts.shared_base() or {})
            else:
                source = MegatronAsHF(converted, self.policy.shape) if converted else self.config.policy.model
                self.policy.load_hf(source)
            if self.policy.needs.reference:
                self.policy.keep_reference()
            if self.critic is not None and not resume:
                with self.critic.turn():
                    self.critic.load_start()
            if resume:
                phase.note(f"loading checkpoint {resume.name}")
            state: dict[str, Any] | None = None
            if resume:
                loaded = self.saves.checkpoints.load(self.policy, resume, self._check_state)
                self.saves.newest, state = loaded
            phase.note("waiting for the engines")
            self.rollouts.connect(self.policy)
            self.rollouts.await_start()
            if state is not None:
                self._restore(state)
                self._record_settings()  # nothing has refused them
        if self.current is None:  # else the weights are between two versions, and no engine may serve them
            external = self.config.rollout.servers.urls  # an earlier run may have left other weights in them
            other_weights = converted or self.config.policy.lora.start  # than those that an engine loads
            if resume or other_weights or self.colocation.shared or external:
                self.colocation.sync_weights(self.steps_done)
            else:
                self.rollouts.served_version = 0  # the engines have loaded the same model
            self._evaluate_when_due()

    def _record_settings(self) -> None:
        with self.collectives.on_driver("recording the settings") as mine:
            if mine:
                record_settings(Path(self.config.trainer.run_dir), self.config, self.policy.shape)

    def _check_state(self, state: dict[str, Any]) -> None:
        """Rank 0: raises where `_restore`, or the step after it, would fail."""
        current, _ = state["current"], (state["step"], state["score"], state["skipped_in_a_row"])
        self.rollouts.check(state, [] if current is None else [current["batch"]])
        if current is not None:
            StepMetrics.from_state(current["updates"])
        self.observer.check(state["observer"])

    def _restore(self, state: dict[str, Any]) -> None:
        """`state` is complete on rank 0; the others have what they need of it."""
        self.steps_done = state["step"]
        self.saves.score = state["score"]
        self.updates.skipped_in_a_row = state["skipped_in_a_row"]
        self.updates.critic_skipped_in_a_row = state.get("critic_skipped_in_a_row", 0)
        self.updates.critic_is_ready = state.get("critic_is_ready", False)
        with self.collectives.on_driver("restoring the run's state") as mine:
            if mine:
                self.rollouts.restore(state, self.steps_done + (state["current"] is not None))
                self.observer.restore(state["observer"])
                self.observer.rewind(self.steps_done)
        if state["current"] is not None:
            self.current = TrainStep.restore(state["current"], self.config, self.collectives, self.policy)
            self.updates.gate_passed = True

    # ---- one step ----

    def _take_batch(self) -> TrainStep:
        """The next step on every rank: sampled now, generated ahead, or saved between two of its updates."""
        if self.current is not None:
            self.colocation.onload()
            return self.current
        self._sync_weights(self.steps_done)
        for _ in range(BATCH_ATTEMPTS):
            batch = self.rollouts.sample(self.steps_done)
            self.colocation.onload()
            with self.observer.phase("advantages"):
                step = TrainStep.share(batch, self.config, self.collectives, self.policy)
            with self.observer.phase("log_probs"):
                if self.updates.prepare(step, self.steps_done):
                    break
            self.rollouts.reject_batch(self.steps_done)
            self.colocation.sync_weights(self.steps_done)  # the engines may hold others
        else:
            with self.collectives.on_driver("sampling a batch") as mine:
                if mine:
                    raise EngineError(
                        f"the gate rejected {BATCH_ATTEMPTS} batches of step {self.steps_done + 1} (trainer.gate)"
                    )
        self.current = step
        step.rollout_metrics |= self.rollouts.reward_metrics()  # before the next batch is graded
        self.rollouts.remove_batch(self.steps_done)
        return step

    def _collect_ahead(self, step: TrainStep) -> None:
        """While `step` is trained. Pre-training of the critic leaves the weights as they are."""
        if not step.trains_policy:
            self.rollouts.keep_weights(self.steps_done + 1)
        self.rollouts.collect_ahead(self.steps_done)

    def _update(self, step: TrainStep) -> None:
        """The policy's updates depend on the critic's values alone, and only the next step's values on its updates."""
        updates = len(step.mini_batches)
        self.updates.add_values(step)
        with self.observer.phase("update") as phase:
            while not step.complete:
                self.updates.make_one(step, self.steps_done)
                self.saves.unsaved = True
                phase.update(step.updates_done, updates, "updates")
                if not step.complete:
                    doing = f"training, {step.updates_done} of {updates} updates of step {self.steps_done + 1} done"
                    self.collectives.stop_if_requested(doing)
        if self.critic is not None:
            self.saves.unsaved = True
            self._collect_during_critic()
            self.updates.train_critic(step, self.steps_done)
        self.updates.end_profile(self.steps_done)

    def _collect_during_critic(self) -> None:
        """The next batch. Engines that share the GPUs cannot, and with `max_staleness` they do already."""
        rollout, last = self.config.rollout, self.steps_done + 1 == self.config.trainer.steps
        if not (self.colocation.shared or rollout.max_staleness or last):
            self._sync_weights(self.steps_done + 1)
            self.rollouts.collect_ahead(self.steps_done)

    def _record(self, step: TrainStep) -> None:
        """The step is done: from here on the run is between two steps."""
        self.steps_done += 1
        self.current = None
        with self.collectives.on_driver(f"recording step {self.steps_done}") as mine:
            if mine:
                assert step.source is not None
                metrics = step.metrics(self.policy)
                if not self.config.evaluate.during_training:
                    self.saves.rate(metrics)
                source, arrays = step.source, step.arrays(self.config)
                self.observer.step(self.steps_done, metrics, source.groups, arrays, source.rejected)
        self._await_records()

    def _sync_weights(self, version: int) -> None:
        """The engines serve the weights of `version`: those after that step."""
        if self.rollouts.served_version != version:
            self.colocation.sync_weights(version)

    def _await_records(self) -> None:
        """No step is trained while the one before it cannot be recorded."""
        if not self.collectives.agree(bool(self.observer.unwritten)):
            return
        recorded = self._pause(self.observer.unwritten, lambda: not self.observer.write_kept())
        with self.collectives.on_driver(f"recording step {self.steps_done}") as mine:
            if mine and not recorded:
                raise RecordError(self.observer.unwritten)

    def _pause(self, why: str, is_over: Callable[[], bool]) -> bool:
        """All ranks wait until rank 0 finds that the reason is gone. False: it is not after the time limit."""
        self.saves.finish()
        limit = self.config.trainer.heartbeat.stuck
        safe = f"{self.saves.newest} is safe" if self.saves.newest else "There is no checkpoint yet"
        self.observer.warn(
            f"paused: {why}. {safe}; nothing is lost. The run goes on by itself when there is room, and ends after "
            f"{limit:g} s (trainer.heartbeat.stuck)"
        )
        with self.observer.phase("paused"):
            return self.rollouts.wait_until(is_over, limit)

    def _evaluate_when_due(self) -> None:
        """Also after a resume, if the run ended between the save and the end of this evaluation."""
        evaluate, last = self.config.evaluate, self.steps_done == self.config.trainer.steps
        if not evaluate.during_training or (self.steps_done % evaluate.every and not last):
            return
        recorded = self.observer.evaluation_of(self.steps_done)
        if self.collectives.agree(bool(recorded)):
            return self.saves.rate(recorded if self.steps_done else {})  # the checkpoint was saved before
        result = self.rollouts.evaluate(self.steps_done)
        with self.collectives.on_driver(f"recording the evaluation after step {self.steps_done}") as mine:
            if mine:
                assert result is not None
                self.saves.rate_saved(self.steps_done, result.metrics())
                folder = Path(self.config.trainer.run_dir) / "evaluations" / f"step_{self.steps_done}"
                try:
                    result.write(folder)
                except OSError as error:
                    self.observer.warn(f"{folder}: the responses are not kept: {explain(error, folder)}")
                self.observer.evaluation(self.steps_done, result.metrics())

    # ---- save ----

    def _save_when_due(self) -> None:
        """A stop is honoured here as well: the step is complete."""
        checkpoint, last = self.config.trainer.checkpoint, self.steps_done == self.config.trainer.steps
        self.saves.check_lock()
        self.saves.poll()
        if checkpoint.at_end if last else checkpoint.every and self.steps_done % checkpoint.every == 0:
            with self.rollouts.paused(self.steps_done):
                self._save()
        if not last:
            self.collectives.stop_if_requested(f"between steps, {self.steps_done} steps done")

    def _save(self, *, wait: bool = False) -> None:
        self.saves.check_lock()
        with self.observer.phase("checkpoint"):
            step = self.current
            updates = step.updates_done + step.critic_updates if step else 0 if self.rollouts.sampling else None
            state = {
                "skipped_in_a_row": self.updates.skipped_in_a_row,
                "critic_skipped_in_a_row": self.updates.critic_skipped_in_a_row,
                "critic_is_ready": self.updates.critic_is_ready,
                "observer": self.observer.state(),
                "current": step.to_state(self.policy) if step else None,
                **self.rollouts.state(),
            }
            self.saves.save(self.policy, self.steps_done, updates, state, wait=wait)

    # ---- end ----

    def _finish(self) -> None:
        """`finished` means that the last checkpoint is on disk and its files are as they were written."""
        self.saves.check_lock()
        self._await_records()
        self.saves.finish()
        if self.config.trainer.checkpoint.at_end and not self.saves.is_safe():
            self._save_last()
        self._close_together("finished")

    def _save_last(self) -> None:
        """The checkpoint after the last step could not be written, or is damaged already."""
        self._prepare_save()
        try:
            self._save(wait=True)
        except CheckpointError as error:
            folder, size = self.saves.checkpoints.folder, self.saves.no_room_for
            if not size or not self._pause(str(error), lambda: has_room(folder, size)):
                raise
            self._save(wait=True)
        if not self.saves.is_safe():
            raise CheckpointError(f"{self.saves.newest} is damaged right after it was written: the disk fails")

    def _prepare_save(self) -> None:
        self.rollouts.stop()
        self.colocation.onload_or_close_engines()

    def _close_together(self, outcome: str) -> None:
        """The others wait until rank 0 has ended everything: Slurm ends a job soon after the first rank has ended."""
        self.observer.close(outcome)
        with self.collectives.on_driver("ending the run"):
            self.rollouts.close()

    def _end_stopped(self, stopped: Stopped) -> int:
        saved, outcome = self._save_what_changed()
        self._close_together(str(stopped))
        if self.runtime.rank == 0:
            with contextlib.suppress(OSError):  # the terminal may be gone
                print(f"megatron-dapo: {stopped}. {outcome}", file=sys.stderr, flush=True)
        return stopped.exit_code if saved else FAILED

    def _end_failed(self, error: UserError) -> RunEnded:
        if isinstance(error, TooManySkippedUpdates):  # raised by all ranks: they can wait for the save being written
            self.saves.finish()
        may_save = isinstance(error, DriverError) and error.may_save
        outcome = self._save_what_changed()[1] if may_save else self.saves.not_saved(error)
        self.observer.close(f"failed: {error}")
        return RunEnded(f"{error}. {outcome}")

    def _save_what_changed(self) -> tuple[bool, str]:
        """Before the run ends. Collective; whether everything is saved, and in words, with how to continue."""
        try:
            self.saves.finish()
            if not self.saves.unsaved and not self.rollouts.sampling:
                return True, self.saves.nothing_new()
            self._prepare_save()
            self._save(wait=True)
            return True, f"Saved first: {self.saves.newest}; {CONTINUE}."
        except (DriverError, CheckpointError) as error:
            return False, f"It could not be saved: {error}. {self.saves.not_saved(error)}"

    def close(self, *, failed: bool) -> None:
        self.rollouts.close()
        shutdown(failed=failed)


def train(
    config: Config,
    shape: Any,
    rendezvous: Rendezvous | None = None,
    lock: RunLock | None = None,
    data: RunData | None = None,
    make_trainer: Callable[..., Trainer] = Trainer,
) -> int:
    """Runs or resumes the run in `config.trainer.run_dir` on this rank; returns the exit code. `lock`: if the launcher
    holds it already. `data`: the prompts, if they are loaded already."""
    rendezvous = rendezvous or Rendezvous.from_environment()
    logs = log_folder(config.trainer.run_dir)
    with contextlib.ExitStack() as stack:
        if rendezvous.rank == 0 and lock is None:
            lock = stack.enter_context(RunLock(config.trainer.run_dir))
        stop = stack.enter_context(StopSignal())
        heartbeat, (rank, ranks) = config.trainer.heartbeat, (rendezvous.rank, rendezvous.world_size)
        watchdog = stack.enter_context(Watchdog(heartbeat, logs, rank, ranks))
        trainer = make_trainer(config, shape, rendezvous, stop, watchdog, lock, data)
        failed = True
        try:
            code = trainer.run()
            failed = False
            return code
        finally:
            trainer.close(failed=failed)
