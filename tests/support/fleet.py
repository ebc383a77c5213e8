"""A fleet of decoding servers on a virtual clock, as an engine for the real sampler.

A server runs `slots` requests at a time; the others queue. All running requests get one token per decoding step, whose
length depends on how many run and on their mean context. New requests stop decoding until their tokens are prefilled;
the samples of a group share the prompt. The length of a sample and whether its group is informative follow from its
seed and prompt, so all sampling policies meet the same work.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from simulation import Prompts, run_virtual

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Capabilities, Completion, SamplingParams
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, StepBatch, WeightSpan

DecodeStep = Callable[[int, float], float]  # (running requests, mean context in tokens) -> seconds


@dataclass(frozen=True)
class Lengths:
    """Log-normal response lengths. `per_prompt` is the share of the variance that the samples of a prompt share."""

    mean: float
    sigma: float
    longest: int
    per_prompt: float = 0.5
    prompt: int = 150

    def sample(self, prompt_id: str, seed: int) -> int:
        normal = NormalDist()
        shared, own = (normal.inv_cdf(random.Random(key).uniform(1e-9, 1 - 1e-9)) for key in (prompt_id, str(seed)))
        deviation = math.sqrt(self.per_prompt) * shared + math.sqrt(1 - self.per_prompt) * own
        length = math.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * deviation)
        return max(1, min(self.longest, round(length)))


@dataclass(eq=False)
class _Request:
    left: int
    context: int
    future: asyncio.Future[bool]
    prefill: float
    started_at: float = 0.0  # decoding steps of the server
    running: bool = False
    made: int = 0  # tokens, when it was aborted


@dataclass(eq=False)
class _Server:
    slots: int
    decode_step: DecodeStep
    prefill_rate: float
    running: int = 0
    context: float = 0.0  # of all running requests, when they started
    steps: float = 0.0  # decoding steps since the beginning
    at: float = 0.0  # time of `steps`
    stalled_until: float = 0.0
    tokens: float = 0.0
    queue: deque[_Request] = field(default_factory=deque)
    heap: list[tuple[float, int, _Request]] = field(default_factory=list)
    count: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return self.running + len(self.queue)

    def step_seconds(self) -> float:
        return self.decode_step(self.running, self.context / self.running)

    def advance(self) -> None:
        now = asyncio.get_running_loop().time()
        begin = min(now, max(self.at, self.stalled_until))
        if self.running:
            done = (now - begin) / self.step_seconds()
            self.steps += done
            self.context += done * self.running
            self.tokens += done * self.running
        self.at = now

    def add(self, request: _Request) -> None:
        self.advance()
        self.queue.append(request)
        self.admit()

    def admit(self) -> None:
        while self.queue and self.running < self.slots:
            request = self.queue.popleft()
            if request.future.done():
                continue
            self.stalled_until = max(self.at, self.stalled_until) + request.prefill / self.prefill_rate
            request.running, request.started_at = True, self.steps
            self.running += 1
            self.context += request.context
            self.count += 1
            heapq.heappush(self.heap, (self.steps + request.left, self.count, request))
        self.schedule()

    def remove(self, request: _Request) -> int:
        """Frees the slot; returns the tokens generated."""
        made = min(request.left, int(self.steps - request.started_at + 1e-6)) if request.running else 0
        if request.running:
            self.running -= 1
            self.context = max(0.0, self.context - request.context - made) if self.running else 0.0
            request.running = False
        return made

    def schedule(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        while self.heap and not self.heap[0][2].running:
            heapq.heappop(self.heap)
        if self.heap:
            wait = max(0.0, self.stalled_until - self.at)
            wait += max(0.0, self.heap[0][0] - self.steps) * self.step_seconds()
            self.timer = asyncio.get_running_loop().call_later(wait, self.finish)

    def finish(self) -> None:
        self.timer = None
        self.advance()
        while self.heap and self.heap[0][0] <= self.steps + 1e-6:
            request = heapq.heappop(self.heap)[2]
            if request.running and not request.future.done():
                request.future.set_result(True)
                self.remove(request)
        self.admit()


class FleetEngine:
    def __init__(
        self,
        lengths: Lengths,
        decode_step: DecodeStep,
        *,
        servers: int = 1,
        slots: int = 256,
        prefill_rate: float = 1e5,
        group_size: int = 8,
    ) -> None:
        self.weight_version, self.max_running = 0, servers * slots
        self._lengths, self._group_size = lengths, group_size
        self.servers = [_Server(slots, decode_step, prefill_rate) for _ in range(servers)]
        self._requests: dict[str, tuple[_Server, _Request]] = {}

    async def capabilities(self) -> Capabilities:
        return Capabilities("fleet", seeded=True)

    async def generate(self, request_id: str, prompt: Any, params: SamplingParams) -> Completion:
        assert params.seed is not None
        known = len(prompt) - self._lengths.prompt
        whole = self._lengths.sample(f"p{prompt[0]}", params.seed)
        server = min(self.servers, key=lambda server: server.load)
        prefill = known + self._lengths.prompt / self._group_size
        request = _Request(whole - known, len(prompt), asyncio.get_running_loop().create_future(), prefill)
        self._requests[request_id] = server, request
        server.add(request)
        version = self.weight_version
        try:
            finished = await request.future
        finally:
            del self._requests[request_id]
        made = request.left if finished else min(request.made, request.left - 1)
        reason = FinishReason.ABORT if not finished else FinishReason.STOP
        reason = FinishReason.LENGTH if finished and whole == self._lengths.longest else reason
        spans = [WeightSpan(version, 0, made)] if made else []
        return Completion(np.zeros(made, np.int32), np.zeros(made, np.float32), reason, "", spans)

    async def abort(self, request_id: str | None = None) -> None:
        touched = set()
        for name, (server, request) in list(self._requests.items()):
            if request_id in (None, name) and not request.future.done():
                server.advance()
                request.made = server.remove(request)
                request.future.set_result(False)
                touched.add(server)
        if request_id is None:
            for server in self.servers:
                server.queue.clear()
        for server in touched:
            server.admit()

    @property
    def tokens(self) -> float:
        return sum(server.tokens for server in self.servers)


class FleetPrompts(Prompts):
    """Prompts of `length` tokens; the first token is the prompt's number."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __call__(self) -> Prompt:
        prompt = super().__call__()
        prompt.tokens = np.full(self._length, self.drawn - 1, np.int32)
        return prompt


def informative_with(probability: Callable[[], float], group_size: int):
    """A grader: the group of a prompt is informative with this probability, otherwise all correct."""

    async def grade(prompt: Prompt, sample: Sample) -> Grade:
        mixed = random.Random(f"outcome {prompt.id}").random() < probability()
        correct = not mixed or sample.index < group_size // 2
        return Grade(correct, float(correct))

    return grade


@dataclass
class FleetStep:
    """One simulated step. `tokens` are generated tokens; `always_full` is the time a full fleet needs for them."""

    batch: StepBatch
    seconds: float
    tokens: float
    always_full: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.always_full


def simulate(
    sampler: dict[str, Any], lengths: Lengths, decode_step: DecodeStep, kept: Callable[[int], float], *, steps: int,
    groups: int, group_size: int, servers: int, slots: int, prefill_rate: float = 1e5,
) -> list[FleetStep]:  # fmt: skip
    """Runs the sampler for `steps` steps, each with a new weight version; the fleet waits between steps."""

    async def main() -> list[FleetStep]:
        engine = FleetEngine(
            lengths, decode_step, servers=servers, slots=slots, prefill_rate=prefill_rate, group_size=group_size
        )
        config = RolloutConfig(samples_per_prompt=group_size, max_response_tokens=lengths.longest, sampler=sampler)
        grade = informative_with(lambda: kept(engine.weight_version), group_size)
        collector = Sampler(engine, grade, FleetPrompts(lengths.prompt), config, groups_per_step=groups)
        clock, found = asyncio.get_running_loop().time, []
        for step in range(steps):
            engine.weight_version = step
            began, before = clock(), engine.tokens
            batch = await collector.collect(step)
            tokens = engine.tokens - before
            full = tokens / (servers * full_rate(lengths, decode_step, slots, prefill_rate, group_size))
            found.append(FleetStep(batch, clock() - began, tokens, full))
        return found

    return run_virtual(main())


def full_rate(
    lengths: Lengths, decode_step: DecodeStep, slots: int, prefill_rate: float, group_size: int, samples: int = 4000
) -> float:
    """Tokens per second of one server whose slots are always full of samples of mixed ages."""
    drawn = [lengths.sample(f"p{i // group_size}", i) for i in range(samples)]
    mean, second = sum(drawn) / samples, sum(n * n for n in drawn) / samples
    context = lengths.prompt + second / (2 * mean)  # a running sample is seen in proportion to its length
    seconds = decode_step(slots, context) * mean / slots + lengths.prompt / group_size / prefill_rate
    return mean / seconds
