"""Evaluation: every problem of a benchmark answered k times, and what that says about the policy.

avg@k is the mean over problems of the share of right answers. Its confidence interval is *clustered by problem*:
Student's t over the problems' means, because the k answers to one problem are not independent of each other. It
speaks about problems like these; `sampling_error` is the standard error for exactly these problems. pass@k is the
unbiased estimator, maj@k a vote of all k answers in which ties share. Ungraded answers are left out and counted.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dapo.config import Config, ConfigError, check_config
from megatron_dapo.config.evaluate import EvalConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams, derive_seed
from megatron_dapo.errors import UserError
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, Tokens

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int], None]


class EvaluationError(UserError):
    """The benchmark could not be answered; the message says which problem and why."""


class Generator(Protocol):
    """What evaluation needs of an engine."""

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion: ...


class GraderPool(Protocol):
    async def grade(self, prompt: Prompt, sample: Sample) -> Grade: ...


@dataclass(slots=True, frozen=True)
class Answer:
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
    answers: list[Answer]

    @property
    def graded(self) -> list[Answer]:
        return [a for a in self.answers if a.correct is not None]

    @property
    def right(self) -> int:
        return sum(a.correct is True for a in self.answers)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.graded)

    def to_record(self) -> dict[str, Any]:
        """All but the texts."""
        answers = [{key: value for key, value in asdict(a).items() if key != "text"} for a in self.answers]
        return {
            "id": self.id, "question": self.question, "reference": self.reference,
            "right": self.right, "graded": len(self.graded), "answers": answers,
        }  # fmt: skip


@dataclass(slots=True)
class EvalResult:
    samples: int
    avg: float
    interval: tuple[float, float] | None  # of avg, clustered by problem; None for a single problem
    confidence: float
    sampling_error: float  # standard error of avg for exactly these problems
    pass_at: dict[int, float]
    majority: float | None  # None where the grader extracts no answers
    mean_tokens: float
    truncation_rate: float
    ungraded: int
    unusable: int  # problems without a single graded answer
    seed: int
    seconds: float
    problems: list[ProblemResult] = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: `eval/avg@32` and so on."""
        k = self.samples
        found = {f"eval/avg@{k}": self.avg, **{f"eval/pass@{n}": value for n, value in self.pass_at.items()}}
        if self.interval is not None:
            found |= {f"eval/avg@{k}_low": self.interval[0], f"eval/avg@{k}_high": self.interval[1]}
        if self.majority is not None:
            found[f"eval/maj@{k}"] = self.majority
        return found | {
            "eval/mean_tokens": self.mean_tokens, "eval/truncation_rate": self.truncation_rate,
            "eval/ungraded": float(self.ungraded), "eval/seconds": self.seconds,
        }  # fmt: skip

    def table(self, title: str) -> Table:
        from rich.table import Table

        k = self.samples
        table = Table("metric", "value", "", title=f"{title}: {len(self.problems)} problems × {k} answers")
        interval = "" if self.interval is None else (
            f"{self.confidence:.0%} interval {self.interval[0]:.1%} to {self.interval[1]:.1%}, clustered by problem; "
            f"± {self.sampling_error:.1%} from sampling alone"
        )  # fmt: skip
        table.add_row(f"avg@{k}", f"{self.avg:.2%}", interval)
        for n, value in self.pass_at.items():
            table.add_row(f"pass@{n}", f"{value:.2%}", "unbiased" if n < k else "")
        table.add_row(f"maj@{k}", "—" if self.majority is None else f"{self.majority:.2%}", "")
        table.add_row("mean length", f"{self.mean_tokens:.1f}", "tokens")
        table.add_row("truncated", f"{self.truncation_rate:.2%}", "")
        if self.ungraded:
            table.add_row("ungraded", str(self.ungraded), f"left out; {self.unusable} problems have no graded answer")
        return table

    def write(self, directory: str | Path) -> None:
        """`results.json` and, for reading, one file per problem under `answers/`."""
        folder = Path(directory)
        (folder / "answers").mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self.to_record(), indent=2) + "\n")
        for number, problem in enumerate(self.problems, start=1):
            file = folder / "answers" / f"{number:04d}-{problem.id}.txt"
            file.write_text(_readable(number, problem), encoding="utf-8", errors="backslashreplace")

    def to_record(self) -> dict[str, Any]:
        """All but the texts of the answers."""
        record = {name: getattr(self, name) for name in self.__slots__ if name != "problems"}
        record["interval_kind"] = "Student's t over problem means (clustered by problem)"
        record["pass_at"] = {str(k): value for k, value in self.pass_at.items()}
        record["problems"] = [p.to_record() for p in self.problems]
        return record


async def evaluate(
    engine: Generator,
    prompts: Sequence[Prompt],
    grader_pool: GraderPool,
    config: EvalConfig,
    seed: int,
    progress: Progress | None = None,
) -> EvalResult:
    """Answers every prompt `config.samples` times. The same seed and a seeded engine give the same result.

    `config` must be complete (`Config.resolved_evaluate`). The first engine or grader error ends the evaluation.
    """
    if config.max_response_tokens is None:
        raise ValueError("evaluate needs max_response_tokens: pass Config.resolved_evaluate")
    if not prompts:
        raise EvaluationError("there is no problem to evaluate: check evaluate.data.path")
    started = time.monotonic()
    slots = asyncio.Semaphore(config.concurrency)
    total, done = len(prompts) * config.samples, 0

    async def one(prompt: Prompt, index: int) -> Answer:
        nonlocal done
        async with slots:
            answer = await _answer(engine, prompt, index, grader_pool, config, seed)
        done += 1
        if progress is not None:
            progress(done, total)
        return answer

    tasks = [asyncio.create_task(one(p, i)) for p in prompts for i in range(config.samples)]
    try:
        answers = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    problems = [
        ProblemResult(p.id, str(p.meta.get("question", p.text)), p.answer, answers[i : i + config.samples])
        for i, p in zip(range(0, total, config.samples), prompts, strict=True)
    ]
    return summarise(problems, config, seed, time.monotonic() - started)


async def _answer(
    engine: Generator, prompt: Prompt, index: int, grader_pool: GraderPool, config: EvalConfig, seed: int
) -> Answer:
    assert config.max_response_tokens is not None
    params = SamplingParams(
        max_new_tokens=config.max_response_tokens, temperature=config.temperature, top_p=config.top_p,
        top_k=config.top_k, stop=tuple(config.stop or ()), seed=derive_seed(seed, 0, prompt.id, index),
    )  # fmt: skip
    made = await engine.generate(f"eval-{prompt.id}-{index}", prompt.tokens, params)
    if made.finish_reason is FinishReason.ABORT:
        raise EvaluationError(
            f"the engine aborted answer {index} of problem {prompt.id}: nothing may pause the engine or change its "
            "weights while an evaluation runs"
        )
    sample = Sample(
        prompt.id, index, prompt.tokens, made.tokens, made.logprobs, made.finish_reason, made.weight_spans,
        seed=params.seed or 0, text=made.text,
    )  # fmt: skip
    grade = await grader_pool.grade(prompt, sample)
    return Answer(made.text, sample.length, made.finish_reason.value, grade.correct, grade.extracted, grade.reason)


def summarise(problems: list[ProblemResult], config: EvalConfig, seed: int, seconds: float) -> EvalResult:
    usable = [p for p in problems if p.graded]
    if not usable:
        raise EvaluationError(
            f"not one of {len(problems) * config.samples} answers could be graded; the first was "
            f"{problems[0].answers[0].reason!r}: check the reward section"
        )
    answers = [a for p in problems for a in p.answers]
    accuracies = [p.accuracy for p in usable]
    noise = sum(p.accuracy * (1 - p.accuracy) / max(1, len(p.graded) - 1) for p in usable)
    votes = any(a.extracted is not None for a in answers)
    return EvalResult(
        samples=config.samples,
        avg=fmean(accuracies),
        interval=clustered_interval(accuracies, config.confidence),
        confidence=config.confidence,
        sampling_error=math.sqrt(noise) / len(usable),
        pass_at={k: fmean(pass_at_k(len(p.graded), p.right, k) for p in usable) for k in config.pass_at_values},
        majority=fmean(majority(p.graded) for p in usable) if votes else None,
        mean_tokens=fmean(a.tokens for a in answers),
        truncation_rate=fmean(a.finish_reason == FinishReason.LENGTH for a in answers),
        ungraded=len(answers) - sum(len(p.graded) for p in problems),
        unusable=len(problems) - len(usable),
        seed=seed,
        seconds=seconds,
        problems=problems,
    )


def pass_at_k(answers: int, right: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the chance that k of the n answers, drawn without replacement, hold a right one."""
    k = min(k, answers)  # where some answers are ungraded
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def majority(answers: Sequence[Answer]) -> float:
    """Whether the most frequent answer is right; n that tie share. Right ones are one answer, however written."""
    votes = Counter[str | bool]()
    for answer in answers:
        if answer.correct:
            votes[True] += 1
        elif answer.extracted is not None:
            votes[" ".join(answer.extracted.split())] += 1
    most = max(votes.values(), default=0)
    winners = [vote for vote, count in votes.items() if count == most]
    return 1.0 / len(winners) if True in winners else 0.0


def clustered_interval(means: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean over problems, cut to [0, 1].

    Where every problem has the mean 0 (or 1), t would claim certainty; it is then the exact binomial interval.
    """
    if len(means) < 2:
        return None
    if set(means) in ({0.0}, {1.0}):
        far = 1 - ((1 - confidence) / 2) ** (1 / len(means))
        return (0.0, far) if means[0] == 0 else (1 - far, 1.0)
    half = student_t(confidence, len(means) - 1) * math.sqrt(variance(means) / len(means))
    return max(0.0, fmean(means) - half), min(1.0, fmean(means) + half)


def student_t(confidence: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = confidence, by bisection of the distribution's finite series."""

    def inside(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        odd = freedom % 2
        term = math.cos(angle) if odd else 1.0
        total = term if freedom > 1 else 0.0
        for i in range(3 if odd else 2, freedom, 2):
            term *= (i - 1) / i * math.cos(angle) ** 2
            total += term
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

    low, high = 0.0, 1e9
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return low


def _readable(number: int, problem: ProblemResult) -> str:
    score = f"{problem.right} of {len(problem.graded)} right"
    lines = [f"Problem {number} ({problem.id}): {score}, reference {problem.reference}", "", problem.question]
    for index, answer in enumerate(problem.answers, start=1):
        verdict = {True: "right", False: "wrong", None: "ungraded"}[answer.correct]
        head = f"answer {index}: {verdict} ({answer.reason}), {answer.tokens} tokens, {answer.finish_reason}"
        lines += ["", "-" * 100, f"{head}, extracted: {answer.extracted}", "-" * 100, answer.text]
    return "\n".join(lines) + "\n"


def run(config: Config, out: str | Path, seed: int) -> EvalResult:
    """`megatron-dapo eval`: loads the benchmark and the policy, evaluates, writes `out` and prints the table."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from transformers import AutoTokenizer

    from megatron_dapo.data import load_prompts
    from megatron_dapo.engines.factory import open_engine
    from megatron_dapo.reward import RewardPool

    if check_config(config) is None:
        raise ConfigError("policy.model is empty: name the HF directory of the model to evaluate")
    console, settings = Console(), config.resolved_evaluate
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    prompts = load_prompts(settings.data, tokenizer, config.rollout.max_prompt_tokens)
    console.print(prompts.report.summary(), highlight=False, soft_wrap=True)

    async def main() -> EvalResult:
        engine = await open_engine(config.rollout, config.policy.model, Path(out) / "logs")
        try:
            with Bar(console=console, transient=True) as bar:
                task = bar.add_task("answers", total=len(prompts) * settings.samples)
                async with RewardPool(config.reward) as pool:
                    return await evaluate(
                        engine, prompts, pool, settings, seed, lambda done, _: bar.update(task, completed=done)
                    )
        finally:
            await engine.close()

    result = asyncio.run(main())
    result.write(out)
    console.print(result.table(Path(settings.data.path).stem))
    console.print(f"written: {Path(out) / 'results.json'}, and the answers to read in {Path(out) / 'answers'}")
    return result
