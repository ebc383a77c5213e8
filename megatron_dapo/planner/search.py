"""The trainer's layouts: which are legal, which fit, and how fast they are; and a configuration with changes.

Searched layouts leave MARGIN of the GPU's memory free and are accepted by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from megatron_dapo.config import Config, ConfigError, ModelShape, check_model, check_world, parse_config
from megatron_dapo.config.critic import CriticConfig
from megatron_dapo.config.load import apply_overrides, as_settings
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.schema import divisors, stage_ends
from megatron_dapo.planner.assumptions import FRAGMENTATION, FRAGMENTATION_BESIDE_ENGINE, MARGIN
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.memory import Layers, TrainerMemory, trainer_memory
from megatron_dapo.planner.timing import most_micro_batches, pass_time
from megatron_dapo.planner.workload import Workload

KEYS = (
    "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel", "recompute",
    "micro_batch_tokens", "head_chunk_tokens", "first_stage_layers", "last_stage_layers", "recompute_modules",
    "recompute_layers", "sequence_parallel", "tp_comm_overlap", "cp_comm_type",
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
    shared: float = 0.0  # bytes of weights that are a colocated engine's own (rollout.servers.share_base)
    buffers: float = 0.0  # bytes that a sender of weights keeps between updates; counted on the fullest rank

    @property
    def world(self) -> int:
        return self.cluster.trainer_gpus

    @property
    def limit(self) -> float:
        return self.cluster.gpu.memory - self.residue

    @property
    def fragmentation(self) -> float:
        return FRAGMENTATION_BESIDE_ENGINE if self.residue and not self.kept else FRAGMENTATION

    @property
    def advised(self) -> float:
        """Bytes that a recommended layout may use."""
        return self.limit - MARGIN * self.cluster.gpu.memory


@dataclass(frozen=True, slots=True)
class Candidate:
    policy: PolicyConfig
    memory: TrainerMemory
    fits: bool
    seconds: float  # training, log-probs and critic of one step
    critic: TrainerMemory | None = None

    @property
    def fullest(self) -> TrainerMemory:
        """While the policy trains, or the critic."""
        return self.critic if self.critic and self.critic.total > self.memory.total else self.memory

    def changes(self, given: PolicyConfig) -> dict[str, Any]:
        """The settings, by dotted key, that turn `given` into this layout."""
        return {
            f"policy.{key}": getattr(self.policy, key)
            for key in KEYS
            if getattr(self.policy, key) != getattr(given, key)
        }


def judge(task: Task, policy: PolicyConfig, memory: TrainerMemory | None = None) -> Candidate:
    """Memory and time of one legal layout."""
    memory = memory or memory_of(task, policy)
    updates, passes = task.work.updates, task.work.log_prob_passes
    arguments = (task.shape, policy, task.cluster, task.work, task.world, task.mfu)
    seconds = updates * pass_time(*arguments, train=True).total
    seconds += updates * passes * pass_time(*arguments, train=False).total
    if task.critic is None:
        return Candidate(policy, memory, memory.total <= task.limit, seconds)
    critic = memory_of(task, task.critic.policy(policy), task.critic.shape)
    if not task.critic.takes_turns:
        memory, critic = replace(memory, other=critic.static), replace(critic, other=memory.static)
    seconds += sum(critic_seconds(task, policy))
    found = Candidate(policy, memory, False, seconds, critic)
    return replace(found, fits=found.fullest.total <= task.limit)


def critic_seconds(task: Task, policy: PolicyConfig) -> tuple[float, float]:
    """Of one step, without hand-overs: the critic's values, and its updates."""
    assert task.critic is not None
    arguments = (task.critic.shape, task.critic.policy(policy), task.cluster, task.work, task.world, task.mfu)
    values = task.work.updates * pass_time(*arguments, train=False).total
    updates = task.work.updates * task.critic.config.epochs * pass_time(*arguments, train=True).total
    return values, updates


def memory_of(task: Task, policy: PolicyConfig, critic: ModelShape | None = None) -> TrainerMemory:
    micro_batches = most_micro_batches(policy, task.work, task.world)
    memory = trainer_memory(critic or task.shape, policy, task.world, micro_batches, task.layers)
    weights = memory.weights - (0.0 if critic else task.shared)
    return replace(memory, weights=weights, fragmentation=task.fragmentation, buffers=task.buffers)


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
    """Every legal layout on these GPUs that fits with the margin. Other settings (optimizer, precision, …) are those of
    `given`, except where a layout does not allow them."""
    shape = task.shape
    tensor = [n for n in divisors(shape.heads) if n <= task.cluster.gpus_per_node]
    expert = [n for n in divisors(shape.experts) if n <= 64] if shape.is_moe else [1]
    for tp, pp, cp, ep in product(tensor, range(1, MODEL_PARALLEL_LIMIT + 1), (1, 2, 4, 8), expert):
        if task.world % (tp * pp * cp) or task.world // pp % ep:
            continue
        for vpp in (1, 2, 4) if pp > 1 else (1,):
            if (ends := _stages(shape.layers, pp, vpp)) is None:
                continue
            layout = {
                "tensor_parallel": tp, "pipeline_parallel": pp, "virtual_pipeline": vpp, "context_parallel": cp,
                "expert_parallel": ep, "first_stage_layers": ends[0], "last_stage_layers": ends[1],
                "sequence_parallel": given.sequence_parallel if tp > 1 else None,
                "tp_comm_overlap": given.tp_comm_overlap and tp > 1,
                "cp_comm_type": given.cp_comm_type if cp > 1 else None, "recompute_layers": None,
            }  # fmt: skip
            bare = given.model_copy(update=layout)
            align = bare.pack_alignment
            longest = bare.model_copy(update={"micro_batch_tokens": -(-task.work.longest // align) * align})
            if why_illegal(task, longest) is None and memory_of(task, longest).static < task.advised:
                for recompute in dict.fromkeys((given.recompute, "none", "full")):
                    modules = given.recompute_modules if recompute == "selective" else ["core_attn"]
                    yield from _with_budgets(task, bare, {"recompute": recompute, "recompute_modules": modules})


@lru_cache(maxsize=256)
def _stages(layers: int, pp: int, vpp: int) -> tuple[int | None, int | None] | None:
    """Layers of the first and last stage, None: as many as the others. None: no division."""
    return (None, None) if layers % (pp * vpp) == 0 else stage_ends(layers, pp, vpp)


def _with_budgets(task: Task, layout: PolicyConfig, recomputation: dict[str, Any]) -> Iterator[Candidate]:
    """The legal layout with micro-batches of the given size, and of 1, 1.5 and 2 times the longest sequence; with
    smaller chunks of logits where it does not fit otherwise."""
    align, longest = layout.pack_alignment, task.work.longest
    sizes = {layout.micro_batch_tokens, longest, longest * 3 // 2, longest * 2}
    for tokens in sorted({-(-size // align) * align for size in sizes if size >= longest}):
        for chunk in dict.fromkeys((layout.head_chunk_tokens, 1024)):
            # model_copy skips validation: most of these do not fit, and there are thousands.
            more = {"micro_batch_tokens": tokens, "head_chunk_tokens": chunk}
            policy = layout.model_copy(update=recomputation | more)
            memory = memory_of(task, policy)
            if memory.total > task.advised:
                continue
            try:
                policy.check()
            except ValueError:
                break
            found = judge(task, policy, memory)
            if found.fullest.total <= task.advised:
                yield found
                break


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with the settings that `--set` would change; a ConfigError if it refuses them."""
    raw = config.model_dump(mode="json", exclude_unset=True)
    return parse_config(apply_overrides(raw, as_settings(changes)), "--set")


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
