"""`trainer`: number and size of the steps, checkpoints, and the checks that end a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import PathText, Section


class CheckpointConfig(Section):
    """What is saved and kept in the run directory's checkpoints/. A run that must end early saves as well."""

    every: int = Field(5, ge=0, description="Save every this many steps, and at the end; 0: only at the end.")
    at_end: bool = Field(
        True, description="Save after the last step. false: of a run that finished, only metrics are of interest."
    )
    keep: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    keep_best: bool = Field(True, description="Also keep the checkpoint with the best `best_metric`.")
    best_metric: str = Field(
        "", description="Metric of the last evaluation or step; empty: the evaluation's avg@k, or else the accuracy."
    )


class GateConfig(Section):
    """Before the first update, the trainer's log-probs of the engine's samples must agree with the engine's own."""

    enabled: bool = Field(True, description="Compare them on the first batch of every start.")
    max_mean_gap: float = Field(0.05, gt=0, description="Largest mean |trainer − engine| in nats; 0.05 suits bf16.")
    max_gap: float = Field(5.0, gt=0, description="Largest |trainer − engine| of a single token.")


class HeartbeatConfig(Section):
    """Each rank watches another one. If a rank hangs, all ranks write their stacks and exit with code 76."""

    every: float = Field(5.0, ge=0, description="Seconds between two heartbeats of a rank; 0: no heartbeat.")
    silent: float = Field(300.0, gt=0, description="Seconds without a heartbeat after which a rank counts as hanging.")
    stuck: float = Field(
        9000.0,
        gt=0,
        description="Seconds without progress after which a rank counts as hanging. Progress is an update, a finished "
        "sample, a finished response of an evaluation, or a running weight update or engine start, which have time "
        "limits of their own. Must be more than rollout.sampler.stall_timeout, whose error saves the run.",
    )

    @model_validator(mode="after")
    def _order(self) -> HeartbeatConfig:
        if self.silent <= 2 * self.every:
            raise ValueError(
                f"silent ({self.silent:g}) must be more than two heartbeats (every is {self.every:g}): raise it"
            )
        return self


class TrainerConfig(Section):
    run_dir: PathText = Field("runs/default", description="Directory of the run. A run that is in it is resumed.")
    ranks: int | None = Field(
        None, ge=1, description="Ranks to start on this machine; null: all GPUs, or as many as the layout needs."
    )
    steps: int = Field(330, gt=0, description="Rollout steps; each makes prompts_per_step/mini_batch_prompts updates.")
    prompts_per_step: int = Field(512, gt=0, description="Groups that one rollout step trains on.")
    mini_batch_prompts: int = Field(32, gt=0, description="Prompts (groups) per optimizer update.")
    seed: int = Field(0, description="Decides the order of the prompts, and the samples if the engine takes seeds.")
    old_logprobs: Literal["auto", "recompute", "engine"] = Field(
        "auto",
        description="Log-probs of the denominator of the ratio. recompute: the trainer's own, before the first update "
        "of a step. engine: the engine's, without that pass; train/mismatch_* is then measured by the first update of "
        "a step. auto: recompute if a step has more than one update, or if algorithm.off_policy reads them.",
    )
    max_skipped_updates: int = Field(
        3, ge=0, description="Updates in a row that may be skipped because of a NaN or infinity before the run ends."
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    gate: GateConfig = GateConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> TrainerConfig:
        if self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of mini_batch_prompts "
                f"({self.mini_batch_prompts}), or the last update of every step is smaller than the others"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // self.mini_batch_prompts
