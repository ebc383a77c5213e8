"""The phases of a training step with their seconds, and the seconds of the step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.planner import timing
from megatron_dapo.planner.assumptions import HOST_BYTES_PER_SECOND
from megatron_dapo.planner.engine import EnginePlan
from megatron_dapo.planner.generation import Generation
from megatron_dapo.planner.hardware import GIB, Cluster
from megatron_dapo.planner.memory import TrainerMemory
from megatron_dapo.planner.search import Task
from megatron_dapo.planner.sync import buffer_bytes, sync_time


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float
    detail: str


def overlaps(config: Config, cluster: Cluster) -> bool:
    """Whether the next batch is generated while this one trains."""
    return bool(config.rollout.max_staleness) and not cluster.colocated


def step_seconds(phases: list[Phase], overlaps: bool) -> float:
    seconds = {phase.name: phase.seconds for phase in phases}
    if overlaps:
        training = seconds.get("log-probs", 0.0) + seconds.get("training", 0.0)
        return max(seconds.get("generation", 0.0), training) + seconds.get("weight sync", 0.0)
    return sum(seconds.values())


def step_phases(
    task: Task,
    rollout: RolloutConfig,
    policy: PolicyConfig,
    memory: TrainerMemory,
    engine: EnginePlan | None,
    generation: Generation | None,
) -> list[Phase]:
    phases = []
    if engine is not None and generation is not None:
        phases.append(_generation(task, engine, generation))
    phases += _training(task, policy)
    if engine is not None:
        phases.append(_sync(task, rollout, policy, engine))
        if task.kept:
            moved = memory.weights + memory.optimizer
            seconds = 2 * moved / HOST_BYTES_PER_SECOND
            phases.append(Phase("hand-over", seconds, f"{moved / GIB:.1f} GiB a GPU to host memory and back"))
    return phases


def _generation(task: Task, engine: EnginePlan, generation: Generation) -> Phase:
    waste = generation.wasted / generation.tokens if generation.tokens else 0.0
    detail = (
        f"{engine.servers} servers × {engine.running} running, {generation.tokens / 1e6:.1f} M tokens "
        f"({waste:.0%} in dropped groups), {generation.tokens / generation.seconds:,.0f} tok/s: "
        f"{generation.utilisation:.0%} of the engines' full speed"
    )
    return Phase("generation", generation.seconds, detail)


def _training(task: Task, policy: PolicyConfig) -> list[Phase]:
    work, phases = task.work, []
    arguments = (task.shape, policy, task.cluster, work, task.world, task.mfu)
    if work.log_prob_passes:
        seconds = work.log_prob_passes * work.updates * timing.pass_time(*arguments, train=False).total
        passes = "pass" if work.log_prob_passes == 1 else "passes"
        phases.append(Phase("log-probs", seconds, f"{work.log_prob_passes} forward {passes} over the batch"))
    update = timing.pass_time(*arguments, train=True)
    split = timing.split_update(policy, work, task.world)
    parts = {name: getattr(update, name) for name in ("arithmetic", "bubble", "tensor", "context", "expert", "data")}
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.05)
    detail = f"{work.updates} updates of {update.total:.1f} s, {split.micro_batches} micro-batches each; per update: "
    phases.append(Phase("training", work.updates * update.total, detail + shown))
    return phases


def _sync(task: Task, rollout: RolloutConfig, policy: PolicyConfig, engine: EnginePlan) -> Phase:
    cluster, weights = task.cluster, rollout.weights
    nodes = -(-engine.servers * engine.tensor_parallel // cluster.gpus_per_node)
    time = sync_time(task.shape, policy, weights, cluster, nodes, engine.tensor_parallel)
    embedding = task.shape.vocab * task.shape.hidden * 2
    buffers = (
        ""
        if weights.transport == "disk"
        else (f"; {buffer_bytes(policy, weights, embedding) / GIB:.1f} GiB of buffers on each sender")
    )
    return Phase("weight sync", time.total, f"{weights.transport}, {time.describe()}{buffers}")
