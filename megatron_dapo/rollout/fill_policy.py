"""How many groups a step keeps in flight, when it stops sampling, and how stale a carried-over group may become.

Pure functions of `rollout.sampler` and of a step's counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config.rollout import SamplerConfig


@dataclass(slots=True, frozen=True)
class FillPolicy:
    options: SamplerConfig
    needed: int  # groups per batch

    @property
    def in_prompt_order(self) -> bool:
        """Groups are decided in the order of their prompts. Without oversampling, all of them are needed anyway."""
        return self.options.order == "prompt" and self.options.oversampling > 1

    def wanted_in_flight(self, kept: int, unused: int) -> int:
        """`kept` groups are accepted; `unused` groups were rejected or failed. 0 or less: the batch is full."""
        done = kept
        if self.options.fill == "dynamic":
            # Training needs at least one kept group: until there is one, keep one group in flight.
            done = min(kept + unused, self.needed if kept else self.needed - 1)
        return math.ceil((self.needed - done) * self.options.oversampling)

    def limit_reached(self, submitted: int) -> bool:
        """No more prompts may be sampled in this step."""
        batches = self.options.generation_batches
        if batches is None or self.options.on_limit == "continue":
            return False
        return submitted >= batches * math.ceil(self.needed * self.options.oversampling)

    def too_stale(self, staleness: int) -> bool:
        return staleness > self.options.max_carryover_staleness

    def must_finish_now(self, staleness: int) -> bool:
        """A partial group of this staleness would be too stale in the next step."""
        return self.options.unfinished == "continue" and self.too_stale(staleness + 1)
