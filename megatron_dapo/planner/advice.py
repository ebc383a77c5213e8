"""What to change for time: settings that the configuration accepts, that fit, and that make a step faster.

Each piece of advice is one change of the given configuration, planned like it: layout, engine size, weight transport,
sampler, overlap. Changes of the algorithm's numbers (fp8, shorter responses) are left to the user, except that
`rollout.max_staleness` is named, which lets generation and training overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.planner.plan import Advice, Plan, Planner, task_of
from megatron_dapo.planner.search import Task, with_changes
from megatron_dapo.planner.workload import log_prob_passes

LEAST_GAIN = 0.02  # of a step
MAX_RUNNING = (256, 512, 1024)


def advise(config: Config, plan: Plan, task: Task) -> list[Advice]:
    """For a plan that fits; what saves most comes first."""
    if not plan.fits or plan.chosen is None:
        return []
    start = with_changes(config, plan.chosen.changes(config))
    found = []
    for changes, why in _trials(start, plan, task):
        seconds = step_with(start, changes, task)
        if seconds is not None and seconds < plan.step_seconds * (1 - LEAST_GAIN):
            found.append(Advice(plan.chosen.changes(config) | changes, seconds, why))
    best: dict[frozenset[str], Advice] = {}  # of several values of the same keys
    for advice in sorted(found, key=lambda advice: advice.seconds):
        best.setdefault(frozenset(advice.changes), advice)
    return list(best.values())


def step_with(config: Config, changes: dict[str, Any], task: Task) -> float | None:
    """Seconds of a step with these changes; None: they are refused, or do not fit."""
    try:
        changed = with_changes(config, changes)
    except ConfigError:
        return None
    work = replace(task.work, log_prob_passes=log_prob_passes(changed))
    return Planner(changed, task_of(changed, task.shape, task.cluster, work, task.mfu, task.layers)).step()


def _trials(config: Config, plan: Plan, task: Task) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes to try, each with the reason."""
    rollout, chosen = config.rollout, plan.chosen
    if plan.ranking:
        yield plan.ranking[0].changes(config.policy), "the fastest layout that was found"
    if config.policy.tensor_parallel > 1 and not config.policy.tp_comm_overlap:
        yield {"policy.tp_comm_overlap": True}, "products start before their tensor-parallel exchange ends"
    if chosen is None or chosen.engine is None:
        return
    fitting = [choice for choice in plan.engines if choice.engine and choice.engine.fits]
    if fitting and not chosen.engine.external:
        best = min(fitting, key=lambda choice: choice.at_full_speed).engine
        if best is not None:
            yield {"rollout.servers.tensor_parallel": best.tensor_parallel}, "the fastest engine size at full speed"
    for running in MAX_RUNNING:
        if running > rollout.servers.max_running:
            yield {"rollout.servers.max_running": running}, "more sequences decode at once"
    sampler = {"oversampling": "adaptive", "unfinished": "continue", "order": "completion", "surplus": "keep"}
    different = {
        f"rollout.sampler.{key}": value for key, value in sampler.items() if getattr(rollout.sampler, key) != value
    }
    if different:
        yield different, "no step waits for its slowest responses: they continue in the next one"
    if not task.cluster.colocated and not rollout.max_staleness:
        yield {"rollout.max_staleness": 1}, "the next batch is generated while this one trains; it is one version stale"
    yield from _transports(config, task)


def _transports(config: Config, task: Task) -> Iterator[tuple[dict[str, Any], str]]:
    weights, several = config.rollout.weights, task.world > task.cluster.gpus_per_node
    if weights.transport == "adapter":
        return
    packed = {"rollout.weights.pack_experts": True} if task.shape.is_moe and not weights.pack_experts else {}
    whole = {"rollout.weights.keep_snapshot": False} if weights.keep_snapshot else {}
    if weights.transport == "disk" and task.cluster.colocated:
        shared = {} if config.rollout.servers.share_gpus else {"rollout.servers.share_gpus": True}
        tensor = {"rollout.weights.transport": "tensor"} | shared | packed
        yield (tensor | whole if several else tensor), "engines copy new weights from the trainer's memory"
    elif weights.transport == "disk":
        yield (
            {"rollout.weights.transport": "distributed"} | packed,
            "new weights are sent over the network, not by files",
        )
    elif packed:
        yield packed, "SGLang looks up fewer names of experts"
    if weights.transport != "disk" and weights.senders == "one" and config.policy.pipeline_parallel > 1:
        yield {"rollout.weights.senders": "stage"} | whole, "every pipeline stage sends its own weights"
