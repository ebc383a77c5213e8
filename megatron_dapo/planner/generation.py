"""Seconds that the engines need for the batch of a step: dynamic sampling on a model of the fleet.

Groups are started, end with their slowest sample, and are kept with probability `kept`; dropped ones are replaced.
How many groups are in flight is the sampler's own `FillPolicy`; the rest is a copy of what the sampler does, without
requests and tasks. `megatron-dapo simulate` runs the sampler itself on the same fleet.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field, replace

from megatron_dapo.config.rollout import SamplerConfig
from megatron_dapo.config.schema import divisors
from megatron_dapo.planner.server_model import DecodeModel, FleetModel, Sequence, ServerModel
from megatron_dapo.planner.workload import Workload
from megatron_dapo.rollout.fill_policy import FillPolicy, YieldEstimate

COUNTED_STEPS = 3  # are averaged
PART = 96  # groups


@dataclass(frozen=True, slots=True)
class ServerKind:
    servers: int
    decode: DecodeModel
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines: `servers` in all, equal but for `others`."""

    servers: int
    decode: DecodeModel
    kv_tokens: int
    max_running: int
    others: tuple[ServerKind, ...] = ()

    @property
    def kinds(self) -> list[ServerKind]:
        """The configured kind, then the others."""
        equal = self.servers - sum(kind.servers for kind in self.others)
        return [ServerKind(equal, self.decode, self.kv_tokens), *self.others]

    def full_speed(self, work: Workload, at_most: float = math.inf) -> float:
        """Tokens per second of all servers when they are always full (or run `at_most`), prefill included."""
        held, speed = work.mean_prompt + work.lengths.held, 0.0
        for kind in self.kinds:
            running = min(max(1.0, min(self.max_running, kind.kv_tokens / held)), at_most)
            step = kind.decode.step(running, running * held)
            prefill = work.mean_prompt / work.samples_per_prompt * kind.decode.per_prompt_token
            speed += kind.servers * running / (step + prefill * running / work.mean_response)
        return speed


@dataclass(frozen=True, slots=True)
class Generation:
    """One step's generation, averaged over simulated steps."""

    seconds: float
    tokens: float  # generated in the step
    wasted: float  # of them, in groups that are dropped
    at_full_speed: float  # seconds for these tokens if the engines were always full

    @property
    def utilisation(self) -> float:
        return self.at_full_speed / self.seconds if self.seconds else 0.0


@dataclass(slots=True, eq=False)
class _Group:
    samples: list[Sequence]
    kept: bool
    age: int = 0  # steps since it was started
    left: int = 0  # samples that have not ended


@dataclass(slots=True)
class _Step:
    """The sampler's state. `undecided` is in the order of prompts."""

    work: Workload
    policy: FillPolicy
    fleet: FleetModel
    random: random.Random
    undecided: dict[int, _Group] = field(default_factory=dict)
    waiting: list[_Group] = field(default_factory=list)  # carried over, not started in this step
    group_of: dict[int, tuple[int, _Group]] = field(default_factory=dict)  # of every sample that is in flight
    ready: set[int] = field(default_factory=set)
    kept: int = 0
    rejected: int = 0
    expected_yield: YieldEstimate = field(default_factory=YieldEstimate)
    serial: int = 0
    wasted: float = 0.0

    @property
    def options(self) -> SamplerConfig:
        return self.policy.options

    def run(self) -> float:
        """One step; its seconds."""
        began = self.fleet.now
        for group in list(self.waiting):
            if self.due(group) and any(sample.generated for sample in group.samples):
                self.waiting.remove(group)
                self.start(group)
        while not self.complete():
            self.refill()
            self.wait()
        if self.options.unfinished == "finish":
            while self.fleet.next_event() is not None:
                self.wait()
            self.decide(list(self.undecided))
        self.settle()
        return self.fleet.now - began

    def due(self, group: _Group) -> bool:
        """The group is from an earlier step, and would be too stale in the next one."""
        return bool(group.age) and self.policy.must_finish_now(group.age)

    def complete(self) -> bool:
        if self.policy.missing(self.kept, self.rejected) > 0:
            return False
        return not any(group.left and self.due(group) for group in self.undecided.values())

    def refill(self) -> None:
        while len(self.undecided) < self.policy.wanted_in_flight(self.kept, self.rejected, self.expected_yield.value):
            if self.policy.engine_full(len(self.group_of)):
                return
            self.start(self.waiting.pop(0) if self.waiting else self.new_group())

    def new_group(self) -> _Group:
        work = self.work
        lengths = work.lengths.group(work.samples_per_prompt, self.random)
        # Samples of a prompt share its keys and values: only the first one computes them.
        samples = [
            Sequence(length, work.mean_prompt, work.mean_prompt if i == 0 else 0) for i, length in enumerate(lengths)
        ]
        return _Group(samples, self.random.random() < work.kept)

    def start(self, group: _Group) -> None:
        self.serial += 1
        todo = [sample for sample in group.samples if sample.remaining]
        group.left = len(todo)
        self.undecided[self.serial] = group
        for sample in todo:
            self.group_of[id(sample)] = self.serial, group
        self.fleet.submit(todo)
        if not todo:
            self.ready.add(self.serial)

    def wait(self) -> None:
        event = self.fleet.next_event()
        if event is not None:
            for sample in self.fleet.run_to_event(event):
                serial, group = self.group_of.pop(id(sample))
                group.left -= 1
                if not group.left:
                    self.ready.add(serial)
        if not self.policy.in_prompt_order:
            self.decide(sorted(self.ready))
            return
        while self.undecided and (first := next(iter(self.undecided))) in self.ready:
            self.decide([first])

    def decide(self, serials: list[int]) -> None:
        for serial in serials:
            group = self.undecided[serial]
            if group.left:
                continue
            del self.undecided[serial]
            self.ready.discard(serial)
            self.expected_yield.add(group.kept)
            if group.kept:
                self.kept += 1
            else:
                self.rejected += 1
                self.wasted += sum(sample.generated for sample in group.samples)

    def settle(self) -> None:
        """Ends the step: the batch is taken, the rest is carried over or dropped."""
        self.kept, self.rejected = max(0, self.kept - self.work.prompts), 0
        mean = self.work.mean_response * self.work.samples_per_prompt
        if self.options.surplus == "drop":
            self.wasted += self.kept * mean
            self.kept = 0
        self.fleet.abort_all()
        self.group_of.clear()
        self.ready.clear()
        carried, self.undecided = [*self.undecided.values(), *self.waiting], {}
        self.waiting = []
        for group in carried:
            generated = sum(sample.generated for sample in group.samples)
            if self.options.unfinished == "drop":
                self.wasted += generated
            elif self.options.unfinished == "restart":
                self.wasted += generated
                self.waiting.append(self.new_group())
            else:
                for sample in group.samples:
                    sample.prefill = sample.context  # computed again, with the new weights
                group.age += 1
                self.waiting.append(group)
        self.expected_yield.end_step()


@functools.cache  # most advice leaves it as it is
def generate(work: Workload, options: SamplerConfig, fleet: Fleet, seed: int = 0) -> Generation:
    """The generation of a step in equilibrium."""
    part = part_of(work, fleet)
    servers, work = fleet.servers // part, replace(work, prompts=work.prompts // part)
    model = FleetModel([ServerModel(fleet.decode, fleet.kv_tokens, fleet.max_running) for _ in range(servers)])
    step = _Step(work, FillPolicy(options, work.prompts, servers * fleet.max_running), model, random.Random(seed))
    carries = options.unfinished in ("continue", "restart")
    counted = COUNTED_STEPS if carries or work.kept < 1 else 1
    steps = counted + 1 if carries else counted  # in the first step nothing has been carried over
    seconds = tokens = wasted = 0.0
    for number in range(steps):
        before = sum(server.generated for server in model.servers), step.wasted
        spent = step.run()
        if number >= steps - counted:
            seconds += spent
            tokens += sum(server.generated for server in model.servers) - before[0]
            wasted += step.wasted - before[1]
    full = tokens / fleet.full_speed(work) * part
    return Generation(seconds / counted, part * tokens / counted, part * wasted / counted, full / counted)


def part_of(work: Workload, fleet: Fleet) -> int:
    """In how many equal parts a large fleet is divided; one is simulated. Enough groups remain for the tails."""
    return max(n for n in divisors(fleet.servers) if n == 1 or work.prompts // n >= PART)
