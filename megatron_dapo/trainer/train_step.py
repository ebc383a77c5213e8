"""One step being trained: its batch on this rank, its mini-batches, and how many updates are done.

A step can be saved between two of its updates and continued after a resume. Rank 0 holds the groups that it was made
of; the other ranks get from rank 0 what they need (`batch_sharing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.policy.batch import Floats, TrainBatch, trained_tokens
from megatron_dapo.policy.metrics import StepMetrics
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.advantages import mini_batches, shape_batch
from megatron_dapo.trainer.batch_sharing import share_batch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.throughput import throughput_metrics
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
