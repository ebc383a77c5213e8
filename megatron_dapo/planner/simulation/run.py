"""The steps of a run on a virtual clock: the sampler collects a batch, training and the weight update take their time.

With `max_staleness` k and engines of their own, up to k batches are collected while one trains; a weight update aborts
the running requests, which continue with the new weights. Otherwise engines and trainer work one after the other.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.observe.metrics_file import NOT_FILTERED, dropped_groups
from megatron_dapo.planner.generation import Fleet
from megatron_dapo.planner.simulation.engine import Prompts, SimulatedEngine, unit_of
from megatron_dapo.planner.workload import Workload
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import StepBatch

# An asyncio event loop whose time jumps to the next timer instead of waiting for it.


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
    def __init__(self) -> None:
        self._clock = _Jump()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on a virtual clock that starts at 0."""
    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated. `staleness` 0: engines and trainer take turns."""

    rollout: RolloutConfig
    work: Workload
    fleet: Fleet
    training_seconds: float  # of one step: log-probs, updates, hand-over
    sync_seconds: float
    staleness: int = 0


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


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of the trainer in the picture."""

    name: str
    began: float
    ended: float


@dataclass(slots=True)
class Simulation:
    setting: Setting
    steps: list[SimulatedStep] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    trace: list[list[tuple[float, int]]] = field(default_factory=list)  # of each server: (seconds, running)
    busy: float = 0.0  # seconds, mean over servers
    seconds: float = 0.0

    @property
    def counted(self) -> list[SimulatedStep]:
        """Without the first steps, in which nothing was carried over yet."""
        return self.steps[min(2, len(self.steps) - 1) :]

    def mean(self, name: str) -> float:
        return sum(getattr(step, name) for step in self.counted) / len(self.counted)

    @property
    def step_seconds(self) -> float:
        first = (
            self.steps[len(self.steps) - len(self.counted) - 1].ended if len(self.counted) < len(self.steps) else 0.0
        )
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
        return self.mean("wasted_tokens") / self.mean("tokens")


def simulate(setting: Setting, steps: int = 6, seed: int = 0) -> Simulation:
    return run_virtually(_Run(setting, steps, seed).run())


class _Run:
    def __init__(self, setting: Setting, steps: int, seed: int) -> None:
        self.setting, self.count, self.seed = setting, steps, seed
        self.result = Simulation(setting)
        self.unit = unit_of(setting.work)

    async def run(self) -> Simulation:
        setting = self.setting
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        self.prompts = Prompts(setting.work, self.unit, self.seed)
        self.engine = SimulatedEngine(setting.fleet, self.prompts)
        self.sampler = Sampler(
            self.engine, self.prompts.grade, self.prompts.take, self._config(), groups_per_step=setting.work.prompts,
            seed=self.seed,
        )  # fmt: skip
        self.batches: asyncio.Queue[tuple[StepBatch, float]] = asyncio.Queue()
        self.trained = asyncio.Condition()
        self.steps_trained = 0
        collecting = asyncio.ensure_future(self._collect_all())
        for step in range(self.count):
            await self._train(step)
        await collecting
        servers = self.engine.model.servers
        self.result.trace = self.engine.trace
        self.result.seconds = self.clock()
        self.result.busy = sum(server.busy for server in servers) / len(servers)
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
        for step in range(self.count):
            await self._wait_until_allowed(step)
            began = self.clock()
            batch = await self.sampler.collect(step)
            await self.batches.put((batch, self.clock() - began))

    async def _wait_until_allowed(self, step: int) -> None:
        """A batch may be collected `staleness` steps ahead of the trainer."""
        async with self.trained:
            await self.trained.wait_for(lambda: self.steps_trained >= step - self.setting.staleness)

    async def _train(self, step: int) -> None:
        setting, began = self.setting, self.clock()
        batch, collecting = await self.batches.get()
        if self.clock() > began:
            self.result.bars.append(Bar("wait", began, self.clock()))
        version, began = self.engine.weight_version, self.clock()
        await asyncio.sleep(setting.training_seconds)
        self.result.bars.append(Bar("train", began, self.clock()))
        began = self.clock()
        await self.engine.update(step + 1, setting.sync_seconds)
        self.result.bars.append(Bar("sync", began, self.clock()))
        self.result.steps.append(self._measured(step, batch, collecting, version))
        async with self.trained:
            self.steps_trained += 1
            self.trained.notify_all()

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
