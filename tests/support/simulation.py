"""Simulated rollouts on a virtual clock: an engine whose tokens follow from the seed, and sampler helpers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from functools import partial, wraps

import numpy as np
import pytest

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.embedded.batch_invariant_model import uniform
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.planner.simulation.run import run_virtually
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import (
    FinishReason,
    Grade,
    Group,
    Prompt,
    Sample,
    StepBatch,
    WeightSpan,
    as_logprobs,
    as_tokens,
    json_default,
)


def virtually(test):
    """Runs an async test on a virtual clock."""

    @wraps(test)
    def run(*args, **kwargs):
        run_virtually(test(*args, **kwargs))

    return run


def response_of(seed: int, longest: int) -> tuple[list[int], list[float]]:
    """The complete response of the simulated engine to a seed: tokens and log-probs; lengths have a long tail."""
    number = uniform(np.array([seed], np.uint64), np.array([0], np.uint64))[0]
    length = int(min(longest, 1 + 6 / (1.02 - number)))
    numbers = uniform(np.full(length, seed, np.uint64), np.arange(1, length + 1, dtype=np.uint64))
    return (numbers * 1000).astype(int).tolist(), (-numbers).tolist()


class SimulatedEngine:
    """One token per `token_seconds` for each of `slots` running requests; other requests queue. Tokens depend only on
    the seed, so a sample that was aborted and continued must equal the complete one. `fault` may raise for a
    request."""

    def __init__(
        self,
        slots: int = 8,
        token_seconds: float = 0.1,
        longest: int = 1000,
        fault: Callable[[str], None] = lambda request_id: None,
        jitter: float = 0.0,
    ) -> None:
        self.weight_version, self.longest, self.token_seconds, self.max_running = 0, longest, token_seconds, slots
        self._slots = asyncio.Semaphore(slots)
        self._aborts: dict[str, asyncio.Event] = {}
        self._fault, self._jitter = fault, random.Random(jitter) if jitter else None
        self.most_running = self.running = 0
        self.requests: list[str] = []

    async def generate(self, request_id: str, prompt, params: SamplingParams) -> Completion:
        assert request_id not in self._aborts, f"request id {request_id} is in use"
        self.requests.append(request_id)
        aborted = self._aborts[request_id] = asyncio.Event()
        try:
            queued, stopped = asyncio.ensure_future(self._slots.acquire()), asyncio.ensure_future(aborted.wait())
            await asyncio.wait([queued, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not queued.done():
                queued.cancel()
                return Completion(as_tokens([]), as_logprobs([]), FinishReason.ABORT)
            try:
                return await self._run(request_id, prompt, params, aborted)
            finally:
                self._slots.release()
        finally:
            del self._aborts[request_id]

    async def _run(self, request_id: str, prompt, params: SamplingParams, aborted: asyncio.Event) -> Completion:
        self._fault(request_id)
        tokens, logprobs = response_of(params.seed, self.longest)
        known = len(prompt) - int(prompt[0])  # a prompt's first token is its length
        assert prompt[int(prompt[0]) :].tolist() == tokens[:known], "the continuation does not match the sample"
        left, logs = tokens[known:][: params.max_new_tokens], logprobs[known:][: params.max_new_tokens]
        pace = self.token_seconds * (self._jitter.uniform(0.5, 2) if self._jitter else 1)
        began, version = asyncio.get_running_loop().time(), self.weight_version
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.wait_for(aborted.wait(), pace * len(left))
        except TimeoutError:
            ended = known + len(left) == len(tokens) and len(tokens) < self.longest
            reason, made = FinishReason.STOP if ended else FinishReason.LENGTH, len(left)
        else:
            reason, made = FinishReason.ABORT, int((asyncio.get_running_loop().time() - began) / pace)
            made = min(made, len(left) - 1)
        finally:
            self.running -= 1
        spans = [WeightSpan(version, 0, made)] if made else []
        return Completion(as_tokens(left[:made]), as_logprobs(logs[:made]), reason, spans)

    async def abort(self, request_id: str | None = None) -> None:
        for name, event in self._aborts.items():
            if request_id in (None, name):
                event.set()


class Prompts:
    """p0, p1, …, each drawn once."""

    def __init__(self, count: int | None = None, start: int = 0) -> None:
        self.count, self.drawn = count, start

    def __call__(self) -> Prompt:
        if self.count is not None and self.drawn >= self.count:
            raise StopIteration
        self.drawn += 1
        length = 1 + self.drawn % 5
        return Prompt(f"p{self.drawn - 1}", "", as_tokens([length] * length), answer="")


def coin_grader(share: float, seconds: float = 0.5, broken: Callable[[Prompt], bool] = lambda prompt: False):
    """Correct with probability `share`, decided by the sample's seed; takes virtual time."""

    async def grade(prompt: Prompt, sample: Sample) -> Grade:
        await asyncio.sleep(seconds)
        if broken(prompt):
            raise ZeroDivisionError("the grader has a bug")
        correct = uniform(np.array([sample.seed], np.uint64), np.array([999_999], np.uint64))[0] < share
        return Grade(bool(correct), 1.0 if correct else -1.0)

    return grade


def failing(names: set[str]) -> Callable[[str], None]:
    def fault(request_id: str) -> None:
        if any(name in request_id for name in names):
            raise EngineError(f"server http://simulated: generate {request_id}: gone")

    return fault


def as_json(state) -> str:
    return json.dumps(state, default=json_default)


def through_json(state):
    return json.loads(as_json(state))


def rollout(samples=3, longest=60, stop=(), **sampler):
    """Deterministic and without oversampling, unless `sampler` says otherwise."""
    sampler = {"oversampling": 1, "order": "prompt", "unfinished": "finish"} | sampler
    return RolloutConfig(samples_per_prompt=samples, max_response_tokens=longest, stop=list(stop), sampler=sampler)


def collect(config, steps=1, *, needed=4, share=0.5, slots=8, prompts=None, engine=None, between=None, seed=0, **more):
    """(batches, sampler, prompts, engine) after several steps, each with a new weight version."""

    async def main():
        server = engine() if engine else SimulatedEngine(slots, longest=config.max_response_tokens)
        source = prompts or Prompts()
        grade = more.pop("grade", None) or coin_grader(share)
        own_filter = more.pop("group_filter", None)
        sampler = Sampler(server, grade, source, config, groups_per_step=needed, seed=seed, **more)
        sampler.group_filter = own_filter or sampler.group_filter
        batches = []
        for step in range(steps):
            server.weight_version = step
            batches.append(await sampler.collect(step))
            if between:
                sampler = between(sampler, server, grade, source)
        return batches, sampler, source, server

    return run_virtually(main())


def collect_restored(config, slots, jitter, reload, steps, **more):
    """(batches, sampler) of an engine with so many slots and so much jitter. With `reload`, every step has a new
    sampler that was restored from the state of the last one."""

    def again(sampler, engine, grade, source):
        if not reload:
            return sampler
        fresh = Sampler(engine, grade, source, config, groups_per_step=4)
        fresh.restore(through_json(sampler.state()))
        return fresh

    engine = partial(SimulatedEngine, slots, longest=60, jitter=jitter)
    batches, sampler, *_ = collect(config, steps=steps, engine=engine, between=again, **more)
    return batches, sampler


TIMINGS = [(1, 0.0, True), (7, 0.3, False), (30, 0.7, True), (3, 0.9, False)]  # slots, jitter, reload


def assert_whole(group: Group, longest: int) -> None:
    """Each sample equals the uninterrupted response to its seed, and its spans cover it without gap or overlap."""
    for sample in group.samples:
        tokens, logprobs = response_of(sample.seed, longest)
        assert sample.response_tokens.tolist() == tokens
        assert sample.engine_logprobs == pytest.approx(np.float32(logprobs))
        assert sample.finish_reason is (FinishReason.LENGTH if len(tokens) == longest else FinishReason.STOP)
        edges = [0, *(span.end for span in sample.weight_spans)]
        assert [span.start for span in sample.weight_spans] == edges[:-1] and edges[-1] == len(tokens)
        assert sample.grade is not None


def carried(sampler) -> list[dict]:
    """The states of all groups that the sampler carries over."""
    state = sampler.state()
    return [pending["group"] for pending in (*state["surplus"], *state["unfinished"])]


async def collect_with_cuts(
    sampler: Sampler, make: Callable[[], Sampler], step: int, cuts: list[float], reload: bool
) -> tuple[StepBatch, Sampler]:
    """The batch of a step that is cancelled after each of the times in `cuts`, which are used up, and the sampler that
    completed it: with `reload`, a new one that was restored from the state of the cancelled one."""
    while (task := asyncio.ensure_future(sampler.collect(step))) and cuts:
        await asyncio.wait({task}, timeout=cuts.pop(0))
        if task.done():
            break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        state = through_json(sampler.state())
        if reload:
            sampler = make()
            sampler.restore(state)
    return await task, sampler
