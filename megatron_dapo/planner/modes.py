"""Ways to divide the GPUs between trainer and engines: colocated, or split, with or without overlap (`plan --compare`).

For each division the fastest server size and number of running sequences are searched with engines at full speed; then
its generation is simulated once. The trainer keeps the configured layout where it is legal and fits, and else has the
fastest one that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.plan import Choice, Planner, step_seconds, task_of
from megatron_dapo.planner.search import Candidate, Task, candidates, judge, rank, why_illegal
from megatron_dapo.planner.workload import Workload

MAX_RUNNING = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to divide the GPUs, with its best settings."""

    engine_gpus: int  # 0: colocated
    transport: str
    staleness: int
    trainer: Candidate
    server_tensor_parallel: int
    max_running: int
    phases: dict[str, float]
    seconds: float


def compare_modes(
    config: Config, shape: ModelShape, cluster: Cluster, work: Workload, mfu: float, layers: Layers
) -> list[Mode]:
    """Every division that fits, fastest first."""
    nodes = cluster.gpus // cluster.gpus_per_node
    step = cluster.gpus_per_node if nodes > 1 else max(1, cluster.gpus // 4)
    found: list[Mode] = []
    for engine_gpus in (0, *range(step, cluster.gpus, step)):
        division = replace(cluster, engine_gpus=engine_gpus)
        chosen = _with_transport(config, division)
        found += _modes(chosen, task_of(chosen, shape, division, work, mfu, layers))
    return sorted(found, key=lambda mode: mode.seconds)


def _with_transport(config: Config, cluster: Cluster) -> Config:
    """With the configured transport where it works. NCCL refuses trainer and engine on one GPU: colocated engines copy
    from the trainer's memory. Those on other nodes cannot, and get a broadcast."""
    weights, several = config.rollout.weights, cluster.gpus > cluster.gpus_per_node
    changes: dict[str, Any] = {}
    if cluster.colocated and weights.transport == "distributed" and weights.backend == "nccl":
        # On several nodes no rank has all weights to keep.
        changes = {"transport": "tensor", "keep_snapshot": weights.keep_snapshot and not several}
    elif several and not cluster.colocated and weights.transport == "tensor":
        changes = {"transport": "distributed"}
    rollout = config.rollout.model_copy(update={"weights": weights.model_copy(update=changes)})
    return config.model_copy(update={"rollout": rollout})


def _modes(config: Config, task: Task) -> list[Mode]:
    """Of one division, with the max_running and server size that are fastest at full speed."""
    found: list[tuple[Choice, Planner]] = []
    trainers = _trainer(task, config)
    for running in MAX_RUNNING:
        servers = config.rollout.servers.model_copy(update={"max_running": running})
        rollout = config.rollout.model_copy(update={"servers": servers, "engine": "sglang"})
        planner = Planner(config.model_copy(update={"rollout": rollout}), task)
        found += [(pair, planner) for pair in planner.pairs(trainers)]
    if not found:
        return []
    choice, planner = min(found, key=lambda item: item[0].at_full_speed)
    assert choice.engine is not None  # it is sglang
    rollout, phases = planner.config.rollout, planner.phases(planner.with_generation(choice))
    return [
        Mode(
            task.cluster.engine_gpus, rollout.weights.transport, staleness, choice.trainer,
            choice.engine.tensor_parallel, rollout.servers.max_running, {phase.name: phase.seconds for phase in phases},
            step_seconds(phases, task.cluster, staleness),
        )
        for staleness in ((0,) if task.cluster.colocated else (0, 1))
    ]  # fmt: skip


def _trainer(task: Task, config: Config) -> list[Candidate]:
    """One, or none that fits."""
    if why_illegal(task, config.policy) is None:
        given = judge(task, config.policy)
        if given.fits:
            return [given]
    return rank(list(candidates(task, config.policy)))[:1]
