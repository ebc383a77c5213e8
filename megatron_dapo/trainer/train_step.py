"""One step being trained: its batch on this rank, its mini-batches, and how many updates are done.

A step can be saved between two of its updates and continued after a resume. Rank 0 holds the groups that it was made
of; the other ranks get from rank 0 what they need (`batch_sharing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_dapo import fault_points
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import Floats, TrainBatch, trained_tokens
from megatron_dapo.policy.loss_func import StepMetrics
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import NonFiniteError
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.batch_sharing import share_batch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.logprob_gate import check_gate
from megatron_dapo.trainer.throughput import StepProfiler, throughput_metrics
from megatron_dapo.types import StepBatch, json_default


@dataclass(slots=True)
class TrainStep:
    batch: TrainBatch
    mini_batches: list[list[int]]  # sample indices of each update
    updates_done: int = 0
    rollout_metrics: dict[str, float] = field(default_factory=dict)  # rank 0
    update_metrics: StepMetrics = field(default_factory=StepMetrics)
    source: StepBatch | None = None  # rank 0

    @classmethod
    def share(cls, source: StepBatch | None, config: Config, collectives: Collectives, policy: Policy) -> TrainStep:
        """Collective. Rank 0 passes the sampled batch: rewards, advantages and masks are decided there. The other ranks
        get the samples that they train on."""

        def shape() -> tuple[TrainBatch, dict[str, float], list[list[int]]]:
            assert source is not None
            batch, metrics = shape_batch(source, config)
            return batch, metrics | source.metrics, mini_batches(source, config)

        shaped = collectives.on_driver(shape, "computing advantages")
        batch, metrics, mini = shaped if shaped is not None else (None, {}, None)
        # The load balancing loss of a MoE model counts the tokens of the whole mini-batch on every rank.
        everywhere, indices = share_batch(
            collectives, batch, mini, policy.step.shares, whole_log_probs=policy.shape.is_moe
        )
        return cls(everywhere, indices, rollout_metrics=metrics, source=source)

    @property
    def complete(self) -> bool:
        return self.updates_done == len(self.mini_batches)

    @property
    def trained_tokens(self) -> NDArray[np.bool_]:
        """[responses], rank 0: the tokens that the policy generated."""
        assert self.source is not None
        return trained_tokens(self.source.samples)

    def sampled_by(self, version: int) -> bool:
        """Whether every token was sampled from this weight version (rank 0)."""
        return self.source is not None and all(
            span.version == version for sample in self.source.samples for span in sample.weight_spans
        )

    def metrics(self, policy: Policy) -> dict[str, float]:
        found = {**self.rollout_metrics, **self.update_metrics.result("train/")}
        seconds, ranks = found.get("train/update_seconds", 0.0), policy.runtime.world_size
        return found | throughput_metrics(policy.shape, self.batch.lengths, seconds, ranks)

    # ---- saved between two updates ----

    def to_state(self) -> dict[str, Any]:
        """Rank 0."""
        assert self.source is not None
        return {
            "batch": self.source.to_state(),
            "metrics": self.rollout_metrics,
            "mini_batches": len(self.mini_batches),
            "done": self.updates_done,
            "updates": self.update_metrics.to_state(),
            "old_logprobs": self.batch.old_logprobs,
            "ref_logprobs": self.batch.ref_logprobs,
        }

    @classmethod
    def restore(
        cls, state: dict[str, Any] | None, config: Config, collectives: Collectives, policy: Policy
    ) -> TrainStep:
        """Collective. Rank 0 passes the state."""
        step = cls.share(StepBatch.from_state(state["batch"]) if state else None, config, collectives, policy)
        if state is not None:
            step.rollout_metrics = state["metrics"]
            step.update_metrics = StepMetrics.from_state(state["updates"])
            step.batch.old_logprobs, step.batch.ref_logprobs = (
                _float32(state["old_logprobs"]), _float32(state["ref_logprobs"]),
            )  # fmt: skip
        collectives.on_driver(lambda: _check_mini_batches(state, step), "continuing the interrupted step")
        done = collectives.share_array(np.array([state["done"]]) if state else None)
        assert done is not None
        step.updates_done = int(done[0])
        step.batch.old_logprobs = collectives.share_array(step.batch.old_logprobs)
        step.batch.ref_logprobs = collectives.share_array(step.batch.ref_logprobs)
        return step

    def dump(self, folder: Path, step: int) -> None:
        """Rank 0. Writes the samples of the next mini-batch, whose update failed, to be looked at."""
        if self.source is not None:
            folder.mkdir(exist_ok=True)
            samples = [self.source.samples[i].to_state() for i in self.mini_batches[self.updates_done]]
            text = orjson.dumps(samples, default=json_default)
            (folder / f"step_{step}_update_{self.updates_done}.json").write_bytes(text)


def _check_mini_batches(state: dict[str, Any] | None, step: TrainStep) -> None:
    assert state is not None
    saved, ours = state.get("mini_batches", len(step.mini_batches)), len(step.mini_batches)
    if saved != ours:
        raise ConfigError(
            f"the checkpoint was saved after {state['done']} of {saved} updates of a step, but with this "
            f"trainer.mini_batch_prompts the step has {ours}: use the saved setting until the step is done"
        )


def _float32(values: Any) -> Floats | None:
    return None if values is None else np.asarray(values, dtype=np.float32)


# Training on one step: log-probs before the first update, the gate, and the updates themselves.


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
