"""Generates and grades the responses of an evaluation, with a limit on concurrent requests and a clean cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from megatron_dapo.config.evaluate import EvalConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams, derive_seed
from megatron_dapo.errors import UserError
from megatron_dapo.evaluate.results import EvalResult, Evaluation, EvaluationError, ProblemResult, Response, summarise
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, Tokens

Progress = Callable[[int, int], None]

ATTEMPTS = 3  # for a response that the engine aborts by itself
ATTEMPT_PAUSE = 0.2
ABORT_REPEAT = 1.0  # seconds between two aborts: a request may have reached the engine after the first
ABORT_TIMEOUT = 30.0


class Generator(Protocol):
    """The part of `Engine` that evaluation uses."""

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion: ...

    async def abort(self, request_id: str | None = None) -> None: ...


class GraderPool(Protocol):
    async def grade(self, prompt: Prompt, sample: Sample) -> Grade: ...


async def evaluate(
    engine: Generator,
    prompts: Sequence[Prompt],
    grader_pool: GraderPool,
    config: EvalConfig,
    seed: int,
    progress: Progress | None = None,
) -> EvalResult:
    """Generates `config.samples` responses to every prompt. The same seed and a seeded engine give the same result.

    `config` must be complete (`Config.resolved_evaluate`). The first engine or grader error ends the evaluation. After
    an error or a cancellation, no request of this evaluation is running.
    """
    return (await evaluate_sets(engine, {"": prompts}, grader_pool, config, seed, progress)).results[""]


async def evaluate_sets(
    engine: Generator,
    sets: Mapping[str, Sequence[Prompt]],
    grader_pool: GraderPool,
    config: EvalConfig,
    seed: int,
    progress: Progress | None = None,
) -> Evaluation:
    """As `evaluate`, for several benchmarks at once, each with its own number of samples (`EvalConfig.for_set`)."""
    if config.max_response_tokens is None:
        raise ValueError("evaluate needs max_response_tokens: pass Config.resolved_evaluate")
    for name, prompts in sets.items():
        if not prompts:
            raise EvaluationError(
                f"there is no problem to evaluate{f' in {name}' if name else ''}: check evaluate.data"
            )
    started = time.monotonic()
    settings = {name: config.for_set(name) for name in sets}
    wanted = [
        (f"{name}-" if name else "", prompt, index)
        for name, prompts in sets.items()
        for prompt in prompts
        for index in range(settings[name].samples)
    ]
    responses = iter(await _Requests(engine, grader_pool, config, seed, progress).run(wanted))
    seconds = time.monotonic() - started
    results = {}
    for name, prompts in sets.items():
        samples = settings[name].samples
        problems = [
            ProblemResult(p.id, str(p.meta.get("question", p.text)), p.answer, list(islice(responses, samples)))
            for p in prompts
        ]
        results[name] = summarise(problems, settings[name], seed, seconds)
    return Evaluation(config, results)


class _Requests:
    """The requests of one evaluation."""

    def __init__(
        self, engine: Generator, grader_pool: GraderPool, config: EvalConfig, seed: int, progress: Progress | None
    ) -> None:
        self._engine, self._pool, self._config, self._seed, self._progress = engine, grader_pool, config, seed, progress
        self._slots = asyncio.Semaphore(config.concurrency)
        self._tasks: list[asyncio.Task[Response]] = []
        self._generating: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._done = 0

    async def run(self, wanted: Sequence[tuple[str, Prompt, int]]) -> list[Response]:
        """One response for each (prefix of the request's name, prompt, number of the sample), in this order."""
        self._tasks = [asyncio.create_task(self._one(*response)) for response in wanted]
        try:
            # Not gather: a cancelled gather cancels the tasks before their requests are aborted.
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for error in filter(None, (task.exception() for task in self._tasks if task in done)):
                raise error
            return [task.result() for task in self._tasks]
        except BaseException:
            try:
                await self._abort()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
            raise

    async def _one(self, prefix: str, prompt: Prompt, index: int) -> Response:
        async with self._slots:
            sample = await self._generate(prefix, prompt, index)
            grade = await self._pool.grade(prompt, sample)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._tasks))
        return Response(
            sample.text, sample.length, sample.finish_reason.value, grade.correct, grade.extracted, grade.reason
        )

    async def _generate(self, prefix: str, prompt: Prompt, index: int) -> Sample:
        """Repeats a response that the engine aborts by itself; the seed makes it the same response."""
        assert self._config.max_response_tokens is not None
        seed = derive_seed(self._seed, 0, prompt.id, index)
        params = SamplingParams(
            max_new_tokens=self._config.max_response_tokens, temperature=self._config.temperature,
            top_p=self._config.top_p, top_k=self._config.top_k, stop=tuple(self._config.stop or ()), seed=seed,
        )  # fmt: skip
        for attempt in range(ATTEMPTS):
            name = f"eval-{prefix}{prompt.id}-{index}" + (f"-try{attempt}" if attempt else "")
            made = await self._request(name, prompt, params)
            if made.finish_reason is not FinishReason.ABORT:
                return Sample(
                    prompt.id, index, prompt.tokens, made.tokens, made.logprobs, made.finish_reason,
                    made.weight_spans, seed=seed, text=made.text,
                )  # fmt: skip
            if self._stopping:
                raise asyncio.CancelledError
            await asyncio.sleep(ATTEMPT_PAUSE)
        raise EvaluationError(
            f"the engine aborted response {index} to problem {prompt.id} {ATTEMPTS} times: nothing may pause the "
            "engine or change its weights while an evaluation runs"
        )

    async def _request(self, name: str, prompt: Prompt, params: SamplingParams) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        try:
            return await self._engine.generate(name, prompt.tokens, params)
        finally:
            self._generating.discard(task)

    async def _abort(self) -> None:
        """Aborts what is being generated and waits until it has returned; starts nothing new."""
        self._stopping = True
        for task in self._tasks:
            if task not in self._generating:
                task.cancel()
        deadline = time.monotonic() + ABORT_TIMEOUT
        while self._generating and time.monotonic() < deadline:
            with contextlib.suppress(UserError):  # a dead server has no request left to abort
                await self._engine.abort()
            await asyncio.wait(set(self._generating), timeout=ABORT_REPEAT)
