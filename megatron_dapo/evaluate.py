"""Evaluation: k responses to every problem of a benchmark, and the accuracy of the policy.

avg@k is the mean over problems of the share of correct responses. Its confidence interval is clustered by problem
(Student's t over the problems' means), because the k responses to one problem are not independent. The interval holds
for problems of the same kind; `sampling_error` is the standard error for exactly these problems. pass@k is the unbiased
estimator. maj@k is the majority vote of all k responses; a tie counts in part. Ungraded responses are excluded and
counted. lenient@k, for benchmarks whose answers are numbers, is the share of responses whose last number is the answer,
however it is marked: the gap to avg@k is what the required format costs.

`evaluate` can be cancelled at any time: it aborts its requests and returns when none is running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dapo.config import Config, ConfigError, check_config
from megatron_dapo.config.evaluate import EvalConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams, derive_seed
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation_statistics import clustered_interval, pass_at_k
from megatron_dapo.files import write_atomically
from megatron_dapo.reward.equivalence import last_number_matches
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, Tokens

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int], None]

ATTEMPTS = 3  # for a response that the engine aborts by itself
ATTEMPT_PAUSE = 0.2
ABORT_REPEAT = 1.0  # seconds between two aborts: a request may have reached the engine after the first
ABORT_TIMEOUT = 30.0


class EvaluationError(UserError):
    """The evaluation failed; the message names the problem and the cause."""


class Generator(Protocol):
    """The part of `Engine` that evaluation uses."""

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion: ...

    async def abort(self, request_id: str | None = None) -> None: ...


class GraderPool(Protocol):
    async def grade(self, prompt: Prompt, sample: Sample) -> Grade: ...


@dataclass(slots=True, frozen=True)
class Response:
    text: str
    tokens: int
    finish_reason: str
    correct: bool | None
    extracted: str | None
    reason: str


@dataclass(slots=True, frozen=True)
class ProblemResult:
    id: str
    question: str
    reference: str
    responses: list[Response]

    @property
    def graded(self) -> list[Response]:
        return [r for r in self.responses if r.correct is not None]

    @property
    def right(self) -> int:
        return sum(r.correct is True for r in self.responses)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.graded)

    def to_json(self) -> dict[str, Any]:
        """Everything but the texts of the responses."""
        responses = [{key: value for key, value in asdict(r).items() if key != "text"} for r in self.responses]
        return {
            "id": self.id, "question": self.question, "reference": self.reference,
            "right": self.right, "graded": len(self.graded), "responses": responses,
        }  # fmt: skip


@dataclass(slots=True)
class EvalResult:
    samples: int
    avg: float
    interval: tuple[float, float] | None  # of avg, clustered by problem; None for a single problem
    confidence: float
    sampling_error: float  # standard error of avg for exactly these problems
    pass_at: dict[int, float]
    majority: float | None  # None if the grader extracts no answers
    lenient: float | None  # share of responses whose last number is the reference; None unless all are numbers
    mean_tokens: float
    truncation_rate: float
    ungraded: int
    unusable: int  # problems without a graded response
    seed: int
    seconds: float
    problems: list[ProblemResult] = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl, for example `eval/avg@32`."""
        k = self.samples
        found = {f"eval/avg@{k}": self.avg, **{f"eval/pass@{n}": value for n, value in self.pass_at.items()}}
        if self.interval is not None:
            found |= {f"eval/avg@{k}_low": self.interval[0], f"eval/avg@{k}_high": self.interval[1]}
        if self.majority is not None:
            found[f"eval/maj@{k}"] = self.majority
        if self.lenient is not None:
            found[f"eval/lenient@{k}"] = self.lenient
        return found | {
            "eval/mean_tokens": self.mean_tokens, "eval/truncation_rate": self.truncation_rate,
            "eval/ungraded": float(self.ungraded), "eval/seconds": self.seconds,
        }  # fmt: skip

    def table(self, title: str) -> Table:
        from rich.table import Table

        k = self.samples
        table = Table("metric", "value", "", title=f"{title}: {len(self.problems)} problems × {k} responses")
        interval = "" if self.interval is None else (
            f"{self.confidence:.0%} interval {self.interval[0]:.1%} to {self.interval[1]:.1%}, clustered by problem; "
            f"± {self.sampling_error:.1%} from sampling alone"
        )  # fmt: skip
        table.add_row(f"avg@{k}", f"{self.avg:.2%}", interval)
        for n, value in self.pass_at.items():
            table.add_row(f"pass@{n}", f"{value:.2%}", "unbiased" if n < k else "")
        table.add_row(f"maj@{k}", "—" if self.majority is None else f"{self.majority:.2%}", "")
        if self.lenient is not None:
            table.add_row(f"lenient@{k}", f"{self.lenient:.2%}", "last number in the response, in any format")
        table.add_row("mean length", f"{self.mean_tokens:.1f}", "tokens")
        table.add_row("truncated", f"{self.truncation_rate:.2%}", "")
        if self.ungraded:
            table.add_row("ungraded", str(self.ungraded), f"excluded; {self.unusable} problems have no graded response")
        return table

    def write(self, directory: str | Path) -> None:
        """Writes one readable file per problem under `responses/`, then `results.json`.

        `results.json` is there only if everything was written; one of an earlier evaluation is removed first."""
        folder = Path(directory)
        building, final = folder / ".responses.tmp", folder / "responses"
        (folder / "results.json").unlink(missing_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for number, problem in enumerate(self.problems, start=1):
            name = re.sub(r"[^\w.-]+", "_", problem.id)[:100]
            file = building / f"{number:04d}-{name}.txt"
            file.write_text(_readable(number, problem), encoding="utf-8", errors="backslashreplace")
        shutil.rmtree(final, ignore_errors=True)
        building.rename(final)
        write_atomically(folder / "results.json", json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Everything but the texts of the responses."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "problems"}
        values["interval_kind"] = "Student's t over problem means (clustered by problem)"
        values["pass_at"] = {str(k): value for k, value in self.pass_at.items()}
        values["problems"] = [p.to_json() for p in self.problems]
        return values


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
    if config.max_response_tokens is None:
        raise ValueError("evaluate needs max_response_tokens: pass Config.resolved_evaluate")
    if not prompts:
        raise EvaluationError("there is no problem to evaluate: check evaluate.data.path")
    started = time.monotonic()
    responses = await _Evaluation(engine, grader_pool, config, seed, progress).run(prompts)
    problems = [
        ProblemResult(p.id, str(p.meta.get("question", p.text)), p.answer, responses[i : i + config.samples])
        for i, p in zip(range(0, len(responses), config.samples), prompts, strict=True)
    ]
    return summarise(problems, config, seed, time.monotonic() - started)


class _Evaluation:
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

    async def run(self, prompts: Sequence[Prompt]) -> list[Response]:
        """The responses, those to one prompt next to each other."""
        indices = range(self._config.samples)
        self._tasks = [asyncio.create_task(self._one(prompt, i)) for prompt in prompts for i in indices]
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

    async def _one(self, prompt: Prompt, index: int) -> Response:
        async with self._slots:
            sample = await self._generate(prompt, index)
            grade = await self._pool.grade(prompt, sample)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._tasks))
        return Response(
            sample.text, sample.length, sample.finish_reason.value, grade.correct, grade.extracted, grade.reason
        )

    async def _generate(self, prompt: Prompt, index: int) -> Sample:
        """Repeats a response that the engine aborts by itself; the seed makes it the same response."""
        assert self._config.max_response_tokens is not None
        seed = derive_seed(self._seed, 0, prompt.id, index)
        params = SamplingParams(
            max_new_tokens=self._config.max_response_tokens, temperature=self._config.temperature,
            top_p=self._config.top_p, top_k=self._config.top_k, stop=tuple(self._config.stop or ()), seed=seed,
        )  # fmt: skip
        for attempt in range(ATTEMPTS):
            name = f"eval-{prompt.id}-{index}" + (f"-try{attempt}" if attempt else "")
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


def summarise(problems: list[ProblemResult], config: EvalConfig, seed: int, seconds: float) -> EvalResult:
    usable = [p for p in problems if p.graded]
    if not usable:
        raise EvaluationError(
            f"none of {len(problems) * config.samples} responses could be graded; the first was "
            f"{problems[0].responses[0].reason!r}: check the reward section"
        )
    responses = [r for p in problems for r in p.responses]
    accuracies = [p.accuracy for p in usable]
    noise = sum(p.accuracy * (1 - p.accuracy) / max(1, len(p.graded) - 1) for p in usable)
    votes = any(r.extracted is not None for r in responses)
    return EvalResult(
        samples=config.samples,
        avg=fmean(accuracies),
        interval=clustered_interval(accuracies, config.confidence),
        confidence=config.confidence,
        sampling_error=math.sqrt(noise) / len(usable),
        pass_at={k: fmean(pass_at_k(len(p.graded), p.right, k) for p in usable) for k in config.pass_at_values},
        majority=fmean(majority(p.graded) for p in usable) if votes else None,
        lenient=lenient_score(problems),
        mean_tokens=fmean(r.tokens for r in responses),
        truncation_rate=fmean(r.finish_reason == FinishReason.LENGTH for r in responses),
        ungraded=len(responses) - sum(len(p.graded) for p in problems),
        unusable=len(problems) - len(usable),
        seed=seed,
        seconds=seconds,
        problems=problems,
    )


def lenient_score(problems: Sequence[ProblemResult]) -> float | None:
    matches = [last_number_matches(p.reference, r.text) for p in problems for r in p.responses]
    return None if None in matches else fmean(bool(match) for match in matches)


def majority(responses: Sequence[Response]) -> float:
    """1 if the most frequent answer is correct, 1/n in a tie of n. All correct responses count as one answer."""
    votes = Counter[str | bool]()
    for response in responses:
        if response.correct:
            votes[True] += 1
        elif response.extracted is not None:
            votes[" ".join(response.extracted.split())] += 1
    most = max(votes.values(), default=0)
    winners = [vote for vote, count in votes.items() if count == most]
    return 1.0 / len(winners) if True in winners else 0.0


def _readable(number: int, problem: ProblemResult) -> str:
    score = f"{problem.right} of {len(problem.graded)} right"
    lines = [f"Problem {number} ({problem.id}): {score}, reference {problem.reference}", "", problem.question]
    for index, response in enumerate(problem.responses, start=1):
        verdict = {True: "right", False: "wrong", None: "ungraded"}[response.correct]
        head = f"response {index}: {verdict} ({response.reason}), {response.tokens} tokens, {response.finish_reason}"
        lines += ["", "-" * 100, f"{head}, extracted: {response.extracted}", "-" * 100, response.text]
    return "\n".join(lines) + "\n"


def create_output(directory: str | Path) -> Path:
    """Creates the output directory and checks that files can be written to it, before anything is generated."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ".writable", "", fsync=False)
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write results there: {error.strerror or error}") from None
    return folder


def run(config: Config, out: str | Path, seed: int) -> EvalResult:
    """`megatron-dapo eval`: loads the benchmark and the policy, evaluates, writes `out` and prints the table."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from megatron_dapo.data import load_prompts, load_tokenizer
    from megatron_dapo.engines.factory import open_engine
    from megatron_dapo.reward import RewardPool

    shape = check_config(config)
    if shape is None:
        raise ConfigError("policy.model is empty: name the HF directory of the model to evaluate")
    folder, console, settings = create_output(out), Console(), config.resolved_evaluate
    tokenizer = load_tokenizer(config.policy.model, shape.vocab)
    prompts = load_prompts(settings.data, tokenizer, config.rollout.max_prompt_tokens)
    console.print(prompts.report.summary(), highlight=False, soft_wrap=True)

    async def main() -> EvalResult:
        engine = await open_engine(config.rollout, config.policy.model, folder / "logs")
        try:
            with Bar(console=console, transient=True) as bar:
                task = bar.add_task("responses", total=len(prompts) * settings.samples)
                async with RewardPool(config.reward) as pool:
                    return await evaluate(
                        engine, prompts, pool, settings, seed, lambda done, _: bar.update(task, completed=done)
                    )
        finally:
            await engine.close()

    result = asyncio.run(main())
    result.write(folder)
    console.print(result.table(Path(settings.data.path).stem))
    console.print(f"written: {folder / 'results.json'}; readable responses: {folder / 'responses'}")
    return result
