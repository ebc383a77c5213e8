"""Generates and grades the responses of an evaluation, with a limit on concurrent requests and a clean cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from megatron_dapo.config.data import EvalConfig
from megatron_dapo.engines.protocol import Completion, Generator, SamplingParams, derive_seed
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation.results import Evaluation, EvaluationError, ProblemResult, Response, summarise
from megatron_dapo.reward.combined import ResponseGrader, readable
from megatron_dapo.rollout.agents.conversation import Conversation
from megatron_dapo.rollout.agents.functions import RolloutFunction, RolloutFunctionError
from megatron_dapo.rollout.generation import TurnRequest, append_completion
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, Tokens, as_logprobs, as_tokens

Progress = Callable[[int, int], None]

ATTEMPTS = 3  # for a response that the engine aborts by itself
ATTEMPT_PAUSE = 0.2
ABORT_REPEAT = 1.0  # seconds between two aborts: a request may have reached the engine after the first
ABORT_TIMEOUT = 30.0


async def evaluate_sets(
    engine: Generator,
    sets: Mapping[str, Sequence[Prompt]],
    graders: ResponseGrader,
    config: EvalConfig,
    seed: int,
    progress: Progress = lambda done, total: None,
    function: RolloutFunction | None = None,
) -> Evaluation:
    """Generates the responses to every prompt of several benchmarks at once, each with its own number of samples
    (`EvalConfig.for_set`). The same seed and a seeded engine give the same result.

    `config` must be complete (`Config.resolved_evaluate`). `function` makes the responses; None: a response is one
    generated turn. The first engine or grader error ends the evaluation. After an error or a cancellation, no request
    of this evaluation is running.
    """
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
    slots = asyncio.Semaphore(config.concurrency)
    responses = iter(await _Requests(engine, graders, config, seed, progress, function, slots).run(wanted))
    seconds = time.monotonic() - started
    results = {}
    for name, prompts in sets.items():
        samples = settings[name].samples
        problems = [
            ProblemResult(p.id, p.question, p.answer, list(islice(responses, samples)), p.text) for p in prompts
        ]
        results[name] = summarise(problems, settings[name], seed, seconds)
    return Evaluation(config, results)


@dataclass(slots=True, eq=False)
class _Requests:
    """The requests of one evaluation."""

    engine: Generator
    graders: ResponseGrader
    config: EvalConfig
    seed: int
    progress: Progress
    function: RolloutFunction | None
    slots: asyncio.Semaphore
    tasks: list[asyncio.Task[Response]] = field(default_factory=list)
    generating: set[asyncio.Task[Any]] = field(default_factory=set)
    stopping: bool = False
    failure: UserError | None = None  # of the engine, whatever a rollout function makes of it
    done: int = 0

    async def run(self, wanted: Sequence[tuple[str, Prompt, int]]) -> list[Response]:
        """One response for each (prefix of the request's name, prompt, number of the sample), in this order."""
        self.tasks = [asyncio.create_task(self._one(*response)) for response in wanted]
        try:
            # Not gather: a cancelled gather cancels the tasks before their requests are aborted.
            done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
            for error in filter(None, (task.exception() for task in self.tasks if task in done)):
                raise error
            return [task.result() for task in self.tasks]
        except BaseException:
            try:
                await self._abort()
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)
            raise

    async def _one(self, prefix: str, prompt: Prompt, index: int) -> Response:
        async with self.slots:
            samples, grade = await self._generate(prefix, prompt, index)
            if grade is None:
                grade = await self.graders.grade(prompt, samples[-1])
        grade = grade.checked()
        self.done += 1
        self.progress(self.done, len(self.tasks))
        text = "\n".join(readable(sample, self.graders.decode) for sample in samples)
        tokens, reason = sum(sample.trained_tokens for sample in samples), samples[-1].finish_reason.value
        return Response(text, tokens, reason, grade.correct, grade.extracted, grade.reason)

    async def _generate(self, prefix: str, prompt: Prompt, index: int) -> tuple[list[Sample], Grade | None]:
        """The samples of one rollout, and the grade if its function gave one."""
        longest, stop = self.config.max_response_tokens, tuple(self.config.stop or ())
        assert longest is not None
        seed = derive_seed(self.seed, 0, prompt.id, index)
        empty = as_tokens([]), as_logprobs([]), FinishReason.ABORT
        samples = [Sample(prompt.id, index, prompt.tokens, *empty, seed=seed)]
        name = f"eval-{prefix}{prompt.id}-{index}"
        if self.function is None:
            await self._extend(samples[0], TurnRequest(name, seed, 0, longest, stop))
            return samples, None
        conversation = Conversation(
            prompt, samples, self._extend, self.function.tokenizer,
            max_response_tokens=longest, stop=stop, name=name,
        )  # fmt: skip
        try:
            return samples, await self.function(conversation)
        except RolloutFunctionError as error:
            if self.failure is not None:
                raise self.failure from None
            return samples, Grade(None, 0.0, reason=str(error))

    async def _extend(self, sample: Sample, request: TurnRequest) -> bool:
        """Generates a response or a turn. Repeats one that the engine aborts by itself; the seed makes it the same."""
        if request.end <= request.start:
            sample.finish_reason = FinishReason.LENGTH
            return True
        config = self.config
        params = SamplingParams(
            max_new_tokens=request.end - request.start, temperature=config.temperature, top_p=config.top_p,
            top_k=config.top_k, stop=request.stop, stop_token_ids=tuple(config.stop_token_ids or ()), seed=request.seed,
        )  # fmt: skip
        context = np.concatenate([sample.prompt_tokens, sample.response_tokens]) if sample.length else None
        attempt = moves = 0
        while attempt < ATTEMPTS:
            name = request.name + (f"-try{attempt}" if attempt else "") + (f"-move{moves}" if moves else "")
            made = await self._request(name, sample.prompt_tokens if context is None else context, params)
            if made.finish_reason is not FinishReason.ABORT:
                append_completion(sample, made)
                return True
            if self.stopping:
                raise asyncio.CancelledError
            if made.moved:  # to another server, where it starts again
                moves += 1
                continue
            attempt += 1
            await asyncio.sleep(ATTEMPT_PAUSE)
        self.failure = EvaluationError(
            f"the engine aborted response {sample.index} to problem {sample.prompt_id} {ATTEMPTS} times: nothing may "
            "pause the engine or change its weights while an evaluation runs"
        )
        raise self.failure

    async def _request(self, name: str, tokens: Tokens, params: SamplingParams) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self.generating.add(task)
        try:
            return await self.engine.generate(name, tokens, params)
        except UserError as error:
            self.failure = error
            raise
        finally:
            self.generating.discard(task)

    async def _abort(self) -> None:
        """Aborts what is being generated and waits until it has returned; starts nothing new."""
        self.stopping = True
        for task in self.tasks:
            if task not in self.generating:
                task.cancel()
        deadline = time.monotonic() + ABORT_TIMEOUT
        while self.generating and time.monotonic() < deadline:
            with contextlib.suppress(UserError):  # a dead server has no request left to abort
                await self.engine.abort()
            await asyncio.wait(set(self.generating), timeout=ABORT_REPEAT)
