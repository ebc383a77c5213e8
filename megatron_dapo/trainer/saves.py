"""The saves of a run: whether there is something to save, what was saved last, and what a user is told at the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.checkpoints.checkpoints import Checkpoints, SaveReport
from megatron_dapo.checkpoints.folder import best_metric
from megatron_dapo.config.trainer import TrainerConfig
from megatron_dapo.errors import CheckpointError, GateError, LockLost, UserError
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.run_lock import RunLock
from megatron_dapo.trainer.train_step import TooManySkippedUpdates
from megatron_dapo.trainer.watchdog import Watchdog

CONTINUE = "start the same command again to continue"
# Why nothing is saved after an error, and what to do. Only where it may help: start again.
REASONS: dict[type[BaseException], tuple[str, str]] = {
    GateError: ("no update was made", ""),
    TooManySkippedUpdates: ("the weights, the optimizer state or the data may be the cause", ""),
    CheckpointError: ("the checkpoint is what failed", f"; remove the cause, then {CONTINUE} from it"),
    LockLost: ("the run directory belongs to another run now", ""),
}
UNKNOWN = ("the ranks may not agree about the weights after this error", f"; {CONTINUE} from it")


class RunEnded(UserError):
    """The run has ended on an error; the message says what was saved."""


class Saves:
    """Every method up to `finish` is called by all ranks, in the same order."""

    def __init__(
        self,
        config: TrainerConfig,
        collectives: Collectives,
        lock: RunLock | None,
        watchdog: Watchdog,
        critic: Critic | None = None,
    ) -> None:
        """`lock`: rank 0's, of the run directory."""
        self.checkpoints = Checkpoints(
            config.run_dir,
            config.checkpoint,
            collectives.runtime,
            warn=lambda line: self.observer.warn(line),
            mark=partial(watchdog.mark, progress=False),  # a save that does not end is not progress
            guard=lock.verify if lock else lambda: None,
            critic=critic,
        )
        self.observer: Observer = NullObserver()
        self.score: float | None = None  # rank 0: of the current weights, for the best checkpoint
        self.unsaved = False  # whether anything has changed since the last save
        self.newest: Path | None = None  # the checkpoint that this process saved or loaded last; it exists
        self.no_room_for = 0  # bytes of the last save, if it failed because there was no room
        self._config = config
        self._collectives = collectives
        self._lock = lock

    def check_lock(self) -> None:
        """Nothing is written into a run directory that another run has taken over."""
        with self._collectives.on_driver("checking the run's lock"):
            if self._lock is not None:
                self._lock.verify()

    def poll(self) -> None:
        """Reports the save that is being written, if it has ended."""
        self._report(self.checkpoints.poll())

    def save(
        self, policy: Policy, step: int, updates: int | None, state: dict[str, Any], *, wait: bool = False
    ) -> None:
        """As `Checkpoints.save`. With `wait` a failure is a CheckpointError; otherwise training continues."""
        self.unsaved = False  # unless the save fails
        self._report(self.checkpoints.save(policy, step, updates, state, self.score, wait=wait), must_succeed=wait)

    def finish(self) -> None:
        """Waits for the save that is being written. If it fails, there is something unsaved."""
        self._report(self.checkpoints.finish())

    def is_safe(self) -> bool:
        """Whether everything is in a checkpoint whose files are on disk as they were written."""
        return not self.unsaved and self.newest is not None and self.checkpoints.is_good(self.newest)

    def _report(self, saves: list[SaveReport], *, must_succeed: bool = False) -> None:
        for save in saves:
            if save.error is not None:
                self.unsaved = True
                self.observer.warn(f"checkpoint {save.path.name} was not saved: {save.error}")
            else:
                self.newest = save.path
                self.observer.log(
                    f"{save.path.name} saved: {save.bytes / 1e9:.3f} GB in {save.seconds:.1f} s, of which the loop "
                    f"waited {save.waited_seconds:.1f} s"
                )
        self.no_room_for = saves[-1].bytes if saves and saves[-1].no_room else 0
        if must_succeed and saves and saves[-1].error is not None:
            raise CheckpointError(f"{saves[-1].path} was not saved: {saves[-1].error}")

    def rate(self, metrics: dict[str, float]) -> None:
        """Rank 0: the score of the current weights, if the metric that decides is among these."""
        self.score = best_metric(metrics, self._config.checkpoint, self.score)

    def rate_saved(self, step: int, metrics: dict[str, float]) -> None:
        """As `rate`, also for the checkpoint of `step` if there is one. Before the first step it is no checkpoint's."""
        self.rate(metrics if step else {})
        if self.score is not None and not self.unsaved and step:
            self.checkpoints.set_score(step, self.score)

    def nothing_new(self) -> str:
        return (
            f"Everything is in {self.newest}; {CONTINUE}." if self.newest else f"Nothing was trained yet; {CONTINUE}."
        )

    def not_saved(self, error: BaseException) -> str:
        kinds = [type(error), error.kind if isinstance(error, DriverError) else type(error.__cause__)]
        found = [reason for kind, reason in REASONS.items() if any(issubclass(known, kind) for known in kinds)]
        reason, advice = found[0] if found else UNKNOWN
        where = f"The last checkpoint of this run is {self.newest}{advice}"
        return f"Not saved: {reason}. {where if self.newest else 'There is no checkpoint'}."
