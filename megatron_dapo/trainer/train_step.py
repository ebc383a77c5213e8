"""One step: its batch on every rank, log-probs before the first update, the gate, and the updates themselves.

A step can be saved between two of its updates and continued after a resume. Rank 0 holds the groups that it was made
of. Every rank needs the lengths, advantages and masks of all samples, because the schedule and the loss's counts depend
on the whole mini-batch: they are broadcast. Tokens and log-probs are read only by the data-parallel rank that a sample
is assigned to; the others have zeros there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_dapo import fault_points
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.trainer import GateConfig
from megatron_dapo.errors import GateError, UserError
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.observe.transcripts import is_due
from megatron_dapo.policy.batch import PER_SAMPLE, Floats, Ints, TrainBatch, trained_tokens
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.loss_func import SKIPPED, StepMetrics
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import UpdateRefused
from megatron_dapo.trainer.advantages import add_values, mini_batches, shape_batch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.throughput import StepProfiler, throughput_metrics
from megatron_dapo.types import RoutedExperts, StepBatch, json_default

# The gate: before the first update of a step, trainer and engine must agree on the log-probs of the engine's samples.
# After the first batch only nonsense is stopped: rounding grows with a run, and one token in millions may differ much.
LATER_GAP = 10.0  # × max_mean_gap, for the batches after the first
STALE_GAP = 1.0  # nats, if the batch has tokens of older weights


def gate_limits(config: GateConfig, *, first: bool, fresh: bool) -> GateConfig:
    """Of a batch: the `first` one since the start, whose tokens are all from the current weights (`fresh`), or not."""
    if first and fresh:
        return config
    mean = LATER_GAP * config.max_mean_gap
    return config.model_copy(update={"max_mean_gap": mean if fresh else max(mean, STALE_GAP), "max_gap": float("inf")})


@dataclass(frozen=True, slots=True)
class Gap:
    """|log π_trainer − log π_engine| over the compared tokens, and KL(engine‖trainer) by its k3 estimate, in nats."""

    mean: float
    largest: float
    kl: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"trainer and engine agree: mean |gap| {self.mean:.3g} nats, largest {self.largest:.3g}, KL {self.kl:.3g}, "
            f"over {self.tokens} tokens"
        )

    @property
    def metrics(self) -> dict[str, float]:
        return {"gate/mean_gap": self.mean, "gate/max_gap": self.largest, "gate/kl": self.kl}


def check_gate(
    batch: TrainBatch, logprobs: Floats, config: GateConfig, trained: NDArray[np.bool_] | None = None
) -> Gap:
    """Compares the trainer's `logprobs` [responses] with the engine's, of the tokens that are `trained` (default: all).
    Raises GateError if the gap is beyond the limits."""
    assert batch.engine_logprobs is not None
    difference = logprobs.astype(np.float64) - batch.engine_logprobs
    if trained is not None:  # the engine has no log-probs of the other tokens
        difference = np.where(trained, difference, 0.0)
    gap, compared = np.abs(difference), len(difference) if trained is None else int(trained.sum())
    mean, largest = (float(gap.sum() / compared), float(gap.max())) if compared else (0.0, 0.0)
    if not (mean <= config.max_mean_gap and largest <= config.max_gap):
        worst = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
        sample = int(np.searchsorted(batch.response_offsets, worst, side="right")) - 1
        raise GateError(
            f"trainer and engine disagree about the engine's own samples: mean |gap| {mean:.4g} nats (limit "
            f"{config.max_mean_gap:g}), largest {largest:.4g} (limit {config.max_gap:g}) in sample {sample}, response "
            f"token {worst - int(batch.response_offsets[sample])}. The usual causes: the engine serves other weights "
            "than policy.model, a different RoPE base or norm epsilon, another sampling temperature, or less precision "
            "than trainer.gate allows for."
        )
    return Gap(mean, largest, float((np.expm1(difference) - difference).sum() / max(compared, 1)), compared)


MiniBatches = list[list[int]]
Shares = Callable[[Ints, MiniBatches], list[list[int]]]  # lengths, mini-batches: samples of each data-parallel rank
SHARED_OTHERWISE = ("loss_mask", "routed_experts", "values", "returns")


@dataclass(slots=True)
class TrainStep:
    batch: TrainBatch
    mini_batches: list[list[int]]  # sample indices of each update
    updates_done: int = 0
    rollout_metrics: dict[str, float] = field(default_factory=dict)  # rank 0
    update_metrics: StepMetrics = field(default_factory=StepMetrics)
    source: StepBatch | None = None  # rank 0
    trains_policy: bool = True  # False: pre-training of the critic
    critic_updates: int = 0  # done
    critic_metrics: StepMetrics = field(default_factory=StepMetrics)
    scores: list[Floats] = field(default_factory=list)  # of each update, where they are recorded

    @classmethod
    def share(cls, source: StepBatch | None, config: Config, collectives: Collectives, policy: Policy) -> TrainStep:
        """Collective. Rank 0 passes the sampled batch: rewards, advantages and masks are decided there. The other ranks
        get the samples that they train on."""
        batch, mini = None, None
        metrics: dict[str, float] = {}
        with collectives.on_driver("computing advantages"):
            if source is not None:
                batch, metrics = shape_batch(source, config)
                metrics |= source.metrics
                mini = mini_batches(source, config)
        whole = config.counts_by_log_probs
        everywhere, indices = share_batch(collectives, batch, mini, policy.step.shares, whole_log_probs=whole)
        return cls(everywhere, indices, rollout_metrics=metrics, source=source)

    @property
    def complete(self) -> bool:
        """Whether the policy's updates are done. The critic's follow."""
        return not self.trains_policy or self.updates_done == len(self.mini_batches)

    def add_values(self, values: Floats, config: Config, collectives: Collectives, policy: Policy) -> None:
        """Collective. The critic's values [responses], and what rank 0 makes of them: advantages and returns."""
        self.batch.values = values
        arrays: dict[str, Floats | None] = {"token_advantages": None, "returns": None}
        with collectives.on_driver("computing advantages"):
            if self.source is not None:
                arrays["returns"], metrics = add_values(self.batch, self.source, values, config)
                arrays["token_advantages"] = self.batch.token_advantages
                self.rollout_metrics |= metrics
        places = policy.step.shares(self.batch.lengths, self.mini_batches)
        for name, array in arrays.items():
            setattr(self.batch, name, collectives.scatter_array(array, self.batch.response_offsets, places))

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

    def arrays(self, config: Config) -> dict[str, NDArray[Any]]:
        """Of all samples, for samples/ (rank 0). A step that was resumed between two updates, or of which one was
        refused, has no scores of all tokens."""
        if self.source is None or len(self.scores) != len(self.mini_batches):
            return {"advantages": self.batch.advantages}
        from megatron_dapo.trainer.explain import recorded_arrays

        return recorded_arrays(self.batch, [len(m) for m in self.mini_batches], self.scores, self.source, config)

    def metrics(self, policy: Policy) -> dict[str, float]:
        found = {**self.rollout_metrics, **self.update_metrics.result("train/")}
        found |= self.critic_metrics.result("critic/")
        seconds, ranks = found.get("train/update_seconds", 0.0), policy.runtime.world_size
        return found | throughput_metrics(policy.shape, self.batch.lengths, seconds, ranks)

    # ---- saved between two updates ----

    def to_state(self, policy: Policy) -> dict[str, Any]:
        """Collective. Rank 0's is saved."""
        samples = [] if self.source is None else self.source.samples
        for sample, experts in policy.collect_experts(self.batch, self.mini_batches[self.updates_done :]).items():
            samples[sample].routed_experts = experts
        return {
            "batch": self.source.to_state() if self.source is not None else None,
            "metrics": self.rollout_metrics,
            "mini_batches": len(self.mini_batches),
            "done": self.updates_done,
            "updates": self.update_metrics.to_state(),
            "old_logprobs": self.batch.old_logprobs,
            "ref_logprobs": self.batch.ref_logprobs,
            "trains_policy": self.trains_policy,
            "values": self.batch.values,
            "critic_updates": self.critic_updates,
            "critic_metrics": self.critic_metrics.to_state(),
        }

    @classmethod
    def restore(cls, state: dict[str, Any], config: Config, collectives: Collectives, policy: Policy) -> TrainStep:
        """Collective. Only rank 0's state has the batch."""
        source = None if state["batch"] is None else StepBatch.from_state(state["batch"])
        step = cls.share(source, config, collectives, policy)
        if state["mini_batches"] != len(step.mini_batches):
            raise ConfigError(
                f"the checkpoint was saved after {state['done']} of {state['mini_batches']} updates of a step, but "
                f"with this trainer.mini_batch_prompts the step has {len(step.mini_batches)}: use the saved setting "
                "until the step is done"
            )
        unscored = state["ref_logprobs"] is None and state["done"] < state["mini_batches"]
        if unscored and state.get("trains_policy", True) and policy.needs.reference:
            raise ConfigError("the checkpoint was saved in mid-step: set algorithm.kl.coefficient after it, not in it")
        step.updates_done = state["done"]
        step.rollout_metrics = state["metrics"]
        step.update_metrics = StepMetrics.from_state(state["updates"])
        step.batch.old_logprobs = state["old_logprobs"]
        step.batch.ref_logprobs = state["ref_logprobs"]
        if state.get("values") is not None:  # a run without critic has none, nor has one of an older version
            step.add_values(state["values"], config, collectives, policy)
            step.trains_policy = state["trains_policy"]
            step.critic_updates = state["critic_updates"]
            step.critic_metrics = StepMetrics.from_state(state["critic_metrics"])
        return step

    def dump(self, folder: Path, step: int, update: int, whose: str = "") -> None:
        """Rank 0. Writes the samples of a mini-batch, whose update failed, to be looked at."""
        if self.source is not None:
            folder.mkdir(exist_ok=True)
            chosen = self.mini_batches[update % len(self.mini_batches)]
            text = orjson.dumps([self.source.samples[i].to_state() for i in chosen], default=json_default)
            (folder / f"step_{step + 1}_{whose}update_{update + 1}.json").write_bytes(text)


def share_batch(
    collectives: Collectives,
    batch: TrainBatch | None,
    mini_batches: MiniBatches | None,
    shares: Shares,
    *,
    whole_log_probs: bool = False,
) -> tuple[TrainBatch, MiniBatches]:
    """Collective. Rank 0 passes the batch and its mini-batches. `whole_log_probs`: every rank needs all of them."""
    sizes = collectives.share_array(None if mini_batches is None else np.array([len(m) for m in mini_batches]))
    assert sizes is not None
    indices = [list(range(a, b)) for a, b in pairwise([0, *np.cumsum(sizes).tolist()])]
    values = {name: collectives.share_array(getattr(batch, name, None)) for name in PER_SAMPLE}
    bits = collectives.share_array(None if batch is None else np.packbits(batch.loss_mask))
    assert bits is not None and values["response_lengths"] is not None
    mask = np.unpackbits(bits, count=int(values["response_lengths"].sum())).astype(np.bool_)
    everywhere = TrainBatch(tokens=np.empty(0, np.int32), loss_mask=mask, **values)  # type: ignore[arg-type]
    places = shares(everywhere.lengths, indices)
    routed = getattr(batch, "routed_experts", None)
    everywhere.routed_experts = _share_experts(collectives, routed, everywhere, indices, shares)
    for name in (f.name for f in fields(TrainBatch) if f.name not in (*PER_SAMPLE, *SHARED_OTHERWISE)):
        array = getattr(batch, name, None)
        offsets = everywhere.token_offsets if name == "tokens" else everywhere.response_offsets
        whole = whole_log_probs and name.endswith("logprobs")
        found = collectives.share_array(array) if whole else collectives.scatter_array(array, offsets, places)
        setattr(everywhere, name, found)
    return everywhere, indices


def _share_experts(
    collectives: Collectives,
    routed: list[RoutedExperts | None] | None,
    batch: TrainBatch,
    mini_batches: MiniBatches,
    shares: Shares,
) -> list[RoutedExperts | None] | None:
    """Hundreds of bytes for each token, so one mini-batch at a time, and only to the ranks that train on it."""
    known = [experts for experts in routed or () if experts is not None]
    largest = max(known, key=lambda experts: experts.itemsize, default=None)
    header = collectives.share_array(None if largest is None else np.array([largest.shape[1], largest.itemsize]))
    if header is None:
        return None
    width, dtype = int(header[0]), np.dtype(f"u{header[1]}")
    lengths = None if routed is None else np.array([0 if x is None else len(x) for x in routed], np.int64)
    rows = collectives.share_array(lengths)
    assert rows is not None
    found: list[RoutedExperts | None] = [None] * batch.samples if routed is None else routed
    empty = np.zeros((0, width), dtype)
    for samples in mini_batches:
        offsets = np.concatenate([[0], np.cumsum(rows[samples])]).astype(np.int64) * width * dtype.itemsize
        if not offsets[-1]:
            continue
        places = [[samples.index(i) for i in share] for share in shares(batch.lengths, [samples])]
        flat = None
        if routed is not None:
            parts = [empty if (experts := routed[i]) is None else experts.astype(dtype) for i in samples]
            flat = np.concatenate(parts).reshape(-1).view(np.uint8)
        received = collectives.scatter_array(flat, offsets, places)
        assert received is not None
        if routed is None:
            for place in places[collectives.runtime.groups.dp.rank()]:
                values = received[offsets[place] : offsets[place + 1]].view(dtype).reshape(-1, width)
                found[samples[place]] = values.copy() if len(values) else None
    return found


class TooManySkippedUpdates(UserError):
    """More updates in a row were not finite than `trainer.max_skipped_updates`."""


class Updates:
    """Every method is called by all ranks, in the same order."""

    def __init__(self, config: Config, policy: Policy, collectives: Collectives, critic: Critic | None = None) -> None:
        self.observer: Observer = NullObserver()
        self.gate_passed = not config.gate.enabled
        self.skipped_in_a_row = 0
        self.critic_skipped_in_a_row = 0
        self.critic_is_ready = False  # pre-training has ended before its last step
        self._critic = critic
        self._config = config
        self._policy = policy
        self._collectives = collectives
        self._profiler = StepProfiler(config, policy.runtime.rank)

    def prepare(self, step: TrainStep, version: int) -> bool:
        """Before the first update, at weight version `version`: old log-probs where the ratio needs them, the gate, and
        the reference where KL needs it. False: the gate rejects the batch. Without old log-probs the gate of later
        batches is in `make_one`."""
        self._profiler.begin(version + 1)
        fault_points.reach("loop/before_log_probs")
        pretrained = self.critic_is_ready or version >= self._config.critic.pretraining.steps
        step.trains_policy = self._critic is None or pretrained
        recomputes = self._config.recomputes_old_logprobs and step.trains_policy
        if recomputes or not self.gate_passed:
            logprobs = self._policy.old_log_probs(step.batch, step.mini_batches)
            if self._config.gate.enabled and not self._pass_gate(step, version, logprobs):
                return False
            if recomputes:
                step.batch.old_logprobs = logprobs
        if self._policy.needs.reference and step.trains_policy:
            step.batch.ref_logprobs = self._policy.reference_log_probs(step.batch, step.mini_batches)
        return True

    def _pass_gate(self, step: TrainStep, version: int, logprobs: Floats) -> bool:
        """The first batch of a run must pass. The result of the first one of every start is reported."""
        first, self.gate_passed = not self.gate_passed, True
        limits = gate_limits(self._config.gate, first=first, fresh=self._collectives.agree(step.sampled_by(version)))
        gap, rejected = None, ""
        with self._collectives.on_driver("checking the gate") as mine:
            if mine:  # it has the engine's log-probs of every sample
                try:
                    gap = check_gate(step.batch, logprobs, limits, step.trained_tokens)
                except GateError as error:
                    if version == 0:
                        raise
                    rejected = str(error)
                    self.observer.warn(f"the batch of step {version + 1} is sampled again: {error}")
        if first and not rejected:
            self.observer.report(str(gap))
        if gap is not None and version == 0:  # a resumed run records what an uninterrupted one does
            step.rollout_metrics |= gap.metrics
        return not self._collectives.agree(bool(rejected))

    def add_values(self, step: TrainStep) -> None:
        """The critic's values, if there is a critic, and the advantages: all that the policy's updates need of it."""
        critic = self._critic
        if critic is None or step.batch.values is not None:
            return
        with self.observer.phase("critic"), critic.turn():
            step.add_values(critic.values(step.batch, step.mini_batches), self._config, self._collectives, self._policy)
        enough = self._config.critic.pretraining.explained_variance
        explained = step.rollout_metrics.get("critic/explained_variance")
        ready = enough is not None and explained is not None and explained >= enough
        self.critic_is_ready = self._collectives.agree(ready) or self.critic_is_ready

    def train_critic(self, step: TrainStep, version: int) -> None:
        """The critic's updates, or what is left of them. A stop is honoured before each."""
        critic, total = self._critic, self._config.critic.epochs * len(step.mini_batches)
        if critic is None or step.critic_updates >= total:
            return
        with self.observer.phase("critic") as phase, critic.turn():
            while (update := step.critic_updates) < total:
                doing = f"training, {update} of {total} updates of the critic in step {version + 1} done"
                self._collectives.stop_if_requested(doing)
                batch = step.batch.select(step.mini_batches[update % len(step.mini_batches)])
                try:
                    fault_points.reach("loop/before_critic_update")
                    metrics = critic.update(batch)
                    self.critic_skipped_in_a_row = 0
                except UpdateRefused as error:
                    self.critic_skipped_in_a_row += 1
                    self._report_skip(step, version, error, update, self.critic_skipped_in_a_row, "critic_")
                    metrics = {"update_skipped": 1.0}
                step.critic_metrics.add(metrics)
                step.critic_updates += 1
                phase.update(step.critic_updates, total, "updates")

    def make_one(self, step: TrainStep, version: int) -> None:
        """The next update of the step."""
        try:
            fault_points.reach("loop/before_update")
            batch = step.batch.select(step.mini_batches[step.updates_done])
            first = step.updates_done == step.update_metrics.totals.get(SKIPPED, 0)  # no weight has changed in it
            limit = self._max_mismatch(step, version, first)
            record = self._config.observe.samples_tokens and is_due(version + 1, self._config.observe.samples_every)
            metrics = self._policy.update(batch, first=first, max_mismatch=limit, record=record)
            if record and (scores := self._policy.step.recorded) is not None:
                step.scores.append(scores)
            self.skipped_in_a_row = 0
        except UpdateRefused as error:
            self.skipped_in_a_row += 1
            self._report_skip(step, version, error, step.updates_done, self.skipped_in_a_row)
            metrics = {"update_skipped": 1.0}
        step.update_metrics.add(metrics)
        step.updates_done += 1

    def end_profile(self, version: int) -> None:
        """After the last update of a step."""
        if line := self._profiler.end(version + 1):
            self.observer.log(line)

    def _max_mismatch(self, step: TrainStep, version: int, first: bool) -> float | None:
        """Where the engine's log-probs are the old ones, the first update measures the mismatch before it changes a
        weight."""
        gate = self._config.gate
        if not (first and gate.enabled) or self._config.recomputes_old_logprobs:
            return None
        return gate_limits(gate, first=False, fresh=self._collectives.agree(step.sampled_by(version))).max_mean_gap

    def _report_skip(
        self, step: TrainStep, version: int, error: UpdateRefused, update: int, in_a_row: int, whose: str = ""
    ) -> None:
        self.observer.warn(f"step {version + 1}, {whose.replace('_', ' ')}update {update + 1} skipped: {error}")
        try:
            step.dump(Path(self._config.trainer.run_dir) / "dumps", version, update, whose)
        except OSError as full:
            self.observer.warn(f"its samples could not be written: {full}")
        limit = self._config.trainer.max_skipped_updates
        if in_a_row > limit:
            raise TooManySkippedUpdates(
                f"{in_a_row} updates in a row were skipped (trainer.max_skipped_updates is {limit}); the last: {error}"
            ) from error
