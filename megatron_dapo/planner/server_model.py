"""One engine as a queueing model: all running sequences advance one token per decoding step, whose time is

    step = max(reading weights, keys and values; arithmetic) + layers × launch + sequences × scheduling + all-reduces

The constants are in `assumptions.py`. Experts that no running token uses are not read. The kernel of the experts works
on blocks of EXPERT_BLOCK rows, so an expert with one token costs as much arithmetic as with a block of them.

`run_until` advances the clock to a given time; `next_event` says when something happens next: a sequence ends, or the
KV cache is full and the newest sequence is retracted. Prompt tokens are computed before decoding continues. Time is
whatever the caller's clock counts; nothing here sleeps.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_dapo.config import ModelShape
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.assumptions import EngineSoftware
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.parameters import count_parameters


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """The coefficients for one model, GPU and tensor-parallel size. Times are seconds."""

    dense: float  # reading everything but experts
    experts: float  # reading all experts
    idle_share: float  # of the experts that one token does not use; 0 for a dense model
    per_context_token: float  # reading its keys and values
    arithmetic: float  # per sequence
    fixed: float  # launches and the latency of all-reduces
    per_sequence: float  # scheduling, and the volume of all-reduces
    per_prompt_token: float  # prefill
    per_expert_row: float = 0.0  # arithmetic of one token in one expert of every layer
    experts_per_token: int = 0
    expert_count: int = 0

    def step(self, running: float, context_tokens: float) -> float:
        """One token of each of `running` sequences, which together hold `context_tokens` tokens."""
        reading, arithmetic = self.dense + self.per_context_token * context_tokens, self.arithmetic * running
        if self.experts:
            used = 1 - self.idle_share**running
            reading += self.experts * used
            rows, busy = running * self.experts_per_token, used * self.expert_count
            block = assumptions.EXPERT_BLOCK
            arithmetic += self.per_expert_row * max(busy * block, rows + busy * (block - 1) / 2)
        return max(reading, arithmetic) + self.fixed + self.per_sequence * running


def decode_model(
    shape: ModelShape,
    cluster: Cluster,
    tp: int,
    engine: EngineSoftware = "sglang",
    dtype_bytes: int = 2,
    weight_bytes: float | None = None,
    adapter: bool = False,
) -> DecodeModel:
    """`weight_bytes`: of a parameter, where weights are quantised."""
    weight_bytes = dtype_bytes if weight_bytes is None else weight_bytes
    parameters, gpu = count_parameters(shape), cluster.gpu
    bandwidth = gpu.bandwidth * 1e12 * assumptions.READ_SHARE
    read = parameters.total if shape.tied_embeddings else parameters.total - parameters.embedding
    experts = parameters.experts
    flops = gpu.tflops * 1e12 * assumptions.DECODE_MFU[engine] * tp
    active = parameters.layer_matrices_active + shape.vocab * shape.hidden
    adapted, latency, volume = assumptions.SECONDS_PER_ADAPTED_LAYER if adapter else 0.0, 0.0, 0.0
    if tp > 1:
        once = assumptions.ALL_REDUCE_BETWEEN_HOSTS if tp > gpu.per_host else assumptions.ALL_REDUCE_SECONDS
        once = assumptions.ALL_REDUCE_BETWEEN_NODES if tp > cluster.gpus_per_node else once
        latency = 2 * shape.layers * once
        volume = 2 * shape.layers * 2 * shape.hidden * dtype_bytes * (tp - 1) / tp / cluster.wire(tp)
    return DecodeModel(
        dense=(read - experts) * weight_bytes / tp / bandwidth,
        experts=experts * weight_bytes / tp / bandwidth,
        idle_share=1 - shape.experts_per_token / shape.experts if shape.is_moe else 0.0,
        per_context_token=kv_bytes(shape, tp, dtype_bytes) / bandwidth,
        arithmetic=2 * (active - parameters.routed) / flops,
        fixed=(assumptions.SECONDS_PER_LAYER + adapted) * shape.layers + latency,
        per_sequence=assumptions.SECONDS_PER_SEQUENCE[engine] + volume,
        per_prompt_token=2 * parameters.active / flops,
        per_expert_row=2 * parameters.routed / max(1, shape.experts_per_token) / flops,
        experts_per_token=shape.experts_per_token,
        expert_count=shape.experts,
    )


def kv_bytes(shape: ModelShape, tp: int, dtype_bytes: int = 2) -> float:
    """Keys and values of one token on one GPU; a head is never divided."""
    return shape.attention_layers * 2 * max(1, shape.kv_heads / tp) * shape.head_dim * dtype_bytes


KV_RESERVE = 0.05  # of the KV cache is left free when sequences are admitted or retracted


@dataclass(slots=True, eq=False)
class Sequence:
    """`remaining` tokens are to be generated after `context` tokens, of which `prefill` must be computed first."""

    remaining: int
    context: int
    prefill: int
    generated: int = 0
    end: int = 0  # the server's token count at which it ends
    start: int = 0  # the server's token count at which it was admitted
    admission: int = 0  # when it was admitted, in the order of admissions
    running: bool = False


@dataclass(slots=True)
class ServerModel:
    decode: DecodeModel
    kv_tokens: int
    max_running: int
    now: float = 0.0
    tokens: int = 0  # decoding steps so far
    part: float = 0.0  # of a decoding step that is already done
    context: int = 0  # tokens in the KV cache
    backlog: float = 0.0  # seconds of prefill to do
    generated: int = 0
    running: int = 0  # sequences
    queue: deque[Sequence] = field(default_factory=deque)
    _running: list[tuple[int, int, Sequence]] = field(default_factory=list)  # a heap by end
    _newest: list[tuple[int, Sequence]] = field(default_factory=list)  # in the order of admission
    _admissions: int = 0
    _pace: tuple[int, float] | None = None  # decoding steps to the next event and the seconds of each, if known
    pace: float = field(init=False)  # seconds of a step of half of what it may run, per sequence: to compare servers

    def __post_init__(self) -> None:
        half = max(1, self.max_running // 2)
        self.pace = self.decode.step(half, min(self.kv_tokens, 1024 * half)) / half

    def __len__(self) -> int:
        """Sequences that run or wait here."""
        return self.running + len(self.queue)

    @property
    def sequences(self) -> list[Sequence]:
        return [*(entry[2] for entry in self._running if self._alive(entry)), *self.queue]

    def add(self, sequence: Sequence) -> None:
        self.queue.append(sequence)
        self._admit()

    def _admit(self) -> None:
        room = self.kv_tokens * (1 - KV_RESERVE)
        while self.queue and self.running < self.max_running:
            sequence = self.queue[0]
            if self.running and self.context + sequence.context + self.running > room:
                return
            self.queue.popleft()
            self._admissions += 1
            sequence.admission, sequence.running = self._admissions, True
            sequence.start, sequence.end = self.tokens, self.tokens + sequence.remaining
            self.context += sequence.context
            self.backlog += sequence.prefill * self.decode.per_prompt_token
            self.running += 1
            self._pace = None
            heapq.heappush(self._running, (sequence.end, sequence.admission, sequence))
            self._newest.append((sequence.admission, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence early, keeping what it generated."""
        if not sequence.running:
            self.queue.remove(sequence)
            return
        self._leave(sequence)
        self._admit()

    def clear(self) -> None:
        """Ends all sequences early, keeping what they generated."""
        for sequence in self.sequences:
            if sequence.running:
                self._leave(sequence)
        self.queue.clear()
        self._running.clear()
        self._newest.clear()
        self.backlog = self.part = 0.0

    def _leave(self, sequence: Sequence) -> None:
        done = min(sequence.remaining, self.tokens - sequence.start)
        sequence.generated += done
        sequence.remaining -= done
        sequence.context += done
        sequence.running = False
        self.context -= sequence.context
        self.running -= 1
        self._pace = None

    def next_event(self) -> float | None:
        """When the next sequence ends or is retracted; None: nothing runs."""
        if not self.running:
            return None
        steps, seconds = self._pace or self._find_pace()
        return self.now + self.backlog + (steps - self.part) * seconds

    def _find_pace(self) -> tuple[int, float]:
        """While a sequence runs. Each step takes as long as at the mean context until the event."""
        while not self._alive(self._running[0]):
            heapq.heappop(self._running)
        steps = self._running[0][0] - self.tokens
        if self.running > 1:
            steps = min(steps, max(1, (self.kv_tokens - self.context) // self.running))
        self._pace = steps, self.decode.step(self.running, self.context + self.running * steps / 2)
        return self._pace

    @staticmethod
    def _alive(entry: tuple[int, int, Sequence]) -> bool:
        _, admission, sequence = entry
        return sequence.running and sequence.admission == admission

    def run_until(self, time: float) -> list[Sequence]:
        """Advances to `time` and returns the sequences that ended, in order. Retracted ones wait in the queue again."""
        ended: list[Sequence] = []
        while (event := self.next_event()) is not None and event <= time:
            self._advance(event)
            ended += self._finish()
            if self.running > 1 and self.context + self.running > self.kv_tokens:
                self._retract()
            self._admit()
            if ended and event == time:  # the next event is later: every decoding step takes time
                return ended
        if self.now < time:
            self._advance(time)
        return ended

    def _advance(self, time: float) -> None:
        """To `time`, at which at most one event happens."""
        seconds = time - self.now
        if self.running and seconds > 0:
            done = min(self.backlog, seconds)
            self.backlog -= done
            seconds -= done
            most, each = self._pace or self._find_pace()
            exact = self.part + seconds / each
            steps = min(most, int(exact + 1e-6))
            self.part = max(0.0, exact - steps) if steps < most else 0.0
            if steps:
                self.tokens += steps
                self.context += steps * self.running
                self.generated += steps * self.running
                self._pace = None
        self.now = max(self.now, time)

    def _finish(self) -> list[Sequence]:
        ended = []
        while self._running and (not self._alive(self._running[0]) or self._running[0][0] <= self.tokens):
            entry = heapq.heappop(self._running)
            if self._alive(entry):
                sequence = entry[2]
                self._leave(sequence)
                ended.append(sequence)
        return ended

    def _retract(self) -> None:
        """The newest sequences wait again until there is room; their tokens must be computed again."""
        while self.running > 1 and self.context > self.kv_tokens * (1 - KV_RESERVE):
            admission, sequence = self._newest.pop()
            if sequence.running and sequence.admission == admission:
                self._leave(sequence)
                sequence.prefill = sequence.context
                self.queue.appendleft(sequence)


class FleetModel:
    """All engines of a run: a central queue. The server that would end a request first takes the next one: of equal
    servers, the least loaded."""

    def __init__(self, servers: Iterable[ServerModel]) -> None:
        self.servers: list[ServerModel] = []
        self.now = 0.0
        self._waiting: deque[Sequence] = deque()
        self._next: list[float] = []  # event of each server; infinite: nothing runs
        self._unknown: set[int] = set()  # servers that changed since their event was found
        self._costs: list[float] = []  # seconds of a step with one more sequence, relative; infinite: full or dead
        self._server_of: dict[int, int] = {}
        self._dead: set[int] = set()
        for server in servers:
            self.join(server)

    def join(self, server: ServerModel) -> None:
        server.now = self.now
        self.servers.append(server)
        self._next.append(math.inf)
        self._costs.append(0.0)
        self._changed(len(self.servers) - 1)
        self._dispatch()

    @property
    def alive(self) -> list[int]:
        return [index for index in range(len(self.servers)) if index not in self._dead]

    def fail(self, index: int) -> None:
        """The server dies; its sequences start again elsewhere, without what they generated."""
        for sequence in self.take_away(index):
            sequence.context -= sequence.generated
            sequence.remaining += sequence.generated
            sequence.generated, sequence.prefill = 0, sequence.context
        self._dispatch()

    def take_away(self, index: int) -> list[Sequence]:
        """Its sequences wait for another server, which computes their keys and values again."""
        server = self.servers[index]
        server.run_until(self.now)
        moved = server.sequences
        server.clear()
        self._dead.add(index)
        self._changed(index)
        for sequence in moved:
            sequence.prefill = sequence.context
            del self._server_of[id(sequence)]
        self._waiting.extendleft(reversed(moved))
        return moved

    def submit(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            cost = min(self._costs)
            if cost == math.inf:
                return
            index = self._costs.index(cost)
            server, sequence = self.servers[index], self._waiting.popleft()
            if server.now < self.now:
                server.run_until(self.now)
            self._server_of[id(sequence)] = index
            server.add(sequence)
            self._changed(index)

    def _changed(self, index: int) -> None:
        server = self.servers[index]
        load = len(server)
        full = load >= server.max_running or index in self._dead
        self._unknown.add(index)
        self._costs[index] = math.inf if full else (load + 1) * server.pace

    def next_event(self) -> float | None:
        for index in self._unknown:
            event = self.servers[index].next_event()
            self._next[index] = math.inf if event is None else event
        self._unknown.clear()
        event = min(self._next, default=math.inf)
        return None if event == math.inf else event

    def run_until(self, time: float) -> list[tuple[float, Sequence]]:
        """Advances to `time`; the sequences that ended, with when they did."""
        ended: list[tuple[float, Sequence]] = []
        while (event := self.next_event()) is not None and event <= time:
            ended += [(event, sequence) for sequence in self.run_to_event(event)]
        self.now = max(self.now, time)
        return ended

    def run_to_event(self, event: float) -> list[Sequence]:
        """Advances to the next event, which is at `event`; the sequences that ended with it."""
        index = self._next.index(event)
        server, self.now = self.servers[index], event
        ended = server.run_until(event)
        self._changed(index)
        for sequence in ended:
            del self._server_of[id(sequence)]
        if ended:
            self._dispatch()
        return ended

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends these sequences, keeping what they generated."""
        for sequence in sequences:
            index = self._server_of.pop(id(sequence), None)
            if index is None:
                self._waiting.remove(sequence)
            else:
                server = self.servers[index]
                server.run_until(self.now)
                server.remove(sequence)
                self._changed(index)
        self._dispatch()

    def abort_all(self) -> None:
        for index, server in enumerate(self.servers):
            server.run_until(self.now)
            server.clear()
            self._changed(index)
        self._waiting.clear()
        self._server_of.clear()
