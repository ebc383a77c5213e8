"""How many groups a step keeps in flight, when it stops sampling, and how stale a carried-over group may become.

Pure functions of `rollout.sampler` and of a step's counts. With `oversampling: adaptive`, groups in flight = missing
groups ÷ expected yield × a margin, and no more than the engine can run if unfinished samples are carried over
(`unfinished: continue`). A larger margin keeps the engine full for longer towards the end of a step. What is then
unfinished is not lost, but the next step must prefill it again, and it becomes staler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config.rollout import SamplerConfig

MARGIN = 1.3
# Simulated (tests/support/fleet.py): 1.3 leaves a fifth of the slots empty. 3 is a little faster than 2 at 32B with
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

    def wanted_in_flight(self, kept: int, unused: int, expected_yield: float = 1.0) -> int:
        """The most groups that may be in flight; see also `engine_full`."""
        missing, options = self.missing(kept, unused), self.options
        if not isinstance(options.oversampling, str):
            return math.ceil(missing * options.oversampling)
        if options.fill == "dynamic":  # every decided group counts, kept or not
            return missing
        margin = MARGIN_CARRIED_OVER if options.unfinished == "continue" and self.can_carry_over else MARGIN
        return math.ceil(missing * margin / expected_yield)

    def engine_full(self, requests: int) -> bool:
        """More requests would only queue. Where the batch must not depend on timing, they may."""
        adaptive, carried = self.options.oversampling == "adaptive", self.options.unfinished == "continue"
        return adaptive and carried and requests >= self.max_running

    def limit_reached(self, submitted: int) -> bool:
        """No more prompts may be sampled in this step."""
        batches, factor = self.options.generation_batches, self.options.oversampling
        if batches is None or self.options.on_limit == "continue":
            return False
        return submitted >= batches * math.ceil(self.needed * (1.0 if isinstance(factor, str) else factor))

    def too_stale(self, staleness: int) -> bool:
        return staleness > self.options.max_carryover_staleness

    def must_finish_now(self, staleness: int) -> bool:
        """A partial group of this staleness would be too stale in the next step."""
        return self.options.unfinished == "continue" and self.too_stale(staleness + 1)
