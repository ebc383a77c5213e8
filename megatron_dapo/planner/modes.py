"""Ways to divide the GPUs between trainer and engines: colocated, or split, with or without overlap (`plan --compare`).

For each division the fastest server size and number of running sequences are searched with engines at full speed; then
its generation is simulated once. The trainer keeps the configured layout where it is legal and fits, and else has the
fastest one that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.planner.engine import EnginePlan, fleet_of, plan_engine
from megatron_dapo.planner.generation import generate
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.plan import step_phases, step_seconds, task_of
from megatron_dapo.planner.search import Candidate, Task, candidates, judge, rank, why_illegal
from megatron_dapo.planner.workload import Workload

MAX_RUNNING = (128, 256, 512, 1024)
SERVER_SIZES = (1, 2, 4, 8)


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

    @property
    def name(self) -> str:
        return "colocated" if not self.engine_gpus else f"{self.engine_gpus} GPUs serve"


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
    chosen, engine = best
    generation = generate(work, chosen.rollout.sampler, fleet_of(shape, engine, chosen.rollout, cluster))
    phases = step_phases(task, chosen.rollout, trainer.policy, trainer.memory, engine, generation)
    return [
        Mode(
            cluster.engine_gpus, staleness, trainer, engine.tensor_parallel, chosen.rollout.servers.max_running,
            {phase.name: phase.seconds for phase in phases},
            step_seconds(phases, overlaps=staleness > 0, apart=not cluster.colocated),
        )
        for staleness in ((0,) if cluster.colocated else (0, 1))
    ]  # fmt: skip


def _trainer(task: Task, config: Config) -> Candidate | None:
    if why_illegal(task, config.policy) is None:
        given = judge(task, config.policy)
        if given.fits:
            return given
    return next(iter(rank(list(candidates(task, config.policy)))), None)


def _engine(task: Task, config: Config) -> tuple[Config, EnginePlan] | None:
    """The configuration with the server size and max_running that are fastest at full speed, and its engines."""
    cluster, best, least = task.cluster, None, float("inf")
    gpus = cluster.engine_gpus or cluster.gpus
    for size in SERVER_SIZES:
        if gpus % size or size > cluster.gpus_per_node or task.shape.heads % size:
            continue
        for running in MAX_RUNNING:
            servers = config.rollout.servers.model_copy(update={"tensor_parallel": size, "max_running": running})
            rollout = config.rollout.model_copy(update={"servers": servers})
            engine = plan_engine(task.shape, rollout, cluster, task.work, task.kept)
            if not engine.fits or not engine.servers:
                continue
            speed = fleet_of(task.shape, engine, rollout, cluster).full_speed(task.work, engine.running)
            if 1 / speed < least:
                least, best = 1 / speed, (config.model_copy(update={"rollout": rollout}), engine)
    return best
