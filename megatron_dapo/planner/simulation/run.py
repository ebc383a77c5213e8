"""The steps of a run on a virtual clock: the sampler collects a batch, training and the weight update take their time.

With `max_staleness` k and engines of their own, up to k batches are collected while one trains; a weight update aborts
the running requests, which continue with the new weights. Otherwise engines and trainer work one after the other, but
a critic is trained while engines with GPUs of their own collect the next batch. A sweep simulates all combinations of
several values of dotted keys, and of `engine_gpus`: the GPUs that only run engines.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, TypeVar

from megatron_dapo.config import Config, ModelShape, load_config
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.metrics_file import NOT_FILTERED, dropped_groups
from megatron_dapo.observe.timeline import Span
from megatron_dapo.planner.engine import fleet_of, plan_engine
from megatron_dapo.planner.generation import Fleet, ServerKind, part_of
from megatron_dapo.planner.hardware import Cluster, cluster_of, find_gpu
from megatron_dapo.planner.models import model_shape
from megatron_dapo.planner.plan import Planner, step_phases, task_of
from megatron_dapo.planner.search import judge
from megatron_dapo.planner.simulation.engine import Prompts, SimulatedEngine, from_run, rollout_function
from megatron_dapo.planner.simulation.incidents import Incidents
from megatron_dapo.planner.workload import Workload
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import StepBatch

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Never waits: the time that a selector would wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that never happens")
            self.now += max(0.0, timeout)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._clock = _Jump()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.get_loop().run_until_complete(coroutine)  # its `run` would print the result for nothing


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated. `staleness` 0: engines and trainer take turns, but for `critic_seconds`."""

    rollout: RolloutConfig
    work: Workload
    fleet: Fleet
    training_seconds: float  # of one step: log-probs, updates, hand-over
    sync_seconds: float
    staleness: int = 0
    incidents: Incidents = field(default_factory=Incidents)
    critic_seconds: float = 0.0  # of one step, after the weight update, while the next batch is collected


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    step: int
    ended: float  # when its batch had been trained and its weights sent
    collecting: float  # seconds from the start of its collection to the batch
    tokens: float  # generated since the last batch was complete
    trained_tokens: float
    wasted_tokens: float
    kept: float  # kept groups per group that the filter judged
    mean_staleness: float  # over trained tokens, in weight versions
    max_staleness: int


@dataclass(slots=True)
class Simulation:
    setting: Setting
    steps: list[SimulatedStep] = field(default_factory=list)
    phases: list[Span] = field(default_factory=list)
    trace: list[list[tuple[float, int]]] = field(default_factory=list)  # of each server: (seconds, running)

    @property
    def counted(self) -> list[SimulatedStep]:
        """Without the first steps, in which nothing was carried over yet."""
        return self.steps[min(2, len(self.steps) - 1) :]

    def mean(self, name: str) -> float:
        return sum(getattr(step, name) for step in self.counted) / len(self.counted)

    @property
    def step_seconds(self) -> float:
        skipped = len(self.steps) - len(self.counted)
        first = self.steps[skipped - 1].ended if skipped else 0.0
        return (self.steps[-1].ended - first) / len(self.counted)

    @property
    def limit(self) -> float:
        """Seconds to collect a batch if the engines were always full: trained tokens ÷ yield ÷ full speed."""
        full = self.setting.fleet.full_speed(self.setting.work)
        return self.mean("trained_tokens") / self.mean("kept") / full

    @property
    def over_limit(self) -> float:
        """Seconds of collecting a batch, relative to the limit."""
        return self.mean("collecting") / self.limit

    @property
    def utilisation(self) -> float:
        """Generated tokens per second of the whole step, relative to engines that are always full."""
        full = self.setting.fleet.full_speed(self.setting.work)
        return self.mean("tokens") / self.step_seconds / full

    @property
    def waste(self) -> float:
        """Of the tokens that were trained or wasted: what a step generates may be either in a later one."""
        wasted = self.mean("wasted_tokens")
        return wasted / (wasted + self.mean("trained_tokens"))


def simulate(setting: Setting, steps: int = 6, seed: int = 0) -> Simulation:
    return run_virtually(_Run(setting, steps, seed).run())


class _Run:
    def __init__(self, setting: Setting, steps: int, seed: int) -> None:
        self.setting = setting
        self.count = steps
        self.seed = seed
        self.result = Simulation(setting)
        self.unit = max(1, setting.work.mean_response // 128)  # tokens; a mean response has 128 units

    async def run(self) -> Simulation:
        setting = self.setting
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        function = rollout_function(setting.incidents.tools)
        turns = setting.incidents.tools.calls + 1 if function else 1
        self.prompts = Prompts(setting.work, self.unit, self.seed, turns)
        self.engine = SimulatedEngine(setting.fleet, self.prompts)
        for seconds, servers in setting.incidents.changes:
            loop.call_at(seconds, self.engine.change_servers, servers)
        self.sampler = Sampler(
            self.engine, self.prompts.grade, self.prompts.take, self._config(), groups_per_step=setting.work.prompts,
            seed=self.seed, function=function,
        )  # fmt: skip
        self.batches: asyncio.Queue[tuple[StepBatch, float]] = asyncio.Queue()
        self.trained = asyncio.Condition()
        self.steps_trained = 0
        await asyncio.gather(self._collect_all(), self._train_all())
        self.result.trace = self.engine.trace
        return self.result

    def _config(self) -> RolloutConfig:
        """The run's configuration, with lengths in units and the built-in filter."""
        work = self.setting.work
        changes: dict[str, Any] = {
            "max_response_tokens": max(1, work.max_response // self.unit),
            "max_prompt_tokens": max(1, work.max_prompt // self.unit),
            "group_filter": "accuracy",
            "stop": [],
        }
        return self.setting.rollout.model_copy(update=changes)

    async def _collect_all(self) -> None:
        first, last = self.setting.work.kept, self.setting.incidents.kept_end
        for step in range(self.count):
            async with self.trained:  # a batch may be collected `staleness` steps ahead of the trainer
                while self.steps_trained < step - self.setting.staleness:
                    await self.trained.wait()
            if last is not None:
                self.prompts.kept = first + (last - first) * step / max(1, self.count - 1)
            began = self.clock()
            batch = await self.sampler.collect(step)
            await self.batches.put((batch, self.clock() - began))

    async def _train_all(self) -> None:
        setting = self.setting
        for step in range(self.count):
            batch, collecting = await self._timed("wait", self.batches.get())
            version = self.engine.weight_version
            await self._timed("train", asyncio.sleep(setting.training_seconds))
            pauses = not setting.rollout.sends_adapters
            await self._timed("sync", self.engine.update(step + 1, setting.sync_seconds, pauses=pauses))
            self.result.steps.append(self._measured(step, batch, collecting, version))
            async with self.trained:
                self.steps_trained += 1
                self.trained.notify_all()
            if setting.critic_seconds and step + 1 < self.count:
                await self._timed("critic", asyncio.sleep(setting.critic_seconds))

    async def _timed(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        began = self.clock()
        found = await work
        if self.clock() > began:
            self.result.phases.append(Span(phase, began, self.clock()))
        return found

    def _measured(self, step: int, batch: StepBatch, collecting: float, version: int) -> SimulatedStep:
        spans = [span for sample in batch.samples for span in sample.weight_spans]
        units = sum(span.end - span.start for span in spans)
        lag = sum((version - span.version) * (span.end - span.start) for span in spans)
        metrics, dropped = batch.metrics, dropped_groups(batch.metrics)
        kept = metrics["rollout/groups_kept"] + dropped.get("surplus", 0.0)
        judged = kept + sum(n for reason, n in dropped.items() if reason not in NOT_FILTERED)
        return SimulatedStep(
            step=step,
            ended=self.clock(),
            collecting=collecting,
            tokens=metrics["rollout/response_tokens"] * self.unit,
            trained_tokens=units * self.unit,
            wasted_tokens=metrics["rollout/wasted_tokens"] * self.unit,
            kept=kept / judged,
            mean_staleness=lag / max(1, units),
            max_staleness=max((version - span.version for span in spans), default=0),
        )


SPLIT = "engine_gpus"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the flags of the command say."""

    config: str | None
    set: list[str]
    hardware: dict[str, Any]  # for `cluster_of`
    mfu: float
    estimates: dict[str, Any]  # for `Workload.of`
    from_run: str | None = None  # a run directory, for lengths and yield
    steps: int = 6
    seed: int = 0
    whole: bool = False  # simulate every server, even of a large fleet
    incidents: Incidents = field(default_factory=Incidents)
    shape_of: Callable[[str], ModelShape] = field(default_factory=lambda: cache(model_shape))  # asks the hub once


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of a sweep. `problem`: why it cannot be simulated."""

    values: dict[str, str]
    simulation: Simulation | None
    parts: int = 1
    problem: str = ""


def parse_sweep(texts: list[str]) -> dict[str, list[str]]:
    """`key=a,b,c` of every --sweep."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(f"--sweep {text}: expected KEY=VALUE,VALUE, for example rollout.max_staleness=0,1")
        found[key] = [*found.get(key, ()), *values.split(",")]
        if key == SPLIT and not all(value.strip().isdecimal() for value in found[key]):
            raise UserError(f"--sweep {text}: expected numbers of GPUs, for example {SPLIT}=32,64")
    return found


def run_sweep(inputs: Inputs, keys: dict[str, list[str]]) -> list[Variant]:
    return [_variant(inputs, dict(zip(keys, values, strict=True))) for values in product(*keys.values())]


def _variant(inputs: Inputs, values: dict[str, str]) -> Variant:
    settings = [f"{key}={value}" for key, value in values.items() if key != SPLIT]
    split = {SPLIT: int(values[SPLIT])} if SPLIT in values else {}
    try:
        config = load_config(inputs.config, [*inputs.set, *settings])
        setting, parts = make_setting(inputs, config, cluster_of(config.slurm, **(inputs.hardware | split)))
        return Variant(values, simulate(setting, inputs.steps, inputs.seed), parts)
    except UserError as error:
        if not values:
            raise
        return Variant(values, None, problem=str(error))


def make_setting(inputs: Inputs, config: Config, cluster: Cluster) -> tuple[Setting, int]:
    """What to simulate, and in how many equal parts the fleet was divided."""
    if config.rollout.engine != "sglang":
        raise UserError(f"rollout.engine is {config.rollout.engine}: only SGLang servers are simulated")
    work = Workload.of(config, **inputs.estimates)
    if inputs.from_run:
        work = from_run(inputs.from_run, work)
    task = task_of(config, inputs.shape_of(config.policy.model), cluster, work, inputs.mfu)
    if reason := Planner(config, task).why_not():
        raise UserError(reason)
    engine = plan_engine(task.shape, config.rollout, cluster, work, task.kept)
    if not engine.fits:
        raise UserError(f"an engine of {engine.tensor_parallel} GPUs does not fit; see megatron-dapo plan")
    fleet = fleet_of(task.shape, engine, config.rollout, cluster)

    def of_gpu(name: str) -> ServerKind:
        other = replace(cluster, gpu=find_gpu(name))
        there = plan_engine(task.shape, config.rollout, other, work, task.kept)
        if not there.fits:
            raise UserError(f"--mixed: an engine of {there.tensor_parallel} GPUs does not fit on {name}")
        return ServerKind(1, fleet_of(task.shape, there, config.rollout, other).decode, there.kv_tokens)

    fleet = inputs.incidents.apply(fleet, of_gpu)
    phases = step_phases(task, config.rollout, judge(task, config.policy), engine, None)
    seconds: dict[str, float] = {phase.name: phase.seconds for phase in phases}
    sync = seconds.pop("weight sync")
    staleness: int = 0 if cluster.colocated else config.rollout.max_staleness
    critic = 0.0 if staleness or cluster.colocated else seconds.pop("critic", 0.0)
    events = inputs.incidents  # of single servers: a part of the fleet cannot stand for all of it
    parts = 1 if inputs.whole or events.slow or events.mixed or events.changes else part_of(work, fleet)
    work = replace(work, prompts=work.prompts // parts)
    fleet = replace(fleet, servers=fleet.servers // parts)
    return Setting(config.rollout, work, fleet, sum(seconds.values()), sync, staleness, inputs.incidents, critic), parts
