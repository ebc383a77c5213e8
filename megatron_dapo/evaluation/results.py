"""The results of an evaluation: scores per problem and benchmark, their statistics, metrics, tables and files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from megatron_dapo.config.data import EvalConfig
from megatron_dapo.errors import UserError
from megatron_dapo.files import publish_directory, write_atomically
from megatron_dapo.observe.transcripts import VERDICTS, readable_response
from megatron_dapo.reward.equivalence import last_number_matches
from megatron_dapo.reward.extract import reference_answer
from megatron_dapo.types import FinishReason, printable

if TYPE_CHECKING:
    from rich.table import Table


class EvaluationError(UserError):
    """The evaluation failed; the message names the problem and the cause."""


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
    prompt: str = ""  # the question as the model sees it

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
    sampling_error: float | None  # standard error of avg for exactly these problems; None: too few responses
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

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """For metrics.jsonl, for example `eval/avg@32`."""
        k = self.samples
        found = {f"avg@{k}": self.avg, **{f"pass@{n}": value for n, value in self.pass_at.items()}}
        if self.interval is not None:
            found |= {f"avg@{k}_low": self.interval[0], f"avg@{k}_high": self.interval[1]}
        if self.majority is not None:
            found[f"maj@{k}"] = self.majority
        if self.lenient is not None:
            found[f"lenient@{k}"] = self.lenient
        found |= {
            "mean_tokens": self.mean_tokens, "truncation_rate": self.truncation_rate,
            "ungraded": float(self.ungraded), "seconds": self.seconds,
        }  # fmt: skip
        return {prefix + name: value for name, value in found.items()}

    def table(self, title: str) -> Table:
        from rich.table import Table

        k = self.samples
        table = Table("metric", "value", "", title=f"{title}: {len(self.problems)} problems × {k} responses")
        interval = "" if self.interval is None else (
            f"{self.confidence:.0%} interval {self.interval[0]:.1%} to {self.interval[1]:.1%}, clustered by problem"
            + ("" if self.sampling_error is None else f"; ± {self.sampling_error:.1%} from sampling alone")
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
        building = folder / ".responses.tmp"
        (folder / "results.json").unlink(missing_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for number, problem in enumerate(self.problems, start=1):
            name = re.sub(r"[^\w.-]+", "_", problem.id)[:100]
            file = building / f"{number:04d}-{name}.txt"
            file.write_text(printable(_readable(number, problem)), encoding="utf-8", errors="backslashreplace")
        publish_directory(building, folder / "responses", folder / ".responses.old")
        write_atomically(folder / "results.json", json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Everything but the texts of the responses."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "problems"}
        values["interval_kind"] = "Student's t over problem means (clustered by problem)"
        values["pass_at"] = {str(k): value for k, value in self.pass_at.items()}
        values["problems"] = [p.to_json() for p in self.problems]
        return values


@dataclass(slots=True, frozen=True)
class Evaluation:
    """The results of an evaluation, by the name of the benchmark."""

    config: EvalConfig
    results: dict[str, EvalResult]

    def metrics(self) -> dict[str, float]:
        """`eval/avg@k`, or `eval/NAME/avg@k` where there are several benchmarks."""
        found: dict[str, float] = {}
        for name, result in self.results.items():
            found |= result.metrics(self.config.metric_prefix(name))
        return found

    def write(self, directory: str | Path) -> None:
        """As `EvalResult.write`; several benchmarks have a folder each."""
        for name, result in self.results.items():
            result.write(Path(directory) / name if self.config.data.sources else directory)


def summarise(problems: list[ProblemResult], config: EvalConfig, seed: int, seconds: float) -> EvalResult:
    usable = [p for p in problems if p.graded]
    if not usable:
        raise EvaluationError(
            f"none of {len(problems) * config.samples} responses could be graded; the first was "
            f"{problems[0].responses[0].reason!r}: check the reward section and rollout.generate"
        )
    responses = [r for p in problems for r in p.responses]
    accuracies = [p.accuracy for p in usable]
    noise = [p.accuracy * (1 - p.accuracy) / (len(p.graded) - 1) for p in usable if len(p.graded) > 1]
    votes = any(r.extracted is not None for r in responses)
    return EvalResult(
        samples=config.samples,
        avg=fmean(accuracies),
        interval=clustered_interval(accuracies, config.confidence),
        confidence=config.confidence,
        sampling_error=math.sqrt(sum(noise)) / len(usable) if len(noise) == len(usable) else None,
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
    matches = [last_number_matches(reference_answer(p.reference), r.text) for p in problems for r in p.responses]
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
    title = f"Problem {number} ({problem.id}): {problem.right} of {len(problem.graded)} right"
    lines = [title + (f", reference {problem.reference}" if problem.reference else ""), "", problem.prompt]
    for index, response in enumerate(problem.responses, start=1):
        lines += readable_response(f"response {index}: {VERDICTS[response.correct]}", response)
    return "\n".join(lines) + "\n"


def pass_at_k(responses: int, right: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the probability that k of the n responses, drawn without replacement, include a correct
    one."""
    k = min(k, responses)  # some responses may be ungraded
    return 1.0 - math.comb(responses - right, k) / math.comb(responses, k)


def clustered_interval(means: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean over problems, limited to [0, 1].

    If all means are 0 (or all 1), t would give an interval of width 0; the exact binomial interval is returned instead.
    """
    if len(means) < 2:
        return None
    if set(means) in ({0.0}, {1.0}):
        far = 1 - ((1 - confidence) / 2) ** (1 / len(means))
        return (0.0, far) if means[0] == 0 else (1 - far, 1.0)
    low, high = mean_interval(means, confidence) or (0.0, 1.0)
    return max(0.0, low), min(1.0, high)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student_t(confidence, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half


def student_t(confidence: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = confidence, by bisection. The distribution has a finite series."""

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
