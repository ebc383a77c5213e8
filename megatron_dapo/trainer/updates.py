"""Training on one step: log-probs before the first update, the gate, and the updates themselves.

A mini-batch whose loss or gradient is not finite changes no weight and is skipped. Its samples are written to `dumps/`,
and too many in a row end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_dapo import fault_points
from megatron_dapo.config import Config
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import Floats
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.logprob_gate import check_gate
from megatron_dapo.trainer.profiler import StepProfiler
from megatron_dapo.trainer.train_step import TrainStep


class TooManySkippedUpdates(UserError):
    """More updates in a row were not finite than `trainer.max_skipped_updates`."""


class Updates:
    """Every method is called by all ranks, in the same order."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        collectives: Collectives,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._policy, self._collectives = config, policy, collectives
        self._log, self._warn = log, warn
        self.gate_passed = not config.trainer.gate.enabled
        self.skipped_in_a_row = 0
        self._profiler = StepProfiler(config, policy.runtime.rank)

    def prepare(self, step: TrainStep, version: int, report: Callable[[str], None]) -> None:
        """Before the first update, at weight version `version`: old log-probs where the ratio needs them, the gate on
        the first batch, whose result is reported, and the reference where KL needs it."""
        self._profiler.begin(version + 1)
        fault_points.reach("loop/before_log_probs")
        recompute = self._config.recomputes_old_logprobs
        if recompute or not self.gate_passed:
            logprobs = self._policy.old_log_probs(step.batch, step.mini_batches)
            if not self.gate_passed:
                report(self._pass_gate(step, version, logprobs))
            if recompute:
                step.batch.old_logprobs = logprobs
        if self._policy.needs.reference:
            step.batch.ref_logprobs = self._policy.reference_log_probs(step.batch, step.mini_batches)

    def _pass_gate(self, step: TrainStep, version: int, logprobs: Floats) -> str:
        """Only tokens of the current weights can be compared; a batch from before a resume may hold older ones."""
        self.gate_passed = True
        if not self._collectives.agree(step.sampled_by(version)):
            return "the gate was not checked: this batch was sampled from older weights"
        # Rank 0 has the engine's log-probs of every sample.
        gate = self._config.trainer.gate
        gap = self._collectives.on_driver(
            lambda: check_gate(step.batch, logprobs, gate, step.trained_tokens), "checking the gate"
        )
        if gap is not None and version == 0:  # a resumed run records what an uninterrupted one does
            step.rollout_metrics |= gap.metrics
        return str(gap)

    def make_one(self, step: TrainStep, version: int) -> None:
        """The next update of the step."""
        try:
            fault_points.reach("loop/before_update")
            batch = step.batch.select(step.mini_batches[step.updates_done])
            metrics = self._policy.update(batch, first=step.updates_done == 0)
            self.skipped_in_a_row = 0
        except NonFiniteError as error:
            self._skip(step, version, error)
            metrics = {"update_skipped": 1.0}
        step.update_metrics.add(metrics)
        step.updates_done += 1
        if step.complete and (line := self._profiler.end(version + 1)):
            self._log(line)

    def _skip(self, step: TrainStep, version: int, error: NonFiniteError) -> None:
        self.skipped_in_a_row += 1
        self._warn(f"step {version}, update {step.updates_done} skipped: {error}")
        try:
            step.dump(Path(self._config.trainer.run_dir) / "dumps", version)
        except OSError as full:
            self._warn(f"its samples could not be written: {full}")
        limit = self._config.trainer.max_skipped_updates
        if self.skipped_in_a_row > limit:
            raise TooManySkippedUpdates(
                f"{self.skipped_in_a_row} updates in a row were skipped (trainer.max_skipped_updates is {limit}); "
                f"the last: {error}"
            ) from error
