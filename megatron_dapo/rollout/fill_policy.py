"""How many groups a step keeps in flight, when it stops sampling, and how stale a carried-over group may become.

Pure functions of `rollout.sampler` and of a step's counts. With `oversampling: adaptive`, groups in flight = missing
groups ÷ expected yield × a margin, and no more than the engine can run if unfinished samples are carried over
(`unfinished: continue`). A larger margin keeps the engine full for longer towards the end of a step. What is then
unfinished is not lost, but the next step must prefill it again, and it becomes staler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.config.rollout import RolloutConfig, SamplerConfig
from megatron_dapo.errors import UserError
from megatron_dapo.types import Group

MARGIN = 1.3
# Simulated: 1.3 leaves a fifth of the slots empty. 3 is a little faster than 2 at 32B with
# long tails, and a little slower at 1.5B with short responses, where prefilling again costs more.
MARGIN_CARRIED_OVER = 2.5


@dataclass(slots=True, frozen=True)
class FillPolicy:
    options: SamplerConfig
    needed: int  # groups per batch
    max_running: int = 0  # requests that the engine runs at a time
    can_carry_over: bool = True  # groups that start now may still be trained in the next step

    @property
    def in_prompt_order(self) -> bool:
        """Groups are decided in the order of their prompts. Without oversampling, all of them are needed anyway."""
        return self.options.order == "prompt" and self.options.oversampling != 1

    def missing(self, kept: int, unused: int) -> int:
        """`kept` groups are accepted; `unused` groups were rejected or failed. 0 or less: the batch is full."""
        done = kept
        if self.options.fill == "dynamic":
            # Training needs at least one kept group: until there is one, keep one group in flight.
            done = min(kept + unused, self.needed if kept else self.needed - 1)
        return self.needed - done

    def wanted_in_flight(self, kept: int, unused: int, expected_yield: float = 1.0, per_request: float = 1.0) -> int:
        """The most groups that may be in flight; see also `engine_full`. `per_request`: rollouts in flight for each
        that needs the engine."""
        missing, options = self.missing(kept, unused), self.options
        if not isinstance(options.oversampling, str):
            return math.ceil(missing * options.oversampling)
        if options.fill == "dynamic":  # every decided group counts, kept or not
            return missing
        carries = options.unfinished == "continue" and self.can_carry_over
        margin = MARGIN_CARRIED_OVER * per_request if carries else MARGIN
        return math.ceil(missing * margin / expected_yield)

    def engine_full(self, requests: int) -> bool:
        """More requests would only queue. Where the batch must not depend on timing, they may."""
        adaptive, carried = self.options.oversampling == "adaptive", self.options.unfinished == "continue"
        return adaptive and carried and requests >= self.max_running

    def limit_reached(self, submitted: int) -> bool:
        """No more prompts may be sampled in this step."""
        batches, factor = self.options.max_generation_batches, self.options.oversampling
        if batches is None:
            return False
        return submitted >= batches * math.ceil(self.needed * (1.0 if isinstance(factor, str) else factor))

    def too_stale(self, staleness: int) -> bool:
        return staleness > self.options.max_carryover_staleness

    def must_finish_now(self, staleness: int) -> bool:
        """A partial group of this staleness would be too stale in the next step."""
        return self.options.unfinished == "continue" and self.too_stale(staleness + 1)


# Before the first decision: as if 8 groups had been decided and 70 % of them kept.
PRIOR_DECIDED, PRIOR_YIELD = 8.0, 0.7
DECAY = 0.7  # weight of a decision after each further step
SMALLEST = 0.05  # limits the groups in flight when nothing is kept


@dataclass(slots=True)
class YieldEstimate:
    """The share of decided groups that the group filter keeps: an estimate that follows a run."""

    kept: float = PRIOR_DECIDED * PRIOR_YIELD
    decided: float = PRIOR_DECIDED

    @property
    def value(self) -> float:
        return max(SMALLEST, self.kept / self.decided)

    def add(self, keep: bool) -> None:
        self.kept += keep
        self.decided += 1

    def end_step(self) -> None:
        self.kept *= DECAY
        self.decided *= DECAY


def age(version: int, trained: int, unchanged_to: int) -> int:
    """How often the weights changed from `version` to `trained`. All versions up to `unchanged_to` have the same."""
    return max(0, trained - max(version, unchanged_to))


def staleness_metrics(groups: Sequence[Group], version: int, unchanged_to: int = 0) -> dict[str, float]:
    """Of groups trained at `version`: of each group's oldest token (mean, max), and of all tokens (mean)."""
    spans = [span for group in groups for sample in group.samples for span in sample.weight_spans]
    groups = [group for group in groups if any(sample.weight_spans for sample in group.samples)]
    oldest = [age(group.oldest_version, version, unchanged_to) for group in groups]
    tokens = sum(span.end - span.start for span in spans)
    behind = sum(age(span.version, version, unchanged_to) * (span.end - span.start) for span in spans)
    return {
        "rollout/staleness": sum(oldest) / max(1, len(oldest)),
        "rollout/staleness_max": float(max(oldest, default=0)),
        "rollout/staleness_tokens": behind / max(1, tokens),
    }


def check_staleness(metrics: dict[str, float], config: RolloutConfig, step: int) -> None:
    """Admission control and carry-over keep this; a lower limit and a checkpoint of an older version may not."""
    found = metrics["rollout/staleness_max"]
    if config.max_staleness and found > config.staleness_limit:
        raise UserError(
            f"the batch of step {step + 1} has tokens that are {found:.0f} weight versions old, but "
            f"rollout.max_staleness is {config.max_staleness}: if it was lowered for this start, train this step "
            "with the earlier value"
        )
