"""The plan: whether the layout fits, what to change if not, the fastest layouts, and the phases of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dapo.config import Config, ConfigError, ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.errors import UserError
from megatron_dapo.planner import assumptions, engine, search, timing
from megatron_dapo.planner.assumptions import DEFAULT_MFU, ENGINE_OVERHEAD_BYTES, HOST_BYTES_PER_SECOND
from megatron_dapo.planner.engine import EnginePlan, fleet_of, hands_over, memory_fraction, plan_engine
from megatron_dapo.planner.generation import Generation, generate
from megatron_dapo.planner.hardware import GIB, Cluster
from megatron_dapo.planner.memory import Layers, TrainerMemory, library_bytes, stage_memory
from megatron_dapo.planner.models import model_shape
from megatron_dapo.planner.parameters import Parameters, count_parameters, rows_in_hf_order
from megatron_dapo.planner.search import Candidate, CriticTask, Task
from megatron_dapo.planner.sync import buffer_bytes, sync_time
from megatron_dapo.planner.workload import Workload, typical_of
from megatron_dapo.plugins import is_plugin


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float
    detail: str


TRAINING = ("values", "critic", "log-probs", "training")  # phases that engines with GPUs of their own have no part in


def step_seconds(phases: list[Phase], cluster: Cluster, staleness: int) -> float:
    """Engines with GPUs of their own generate while the critic makes its updates; with `staleness`, while all of the
    last batch trains."""
    seconds = {phase.name: phase.seconds for phase in phases}
    if cluster.colocated:
        return sum(seconds.values(), 0.0)
    generation, training = seconds.get("generation", 0.0), sum(seconds.get(name, 0.0) for name in TRAINING)
    return sum(seconds.values()) - min(generation, training if staleness else seconds.get("critic", 0.0))


def step_phases(
    task: Task, rollout: RolloutConfig, trainer: Candidate, engine: EnginePlan | None, generation: Generation | None
) -> list[Phase]:
    policy, memory, phases = trainer.policy, trainer.memory, []
    if engine is not None and generation is not None:
        phases.append(_generation(task, engine, generation))
    if task.critic is not None:
        phases += _critic(task, policy, memory)
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


def _critic(task: Task, policy: PolicyConfig, memory: TrainerMemory) -> list[Phase]:
    critic = task.critic
    assert critic is not None
    values, updates = search.critic_seconds(task, policy)
    turn, moving = 0.0, ""
    if critic.takes_turns:
        own = stage_memory(critic.shape, critic.policy(policy), task.world, 1, memory.stage, task.layers)
        moved = memory.weights + memory.optimizer + own.weights + own.optimizer
        turn = 2 * moved / HOST_BYTES_PER_SECOND
        moving = f", {turn:.1f} s: {moved / GIB:.1f} GiB a GPU to host memory and back"
    what = f"{task.work.updates * critic.config.epochs} updates{moving}"
    if not task.cluster.colocated:
        what += "; while engines generate"
    return [
        Phase("values", values + turn, f"a forward pass of the critic over the batch{moving}"),
        Phase("critic", updates + turn, what),
    ]


def _sync(task: Task, rollout: RolloutConfig, policy: PolicyConfig, engine: EnginePlan) -> Phase:
    cluster, weights = task.cluster, rollout.weights
    nodes = -(-engine.servers * engine.tensor_parallel // cluster.gpus_per_node)
    time = sync_time(task.shape, policy, weights, cluster, nodes, engine.tensor_parallel)
    return Phase("weight sync", time.total, f"{weights.transport}, {time.describe()}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A trainer layout with an engine size; `engine` is None without GPU engines."""

    trainer: Candidate
    engine: EnginePlan | None
    fits: bool
    at_full_speed: float  # seconds of generation if the engines were always full: for ranking
    generation: Generation | None = None

    @property
    def seconds(self) -> float:
        return self.trainer.seconds + self.at_full_speed

    def changes(self, config: Config) -> dict[str, Any]:
        changes = self.trainer.changes(config.policy)
        if self.engine and self.engine.tensor_parallel != config.rollout.servers.tensor_parallel:
            changes["rollout.servers.tensor_parallel"] = self.engine.tensor_parallel
        return changes


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings that make a step faster, and fit."""

    changes: dict[str, Any]
    seconds: float  # of a step with them
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    shape: ModelShape
    parameters: Parameters
    cluster: Cluster
    work: Workload
    layout: PolicyConfig
    chosen: Choice | None  # the given layout, or the best one when none was given; None: illegal
    ranking: list[Candidate]  # layouts that fit beside the chosen engine, fastest first
    engines: list[Choice]  # the chosen layout with every engine size
    changes: dict[str, Any] | None  # the fewest keys that make it fit; None: it fits, or nothing does
    problems: list[str]
    limit: float  # bytes of one GPU that the trainer may use
    phases: list[Phase] = field(default_factory=list)
    step_seconds: float = 0.0
    steps: int = 0  # of the run
    assumptions: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)  # see advice.py

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def likely(self) -> tuple[float, float]:
        """Seconds of a step between which four of five published runs are, relative to their prediction."""
        low, high = assumptions.LIKELY
        return low * self.step_seconds, high * self.step_seconds

    @property
    def days(self) -> float:
        return self.steps * self.step_seconds / 86400

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.cluster.gpus


def make_plan(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    work: Workload,
    mfu: float = DEFAULT_MFU,
    layers: Layers = "te",
    choose: bool = False,
) -> Plan:
    """Judges the configured layout and engine size, or with `choose` takes the fastest that fit; what is set stays."""
    task = task_of(config, shape, cluster, work, mfu, layers)
    planner = Planner(config, task)
    found = list(search.candidates(task, config.policy))
    reason = None if choose else planner.why_not()
    chosen: Choice | None = None
    if choose:
        chosen = planner.best(found)
    elif reason is None:
        chosen = planner.choice(search.judge(task, config.policy), config.rollout.servers.tensor_parallel)
    problems = [reason] if reason else planner.problems(chosen)
    tp = chosen.engine.tensor_parallel if chosen and chosen.engine else config.rollout.servers.tensor_parallel
    if chosen and chosen.fits:
        chosen = planner.with_generation(chosen)
    phases = planner.phases(chosen) if chosen and not problems else []
    return Plan(
        shape, count_parameters(shape), cluster, work,
        layout=chosen.trainer.policy if chosen else config.policy,
        chosen=chosen,
        ranking=search.rank([c for c in found if planner.choice(c, tp).fits]),
        engines=[planner.choice(chosen.trainer, size) for size in planner.engine_sizes()] if chosen else [],
        changes=planner.smallest_change(found) if problems else None,
        problems=problems,
        limit=task.limit,
        phases=phases,
        step_seconds=step_seconds(phases, cluster, config.rollout.max_staleness),
        steps=config.trainer.steps,
        assumptions=[*_machine(task), *_workload(task, config), *_trainer(task), *_engine(task, config)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planner:
    """Combines trainer layouts and engine sizes."""

    config: Config
    task: Task
    engines: dict[int, tuple[EnginePlan, float]] = field(default_factory=dict)  # by tensor-parallel size

    def engine_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the heads and the GPUs that serve, within a node."""
        if self.config.rollout.engine == "embedded":
            return []
        cluster, heads = self.task.cluster, self.task.shape.heads
        gpus = cluster.engine_gpus or cluster.gpus
        return [n for n in (1, 2, 4, 8, 16) if n <= cluster.gpus_per_node and heads % n == 0 and gpus % n == 0]

    def why_not(self) -> str | None:
        """Why the configured layout is impossible, or None."""
        servers, cluster = self.config.rollout.servers, self.task.cluster
        gpus, tp = cluster.engine_gpus or cluster.gpus, servers.tensor_parallel
        if self.config.rollout.engine == "sglang" and not servers.urls and (gpus % tp or self.task.shape.heads % tp):
            return (
                f"rollout.servers.tensor_parallel is {tp}: it must divide the {self.task.shape.heads} attention heads "
                f"and the {gpus} GPUs that serve"
            )
        return search.why_illegal(self.task, self.config.policy)

    def choice(self, trainer: Candidate, tp: int) -> Choice:
        """This layout with engines of `tp` GPUs."""
        if self.config.rollout.engine == "embedded":
            return Choice(trainer, None, trainer.fits, 0.0)
        serving, seconds = self.engine(tp)
        return Choice(trainer, serving, trainer.fits and serving.fits, seconds)

    def engine(self, tp: int) -> tuple[EnginePlan, float]:
        """Engines of `tp` GPUs, and the seconds of a step's generation if they were always full."""
        if tp not in self.engines:
            task, rollout = self.task, self.config.rollout
            serving = plan_engine(task.shape, rollout, task.cluster, task.work, task.kept, tp)
            seconds = 0.0
            if serving.fits:
                speed = fleet_of(task.shape, serving, rollout, task.cluster).full_speed(task.work, serving.running)
                seconds = task.work.generated * task.work.mean_response / speed
            self.engines[tp] = serving, seconds
        return self.engines[tp]

    def with_generation(self, choice: Choice) -> Choice:
        """Adds the generation of a step, with tails and dropped groups."""
        if choice.engine is None:
            return choice
        fleet = fleet_of(self.task.shape, choice.engine, self.config.rollout, self.task.cluster)
        return replace(choice, generation=generate(self.task.work, self.config.rollout.sampler, fleet))

    def phases(self, choice: Choice) -> list[Phase]:
        return step_phases(self.task, self.config.rollout, choice.trainer, choice.engine, choice.generation)

    def pairs(self, trainers: Iterable[Candidate]) -> list[Choice]:
        """Every combination that fits."""
        sizes = self.engine_sizes() or [1]
        return [pair for c in trainers for tp in sizes if (pair := self.choice(c, tp)).fits]

    def best(self, found: list[Candidate]) -> Choice | None:
        """The fastest that fits and changes none of the values that are set."""
        policy, servers = self.config.policy, self.config.rollout.servers
        given = {f"policy.{key}" for key in policy.model_fields_set}
        given |= {f"rollout.servers.{key}" for key in servers.model_fields_set}
        pairs = self.pairs(search.rank([c for c in found if given.isdisjoint(c.changes(policy))]))
        pairs = [pair for pair in pairs if given.isdisjoint(pair.changes(self.config))]
        return min(pairs, key=lambda pair: pair.seconds, default=None)

    def smallest_change(self, found: list[Candidate]) -> dict[str, Any] | None:
        """The fewest keys that make it fit; among those, the fastest. None: nothing fits."""
        for pair in sorted(self.pairs(found), key=lambda pair: (len(pair.changes(self.config)), pair.seconds)):
            changes = pair.changes(self.config)
            with contextlib.suppress(ConfigError):
                search.with_changes(self.config, changes)
                return changes
        return None

    def step(self) -> float | None:
        """Seconds of a step as configured; None: it does not fit."""
        servers = self.config.rollout.servers
        if self.why_not() is not None:
            return None
        choice = self.choice(search.judge(self.task, self.config.policy), servers.tensor_parallel)
        if not choice.fits:
            return None
        phases = self.phases(self.with_generation(choice))
        return step_seconds(phases, self.task.cluster, self.config.rollout.max_staleness)

    def problems(self, chosen: Choice | None) -> list[str]:
        """What does not fit, with the part that is too large."""
        if chosen is None:
            # Memory is not to blame if even the layout is impossible.
            why = search.why_illegal(self.task, self.config.policy)
            return [f"no layout on {self.task.cluster.gpus} GPUs fits both trainer and engine", *([why] if why else [])]
        problems, serving, mem = [], chosen.engine, chosen.trainer.fullest
        if not chosen.trainer.fits:
            who = "critic" if mem is chosen.trainer.critic else "trainer"
            part, size = max(mem.parts.items(), key=lambda item: item[1])
            problems.append(
                f"the {who} needs {mem.total / GIB:.1f} GiB on a rank of pipeline stage {mem.stage}, but has "
                f"{self.task.limit / GIB:.1f} GiB; the largest part is {part} with {size / GIB:.1f} GiB"
            )
        if serving and not serving.fits:
            beside = f"the trainer's {self.task.kept / GIB:.1f} GiB and " if self.task.kept else ""
            problems.append(
                f"the engine at tensor parallel {serving.tensor_parallel} has {serving.kv_room / GIB:.1f} GiB for its "
                f"KV cache beside {beside}{serving.weights / GIB:.1f} GiB of weights; one sequence of "
                f"{serving.longest} tokens takes {serving.longest * serving.kv_per_token / GIB:.1f} GiB"
            )
        return problems


def task_of(
    config: Config, shape: ModelShape, cluster: Cluster, work: Workload, mfu: float, layers: Layers = "te"
) -> Task:
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu is {mfu}: expected a share of the GPU's peak between 0 and 1, usually {DEFAULT_MFU}")
    critic = None
    if config.uses_critic:
        own = model_shape(config.critic.model, "critic.model") if config.critic.model else shape
        critic = CriticTask(own.as_value_model(), config.critic)
    shared = 2.0 * rows_in_hf_order(shape) if config.rollout.shares_base else 0.0
    if shared and (cluster.gpus > 1 or not cluster.colocated):
        raise UserError("rollout.servers.share_base is for trainer and server on one GPU: plan it with --gpus 1")
    residue, kept = shared_gpu(config, cluster)
    buffers = buffer_bytes(shape, config.policy.precision, config.rollout.weights, cluster)
    if kept or config.rollout.sends_adapters:
        buffers = 0.0
    return Task(shape, work, cluster, mfu, layers, residue, kept, critic, shared, buffers)


def shared_gpu(config: Config, cluster: Cluster) -> tuple[float, float]:
    """On a shared GPU: bytes that the engine holds while the trainer works, and the trainer while engines generate."""
    rollout = config.rollout
    if rollout.engine == "embedded" or rollout.servers.urls or not cluster.colocated:
        return 0.0, 0.0
    if hands_over(rollout):
        return assumptions.ENGINE_RELEASED_BYTES, library_bytes(cluster.trainer_gpus)
    # The engine allocates its share before the trainer starts, and keeps it.
    return memory_fraction(rollout.servers.arguments) * cluster.gpu.memory + ENGINE_OVERHEAD_BYTES, 0.0


def _machine(task: Task) -> list[str]:
    gpu, cluster = task.cluster.gpu, task.cluster
    return [
        (
            f"{gpu.name}: {gpu.memory_gib:g} GiB, {gpu.tflops:g} TFLOP/s bf16, {gpu.bandwidth:g} TB/s, "
            f"{gpu.nvlink:g} GB/s inside a node of {cluster.gpus_per_node}, {gpu.network:g} GB/s between nodes"
        ),
        f"collectives reach {assumptions.WIRE_SHARE:.0%} of that bandwidth",
    ]


def _workload(task: Task, config: Config) -> list[str]:
    work = task.work
    lines = [
        (
            f"lengths: prompts {work.mean_prompt} tokens on average (at most {work.max_prompt}), responses "
            f"{work.mean_response} (at most {work.max_response}); memory is planned for the maximum"
        ),
        (
            f"{work.kept:.0%} of the sampled groups are kept: {work.generated} samples are generated for "
            f"{work.samples} that train"
        ),
    ]
    if typical := typical_of(config):
        lines.append(
            f"typical for {typical.model} with {typical.data}: prompts of {typical.prompt}, responses of "
            f"{typical.response} tokens, {typical.kept:.0%} kept ({typical.source}); defaults unless --mean-prompt, "
            "--mean-response or --kept are given"
        )
    if config.algorithm.kl.coefficient:
        lines.append(
            "the reference policy (algorithm.kl.coefficient) adds one log-prob pass; its weights are in host memory "
            "and change places with the policy's, so it takes no GPU memory"
        )
    elif is_plugin(config.algorithm.objective):
        lines.append(
            f"{config.algorithm.objective} is not imported: if it reads the reference policy (Needs.reference), a step "
            "has one more log-prob pass"
        )
    return lines


def _trainer(task: Task) -> list[str]:
    layers = "Transformer Engine, fused attention" if task.layers == "te" else "torch (no Transformer Engine)"
    width = assumptions.HALF_SPEED_WIDTH * task.cluster.gpu.traffic_cost
    lines = [
        (
            f"very wide products reach {task.mfu:g} of the peak, those of {width:.0f} half of that, "
            f"attention {assumptions.ATTENTION_MFU_SHARE:.0%}; in fp8 products are {assumptions.FP8_SPEED:g} times "
            "faster, and conversions are added; so are recomputation, bubbles and exposed collectives"
        ),
        (
            f"{assumptions.EXPOSED_CONTEXT:.0%} of the context-parallel exchange is not hidden; packing fills "
            f"{assumptions.FILL:.0%} of a micro-batch; the busiest rank has {assumptions.BALANCE:g} times the mean "
            f"tokens; products of {assumptions.HALF_SPEED_TOKENS} tokens and attention over chunks of "
            f"{assumptions.HALF_SPEED_CHUNK} reach half of the speed"
        ),
        f"layers: {layers}; the head holds one chunk of logits, which their gradient replaces",
        (
            f"reserve: {assumptions.CONTEXT_BYTES / GIB:g} GiB CUDA, {assumptions.NCCL_BYTES / GIB:g} GiB NCCL, "
            f"{task.fragmentation:.0%} of activations and working space, which torch keeps unused"
        ),
    ]
    if task.shape.is_moe:
        lines.append(
            f"experts: the fullest rank gets {assumptions.EXPERT_IMBALANCE:g} times the mean tokens (in time "
            f"{assumptions.EXPERT_WAIT:g}), and {assumptions.MOE_LAYER_SECONDS * 1e3:g} ms are added per layer, pass "
            "and micro-batch"
        )
    return lines


def _engine(task: Task, config: Config) -> list[str]:
    servers = config.rollout.servers
    if config.rollout.engine == "embedded":
        return ["the embedded engine runs on the CPU: no memory on the GPU, and its time is not predicted"]
    if servers.urls:
        where = f"{len(servers.urls)} external servers, on GPUs of the same kind"
    elif task.cluster.colocated:
        where = (
            "colocated with a fixed split: the engine keeps its share of the GPU, the trainer has the rest"
            if not engine.hands_over(config.rollout)
            else "colocated with hand-over (rollout.servers.share_gpus must be true): engines release weights and KV "
            f"cache while the trainer works ({assumptions.ENGINE_RELEASED_BYTES / GIB:g} GiB stay), the trainer's "
            f"state is in host memory while they generate ({task.kept / GIB:.1f} GiB stay)"
        )
    else:
        ahead = config.rollout.max_staleness
        order = f"at the same time (max_staleness {ahead})" if ahead else "one after the other"
        where = f"disaggregated: {task.cluster.engine_gpus} GPUs only serve, {task.world} only train, {order}"
    adapter = f" (and {assumptions.SECONDS_PER_ADAPTED_LAYER * 1e6:g} for its adapter)" * config.rollout.sends_adapters
    return [
        where,
        f"an engine takes at most {engine.memory_fraction(servers.arguments):.0%} of a GPU for weights and KV cache",
        (
            f"decoding reaches {assumptions.READ_SHARE:.0%} of memory bandwidth; "
            f"{assumptions.SECONDS_PER_LAYER * 1e6:g} µs per layer{adapter} and "
            f"{assumptions.SECONDS_PER_SEQUENCE['sglang'] * 1e6:g} µs per sequence are added (fitted to vLLM on H100 "
            "and SGLang on H200)"
        ),
        (
            f"response lengths are log-normal with sigma {task.work.sigma:g} (--sigma), cut at the maximum; "
            f"{assumptions.GROUP_SHARE:.0%} of the variance is between prompts"
        ),
        (
            f"weights move at {assumptions.DISK_BYTES_PER_SECOND / 1e9:g} GB/s per node and "
            f"{assumptions.DISK_TOTAL_BYTES_PER_SECOND / 1e9:g} GB/s in all (disk: written, then read), "
            f"engine GPUs copy their shards at {assumptions.LOAD_BYTES_PER_SECOND / 1e9:g} GB/s, and the tensor "
            f"of an expert costs {assumptions.SECONDS_PER_EXPERT_NAME * 1e6:g} µs more; snapshots "
            f"{assumptions.SNAPSHOT_BYTES_PER_SECOND / 1e9:g} GB/s"
        ),
    ]
