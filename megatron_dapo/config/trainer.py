"""`trainer`: number and size of the steps, checkpoints, and the checks that end a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import NonEmptyText, PathText, Section
from megatron_dapo.config.data import PromptFileConfig, SourceConfig, check_sources, files_of


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


# `evaluate`: the benchmarks, the number of responses per problem, and how they are sampled.


class EvalSourceConfig(SourceConfig):
    """One of several benchmarks. Null: the setting of `evaluate.data`."""

    samples: int | None = Field(None, ge=1, description="Responses per problem; null: evaluate.samples.")


class EvalDataConfig(PromptFileConfig):
    """One benchmark (`path`), or several (`sources`), each with metrics of its own: `eval/NAME/avg@k`."""

    sources: list[EvalSourceConfig] = Field(
        default_factory=list, description="Several benchmarks instead of `path`; all are evaluated."
    )

    @model_validator(mode="after")
    def _files(self) -> EvalDataConfig:
        check_sources(self.path, self.sources)
        return self

    @property
    def files(self) -> dict[str, PromptFileConfig]:
        """Every benchmark by its name in metrics; empty if none is named."""
        return files_of(self, self.sources)


class EvalConfig(Section):
    data: EvalDataConfig = EvalDataConfig()
    every: int = Field(5, ge=0, description="Evaluate after every this many training steps; 0: never.")
    samples: int = Field(32, ge=1, description="k: responses per problem, for avg@k, pass@k and maj@k.")
    temperature: float = Field(
        1.0,
        ge=0,
        description="As rollout.temperature; 0: always the most likely token, so samples: 1 is enough.",
    )
    top_p: float = Field(
        0.7, gt=0, le=1, description="As rollout.top_p; the published AIME scores were sampled with 0.7."
    )
    top_k: int = Field(-1, ge=-1, description="As rollout.top_k; -1: all tokens.")
    stop: list[NonEmptyText] | None = Field(None, description="Strings that end a response; null: rollout.stop.")
    max_response_tokens: int | None = Field(
        None, gt=0, description="Longest response, in tokens; null: rollout.max_response_tokens."
    )
    concurrency: int = Field(512, ge=1, description="Responses generated at one time.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the interval of avg@k.")
    pass_at: list[int] = Field(
        default_factory=list, description="The k of pass@k; empty: the powers of two up to samples."
    )

    def for_set(self, name: str) -> EvalConfig:
        """The settings of one benchmark: its own number of samples, and the k of pass@k that it allows."""
        samples = {source.label: source.samples for source in self.data.sources}.get(name) or self.samples
        return self.model_copy(update={"samples": samples, "pass_at": [k for k in self.pass_at if k <= samples]})

    def metric_prefix(self, name: str) -> str:
        """`eval/`, or `eval/NAME/` where there are several benchmarks."""
        return f"eval/{name}/" if self.data.sources else "eval/"

    @property
    def pass_at_values(self) -> list[int]:
        if self.pass_at:
            return sorted(set(self.pass_at))
        powers = [2**i for i in range(self.samples.bit_length()) if 2**i < self.samples]
        return [*powers, self.samples]

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        most = max([self.samples, *(source.samples or 0 for source in self.data.sources)])
        for k in self.pass_at:
            if not 1 <= k <= most:
                raise ValueError(f"pass_at has {k}, but needs 1 ≤ k ≤ samples ({most}): raise samples")
        return self


# `observe`: what is shown and recorded in addition to metrics.jsonl, which is always written.


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`. Offline runs are uploaded later with `wandb sync`."""

    mode: Literal["off", "online", "offline"] = Field(
        "off", description="off: nothing is sent. online: sent during the run. offline: kept in logs/ and sent later."
    )
    project: str = Field("megatron-dapo", description="Project that the run belongs to.")
    entity: str | None = Field(None, description="User or team that owns the project; null: your default one.")
    name: str | None = Field(None, description="Name of the run; null: the name of the run directory.")
    group: str | None = Field(None, description="Runs of one group are shown together, e.g. seeds; null: none.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")


class ObserveConfig(Section):
    console: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="auto: rich on a terminal, plain elsewhere. rich: live progress. plain: a line per step."
    )
    samples_every: int = Field(10, ge=0, description="Write a transcript to samples/ every so many steps; 0: never.")
    samples_groups: int = Field(2, ge=1, description="Prompts in one transcript.")
    samples_responses: int = Field(4, ge=1, description="Responses per prompt; right and wrong ones alternate.")
    trace_every: int = Field(
        50, ge=0, description="Write a timeline to traces/ every so many steps, for ui.perfetto.dev; 0: never."
    )
    warnings: bool = Field(True, description="Warn about unhealthy metrics and name likely causes (docs/diagnosis.md).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    aliases: list[Literal["verl", "prime-rl"]] = Field(
        default_factory=list,
        description="Send metrics to wandb and TensorBoard also under the names of these tools (docs/monitoring.md).",
    )
    profile_steps: list[int] = Field(
        default_factory=list,
        max_length=2,
        description="[first, last]: profile these steps (they count from 1) with torch.profiler on the ranks of "
        "profile_ranks; the traces are in profiles/. Empty: never.",
    )
    profile_ranks: list[int] = Field([0], description="Ranks that profile_steps profiles.")
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = Field(False, description="Event files in logs/tensorboard; needs the extra `tensorboard`.")

    @model_validator(mode="after")
    def _steps_in_order(self) -> ObserveConfig:
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps is {steps}: expected [first, last], and 1 ≤ first ≤ last")
        return self
