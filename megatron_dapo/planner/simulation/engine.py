"""An engine on the planner's queueing model of the fleet, whose time is that of the event loop; and what it samples:
prompts without content, response lengths, and grades.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import Any

import numpy as np

from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.errors import UserError
from megatron_dapo.observe.runs import Run, load_run
from megatron_dapo.planner.generation import Fleet
from megatron_dapo.planner.server_model import FleetModel, Sequence, ServerModel
from megatron_dapo.planner.simulation.incidents import Tools
from megatron_dapo.planner.workload import Workload
from megatron_dapo.rollout.agents.conversation import Conversation
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, Tokens, WeightSpan

RECENT_STEPS = 5  # of a run, from which lengths and yield are taken
LEAST_RESPONSES = 50  # from which the spread of lengths is estimated
SEEDS = 2**63  # seeds of samples are uniform below this
_NORMAL = NormalDist()


class Prompts:
    """Numbered prompts; the number is the first token. A response has `turns` of equal mean length."""

    def __init__(self, work: Workload, unit: int, seed: int, turns: int = 1) -> None:
        self.work = work
        self.turns = turns
        self.unit = unit
        self.size = max(1, work.mean_prompt // unit)  # units of a prompt
        self.kept = work.kept  # share of informative prompts; may change during a run
        self._drawn: list[tuple[float, bool]] = []  # of every prompt: what its samples' lengths share; informative
        self._random = random.Random(seed)

    def take(self) -> Prompt:
        number = len(self._drawn)
        self._drawn.append((self._random.gauss(0, 1), self._random.random() < self.kept))
        tokens = np.zeros(self.size, dtype=np.int32)
        tokens[0] = number
        return Prompt(str(number), "", tokens)

    def length(self, prompt: int, sample_seed: int) -> int:
        """Units of a turn of a sample."""
        lengths, unit = self.work.lengths, self.unit * self.turns
        if lengths.constant:
            return max(1, round(lengths.mean / unit))
        shared = self._drawn[prompt][0] * math.sqrt(lengths.group_share)
        own = _NORMAL.inv_cdf((sample_seed + 0.5) / SEEDS) * math.sqrt(1 - lengths.group_share)
        return max(1, round(min(lengths.longest, lengths.at(shared + own)) / unit))

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        number = int(prompt.tokens[0])
        if self._drawn[number][1]:
            # The first two samples differ, so the group is informative whatever the others are.
            correct = sample.index % 2 == 0 if sample.index < 2 else bool(sample.seed % 2)
        else:
            correct = bool(number % 2)
        return Grade(correct, float(correct))


async def call_tools(_prompt: Prompt, conversation: Conversation, settings: Mapping[str, Any]) -> None:
    """A rollout function: turns with a tool's work between them."""
    tools, chance = settings["tools"], random.Random(conversation.seed)
    for call in range(tools.calls + 1):
        turn = await conversation.generate()
        seconds = chance.expovariate(1 / tools.seconds)
        if turn.truncated:
            return
        if call < tools.calls and not conversation.replaying:
            await asyncio.sleep(seconds)


class NoText:
    """A tokenizer for tokens without content."""

    def decode(self, _tokens: Tokens, skip_special_tokens: bool = True) -> str:
        return ""


def rollout_function(tools: Tools) -> RolloutFunction | None:
    """None: a response is one turn."""
    return RolloutFunction("tools", call_tools, {"tools": tools}, NoText(), "turn") if tools.seconds else None


def from_run(directory: str, work: Workload) -> Workload:
    """`work` with the yield and the lengths that a run measured in its last steps."""
    run = load_run(Path(directory), Path(directory).name)
    recent = [record.metrics for record in run.steps[-RECENT_STEPS:]]
    yields = [metrics["rollout/filter_yield"] for metrics in recent if "rollout/filter_yield" in metrics]
    trained = [metrics["rollout/length_trained"] for metrics in recent if "rollout/length_trained" in metrics]
    if not trained:
        raise UserError(f"{directory}: metrics.jsonl has no rollout/length_trained: name a run that trained")
    dropped = [metrics["rollout/length_dropped"] for metrics in recent if "rollout/length_dropped" in metrics]
    kept = min(1.0, max(0.01, fmean(yields))) if yields else work.kept
    mean = fmean(trained) if not dropped else kept * fmean(trained) + (1 - kept) * fmean(dropped)
    return replace(work, kept=kept, mean_response=max(1, min(work.max_response, round(mean))), sigma=_sigma(run, work))


def _sigma(run: Run, work: Workload) -> float:
    """The spread of the logarithm of response lengths, from the transcripts; responses that were cut are left out."""
    logs = [math.log(max(1, item.tokens)) for item in run.transcripts if item.finish_reason == "stop"]
    return pstdev(logs) if len(logs) >= LEAST_RESPONSES else work.sigma


class SimulatedEngine:
    """Implements `engines.protocol.Generator`. `trace` has (seconds, running sequences) of every server over time."""

    def __init__(self, fleet: Fleet, prompts: Prompts) -> None:
        self.fleet = fleet
        self.prompts = prompts
        self.unit = prompts.unit
        self.weight_version = 0
        self.model = FleetModel(
            ServerModel(kind.decode, kind.kv_tokens, fleet.max_running)
            for kind in fleet.kinds
            for _ in range(kind.servers)
        )
        self.trace: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in range(fleet.servers)]
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, Sequence] = {}
        self._waiters: dict[int, tuple[str, asyncio.Future[None]]] = {}  # by the id of the sequence
        self._timer: asyncio.TimerHandle | None = None
        self._serving = asyncio.Event()
        self._serving.set()
        self._cached: set[tuple[int, int]] = set()  # (prompt, weight version) whose keys and values are cached
        self._added: list[Sequence] = []
        self._began: dict[int, int] = {}  # by seed: tokens before the turn

    @property
    def max_running(self) -> int:
        return len(self.model.alive) * self.fleet.max_running

    def change_servers(self, count: int) -> None:
        """`count` servers join; if it is negative, the first ones die."""
        self._advance()
        for index in self.model.alive[: max(0, -count)]:
            self.model.fail(index)
        for _ in range(count):
            self.trace.append([(self._loop.time(), 0)])
            self.model.join(ServerModel(self.fleet.decode, self.fleet.kv_tokens, self.fleet.max_running))
        self._set_timer()

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        await self._serving.wait()
        version, number, seed = self.weight_version, int(prompt[0]), params.seed or 0
        done = len(prompt) - self._began.setdefault(seed, len(prompt))
        length = self.prompts.length(number, seed) - done
        units = max(1, min(length, params.max_new_tokens))
        sequence = Sequence(units * self.unit, len(prompt) * self.unit, self._prefill(number, len(prompt), done))
        future: asyncio.Future[None] = self._loop.create_future()
        self._requests[request_id] = sequence
        self._waiters[id(sequence)] = request_id, future
        if not self._added:
            self._loop.call_soon(self._flush)  # submits the requests of this moment together
        self._added.append(sequence)
        await future
        made = units if sequence.remaining == 0 else sequence.generated // self.unit
        if sequence.remaining:
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.STOP if units == length else FinishReason.LENGTH
        spans = [WeightSpan(version, 0, made)] if made else []
        return Completion(np.zeros(made, np.int32), np.zeros(made, np.float32), reason, spans)

    def _prefill(self, prompt: int, context: int, done: int) -> int:
        """Tokens to compute first. Samples of a prompt share its keys and values until the weights change."""
        key = prompt, self.weight_version
        known = key in self._cached
        self._cached.add(key)
        return (done if known else context) * self.unit

    def _flush(self) -> None:
        self._advance()
        added, self._added = self._added, []
        self.model.submit(added)
        self._set_timer()

    def _advance(self) -> None:
        self._finish(sequence for _, sequence in self.model.run_until(self._loop.time()))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        event = self.model.next_event()
        self._timer = None if event is None else self._loop.call_at(event, self._on_event)
        now = self._loop.time()
        for server, points in zip(self.model.servers, self.trace, strict=True):
            if points[-1][1] != server.running:
                points.append((now, server.running))

    def _on_event(self) -> None:
        self._advance()
        self._set_timer()

    def _finish(self, ended: Iterable[Sequence]) -> None:
        for sequence in ended:
            name, future = self._waiters.pop(id(sequence))
            del self._requests[name]
            if not future.done():
                future.set_result(None)

    async def abort(self, request_id: str | None = None) -> None:
        self._flush()
        if request_id is None:
            chosen = list(self._requests.values())
            self.model.abort_all()
        else:
            chosen = [self._requests[name] for name in (request_id,) if name in self._requests]
            self.model.abort(chosen)
        self._finish(chosen)
        self._set_timer()

    async def update(self, version: int, seconds: float, *, pauses: bool = True) -> None:
        """A weight update that takes `seconds`. If it pauses, running requests are aborted first and new ones wait
        until its end; if not, requests end with the version they began with."""
        if pauses:
            self._serving.clear()
            await self.abort()
        await asyncio.sleep(seconds)
        self.weight_version = version
        self._cached.clear()
        self._serving.set()
