"""The trainer's layouts: which are legal, which fit, and how fast they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_dapo.config import ConfigError, ModelShape, check_model, check_world
from megatron_dapo.config.critic import CriticConfig
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.memory import Layers, TrainerMemory, trainer_memory
from megatron_dapo.planner.timing import most_micro_batches, pass_time
from megatron_dapo.planner.workload import Workload

KEYS = (
    "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel", "recompute",
    "micro_batch_tokens", "head_chunk_tokens",
)  # fmt: skip
MODEL_PARALLEL_LIMIT = 16  # largest pipeline size that is searched


@dataclass(frozen=True, slots=True)
class CriticTask:
    """A critic in the layout of the policy."""

    shape: ModelShape
    config: CriticConfig

    def policy(self, layout: PolicyConfig) -> PolicyConfig:
        return layout.model_copy(update={"optimizer": self.config.optimizer})

    @property
    def takes_turns(self) -> bool:
        return self.config.offload is not False


@dataclass(frozen=True, slots=True)
class Task:
    """The inputs that a layout is judged with."""

    shape: ModelShape
    work: Workload
    cluster: Cluster
    mfu: float
    layers: Layers = "te"
    residue: float = 0.0  # bytes that a colocated engine holds while the trainer works
    kept: float = 0.0  # bytes that the trainer holds while a colocated engine works
    critic: CriticTask | None = None

    @property
    def world(self) -> int:
        return self.cluster.trainer_gpus

    @property
    def limit(self) -> float:
        return self.cluster.gpu.memory - self.residue


@dataclass(frozen=True, slots=True)
class Candidate:
    policy: PolicyConfig
    memory: TrainerMemory
    fits: bool
    seconds: float  # training, log-probs and critic of one step
    critic: TrainerMemory | None = None

    def data_parallel(self, world: int) -> int:
        return world // self.policy.model_ranks

    def changes(self, given: PolicyConfig) -> dict[str, Any]:
        """The settings, by dotted key, that turn `given` into this layout."""
        return {
            f"policy.{key}": getattr(self.policy, key)
            for key in KEYS
            if getattr(self.policy, key) != getattr(given, key)
        }


def judge(task: Task, policy: PolicyConfig) -> Candidate:
    """Memory and time of one legal layout."""
    micro_batches = most_micro_batches(policy, task.work, task.world)
    memory = trainer_memory(task.shape, policy, task.world, micro_batches, task.layers)
    updates, passes = task.work.updates, task.work.log_prob_passes
    arguments = (task.shape, policy, task.cluster, task.work, task.world, task.mfu)
    seconds = updates * pass_time(*arguments, train=True).total
    seconds += updates * passes * pass_time(*arguments, train=False).total
    if task.critic is None:
        return Candidate(policy, memory, memory.total <= task.limit, seconds)
    critic = trainer_memory(task.critic.shape, task.critic.policy(policy), task.world, micro_batches, task.layers)
    needed = max(memory.total, critic.total)
    if not task.critic.takes_turns:
        needed = max(memory.total + critic.static, critic.total + memory.static)
    seconds += critic_seconds(task, policy)[0]
    return Candidate(policy, memory, needed <= task.limit, seconds, critic)


def critic_seconds(task: Task, policy: PolicyConfig) -> tuple[float, float]:
    """Of one step: all of the critic's part without hand-overs, and the values alone."""
    assert task.critic is not None
    arguments = (task.critic.shape, task.critic.policy(policy), task.cluster, task.work, task.world, task.mfu)
    values = task.work.updates * pass_time(*arguments, train=False).total
    updates = task.work.updates * task.critic.config.epochs * pass_time(*arguments, train=True).total
    return values + updates, values


def why_illegal(task: Task, policy: PolicyConfig) -> str | None:
    """Why this layout is impossible, or None."""
    try:
        check_model(policy, task.shape, task.work.longest)
        if task.critic is not None:
            check_model(policy, task.critic.shape, task.work.longest)
        check_world(policy, task.world)
    except ConfigError as error:
        return str(error)
    dp = task.world // policy.model_ranks
    if dp > task.work.samples_per_update:
        return (
            f"{dp} data-parallel ranks share {task.work.samples_per_update} samples of a mini-batch, so some would "
            "be idle: raise trainer.mini_batch_prompts, or tensor, pipeline or context parallelism"
        )
    return None


def candidates(task: Task, given: PolicyConfig) -> Iterator[Candidate]:
    """Every legal layout on these GPUs. Other settings (optimizer, precision, …) are those of `given`."""
    shape, limit = task.shape, MODEL_PARALLEL_LIMIT
    tensor = [n for n in _divisors(shape.kv_heads) if shape.heads % n == 0 and n <= task.cluster.gpus_per_node]
    pipeline = [n for n in _divisors(shape.layers) if n <= limit]
    expert = [n for n in _divisors(shape.experts) if n <= 64] if shape.is_moe else [1]
    context = [1, 2, 4, 8]
    for tp, pp, cp, ep in product(tensor, pipeline, context, expert):
        if task.world % (tp * pp * cp):
            continue
        virtual = [v for v in (1, 2, 4) if v == 1 or (pp > 1 and shape.layers % (pp * v) == 0)]
        for vpp, recompute, chunk in product(virtual, ("none", "full"), {given.head_chunk_tokens, 1024}):
            layout = {
                "tensor_parallel": tp, "pipeline_parallel": pp, "virtual_pipeline": vpp, "context_parallel": cp,
                "expert_parallel": ep, "recompute": recompute, "head_chunk_tokens": chunk,
                "sequence_parallel": given.sequence_parallel if tp > 1 else None,
            }  # fmt: skip
            yield from _with_budgets(task, given, layout)


def _with_budgets(task: Task, given: PolicyConfig, layout: dict[str, Any]) -> Iterator[Candidate]:
    """The layout with micro-batches of the given size, and of 1, 1.5 and 2 times the longest sequence."""
    bare = given.model_copy(update=layout)
    align, longest = bare.pack_alignment, task.work.longest
    sizes = {given.micro_batch_tokens, longest, longest * 3 // 2, longest * 2}
    for tokens in sorted({-(-size // align) * align for size in sizes if size >= longest}):
        # model_copy skips validation: these are valid, and there are thousands.
        policy = bare.model_copy(update={"micro_batch_tokens": tokens})
        if why_illegal(task, policy) is None:
            yield judge(task, policy)


def rank(found: list[Candidate]) -> list[Candidate]:
    """The layouts that fit, fastest first, each with its best micro-batch, recomputation and head chunk."""
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in found:
        if candidate.fits:
            key = tuple(getattr(candidate.policy, name) for name in KEYS[:5])
            if key not in best or order(candidate) < order(best[key]):
                best[key] = candidate
    return sorted(best.values(), key=order)


def order(candidate: Candidate) -> tuple[float, float]:
    """Sort key: fastest first, then least memory."""
    return candidate.seconds, candidate.memory.total


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
