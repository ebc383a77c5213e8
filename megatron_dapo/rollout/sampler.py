"""Dynamic sampling: fills a batch with informative groups, continuously rather than in waves.

`collect` keeps enough groups in flight to fill what is missing, grades each sample when it ends, asks the group filter
and returns when the batch is full or a configured limit is reached. Accepted groups beyond the batch and unfinished
samples are carried over to the next step or dropped, as configured.

- Every sample that enters a step is trained, dropped with a reason, failed or carried over: exactly one of them.
- A group is decided once. With `order: prompt` and `unfinished: finish`, or with `oversampling: 1`, timing does not
  change which groups make the batch. With a deterministic engine, the same seed gives the same batches.
- A carried-over token never lags more than `max_carryover_staleness` weight versions. The step waits for a group at
  that limit.
- A cancelled `collect` can continue later, in this process or after `restore`, with the same decisions and counts.
- After any error, `state` contains every accepted group and every partial sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_dapo.algorithm import EarlyRejection, GroupFilter, give_up_after, keep_all, load_group_filter
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Engine
from megatron_dapo.rollout.accounting import Progress
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.carry_over import CarryOver
from megatron_dapo.rollout.group_runner import Grader
from megatron_dapo.rollout.step_collector import SamplerSetup, SamplingLimitError, StepCollector
from megatron_dapo.types import Group, Prompt, StepBatch

__all__ = ["Sampler", "SamplingLimitError"]


class Sampler:
    def __init__(
        self,
        engine: Engine,
        grade: Grader,
        next_prompt: Callable[[], Prompt],
        config: RolloutConfig,
        *,
        groups_per_step: int,
        seed: int = 0,
        group_filter: GroupFilter | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_decided: Callable[[Group], None] | None = None,
        function: RolloutFunction | None = None,
    ) -> None:
        """`next_prompt` raises StopIteration when there are no more prompts. `group_filter` overrides the configured
        one. `on_decided` is called once for every group that the filter kept or rejected. `function` makes the
        responses; None: a response is one generated turn."""
        chosen = group_filter or (load_group_filter(config.group_filter) if config.dynamic_sampling else keep_all)
        reject_early: EarlyRejection | None = getattr(chosen, "reject_early", None)
        if config.dynamic_sampling and config.sampler.give_up_after is not None:
            reject_early = give_up_after(config.sampler.give_up_after)
        self._setup = SamplerSetup(
            engine=engine, grade=grade, next_prompt=next_prompt, config=config, groups_per_step=groups_per_step,
            seed=seed, group_filter=chosen, reject_early=reject_early, on_progress=on_progress,
            on_decided=on_decided, function=function,
        )  # fmt: skip
        self._carry_over = CarryOver()
        self._collecting = False

    async def collect(self, step: int) -> StepBatch:
        """One batch for training step `step`. Continues a `collect` of the same step that was cancelled."""
        if self._collecting:
            raise RuntimeError(f"collect({step}) was called while another batch is being collected")
        collector = StepCollector(self._setup, step, self._carry_over)
        self._collecting = True
        try:
            return await collector.collect()
        finally:
            self._carry_over, self._collecting = collector.carry_over, False

    def state(self) -> dict[str, Any]:
        """JSON values and numpy arrays. Call between two `collect`s."""
        if self._collecting:
            raise RuntimeError("state() was called while a batch is being collected: cancel it or wait for it first")
        return self._carry_over.to_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._carry_over = CarryOver.from_state(state)
