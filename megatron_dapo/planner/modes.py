"""Ways to divide the GPUs between trainer and engines: colocated, or split, with or without overlap (`plan --compare`).

For each division the fastest server size and number of running sequences are searched with engines at full speed; then
its generation is simulated once. The trainer keeps the configured layout where it is legal and fits, and else has the
fastest one that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.planner.engine import EnginePlan, fleet_of
from megatron_dapo.planner.generation import generate
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.plan import Planner, step_phases, step_seconds, task_of
from megatron_dapo.planner.search import Candidate, Task, candidates, judge, rank, why_illegal
from megatron_dapo.planner.workload import Workload

MAX_RUNNING = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to divide the GPUs, with its best settings."""

    engine_gpus: int  # 0: colocated
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
    splits = [0, *range(step, cluster.gpus, step)]
    found = [
        mode
        for engine_gpus in splits
        for mode in _modes(config, shape, replace(cluster, engine_gpus=engine_gpus), work, mfu, layers)
    ]
    return sorted(found, key=lambda mode: mode.seconds)


def _modes(
    config: Config, shape: ModelShape, cluster: Cluster, work: Workload, mfu: float, layers: Layers
) -> list[Mode]:
    task = task_of(config, shape, cluster, work, mfu, layers)
    trainer = _trainer(task, config)
    best = _engine(task, config)
    if trainer is None or best is None:
        return []
    _, rollout, engine = best
    generation = generate(work, rollout.sampler, fleet_of(shape, engine, rollout, cluster))
    phases = step_phases(task, rollout, trainer.policy, trainer.memory, engine, generation)
    return [
        Mode(
            cluster.engine_gpus, staleness, trainer, engine.tensor_parallel, rollout.servers.max_running,
            {phase.name: phase.seconds for phase in phases},
            step_seconds(phases, cluster, staleness),
        )
        for staleness in ((0,) if cluster.colocated else (0, 1))
    ]  # fmt: skip


def _trainer(task: Task, config: Config) -> Candidate | None:
    if why_illegal(task, config.policy) is None:
        given = judge(task, config.policy)
        if given.fits:
            return given
    return next(iter(rank(list(candidates(task, config.policy)))), None)


def _engine(task: Task, config: Config) -> tuple[float, RolloutConfig, EnginePlan] | None:
    """The max_running and server size that are fastest at full speed, with the seconds of a step's generation."""
    found = []
    for running in MAX_RUNNING:
        servers = config.rollout.servers.model_copy(update={"max_running": running})
        rollout = config.rollout.model_copy(update={"servers": servers, "engine": "sglang"})
        planner = Planner(config.model_copy(update={"rollout": rollout}), task)
        engines = map(planner.engine, planner.engine_sizes())
        found += [(seconds, rollout, engine) for engine, seconds in engines if engine.fits]
    return min(found, key=itemgetter(0), default=None)
