"""What is sampled in a simulation: prompts without content, response lengths, and grades.

Lengths are log-normal, partly shared by the samples of a prompt; a group is informative with a fixed probability. Both
depend only on the seed, never on timing: a sample that is continued has the length it would have had anyway.

Tokens are simulated in units of several, so that a step of 100 million tokens needs little memory.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import numpy as np

from megatron_dapo.errors import UserError
from megatron_dapo.observe.runs import Run, load_run
from megatron_dapo.planner.workload import Workload
from megatron_dapo.types import Grade, Prompt, Sample

RECENT_STEPS = 5  # of a run, from which lengths and yield are taken
LEAST_RESPONSES = 50  # from which the spread of lengths is estimated
SEEDS = 2**63  # seeds of samples are uniform below this
_NORMAL = NormalDist()


class SimulationError(UserError):
    """Wrong or missing input of `simulate`; the message says what to change."""


class Prompts:
    """Numbered prompts; the number is the first token."""

    def __init__(self, work: Workload, unit: int, seed: int) -> None:
        self.work, self.unit, self.seed = work, unit, seed
        self.size = max(1, work.mean_prompt // unit)  # units of a prompt
        self._drawn: list[tuple[float, bool]] = []  # of every prompt: what its samples' lengths share; informative
        self._random = random.Random(seed)

    def take(self) -> Prompt:
        number = len(self._drawn)
        self._drawn.append((self._random.gauss(0, 1), self._random.random() < self.work.kept))
        tokens = np.zeros(self.size, dtype=np.int32)
        tokens[0] = number
        return Prompt(str(number), "", tokens)

    def length(self, prompt: int, sample_seed: int) -> int:
        """Units of the response of a sample."""
        lengths = self.work.lengths
        if lengths.constant:
            return max(1, round(lengths.mean / self.unit))
        shared = self._drawn[prompt][0] * math.sqrt(lengths.group_share)
        own = _NORMAL.inv_cdf((sample_seed + 0.5) / SEEDS) * math.sqrt(1 - lengths.group_share)
        length = math.exp(lengths.mu + lengths.sigma * (shared + own))
        return max(1, round(min(lengths.longest, length) / self.unit))

    def informative(self, prompt: int) -> bool:
        return self._drawn[prompt][1]

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        number = int(prompt.tokens[0])
        if self.informative(number):
            # The first two samples differ, so the group is informative whatever the others are.
            correct = sample.index % 2 == 0 if sample.index < 2 else bool(sample.seed % 2)
        else:
            correct = bool(number % 2)
        return Grade(correct, float(correct))


def unit_of(work: Workload) -> int:
    """Tokens in a unit: 128 units make a mean response."""
    return max(1, work.mean_response // 128)


def from_run(directory: str, work: Workload) -> Workload:
    """`work` with the yield and the lengths that a run measured in its last steps."""
    run = load_run(Path(directory), Path(directory).name)
    recent = [record.metrics for record in run.steps[-RECENT_STEPS:]]
    yields = [metrics["rollout/filter_yield"] for metrics in recent if "rollout/filter_yield" in metrics]
    trained = [metrics["rollout/length_trained"] for metrics in recent if "rollout/length_trained" in metrics]
    if not trained:
        raise SimulationError(f"{directory}: metrics.jsonl has no rollout/length_trained: name a run that trained")
    dropped = [metrics["rollout/length_dropped"] for metrics in recent if "rollout/length_dropped" in metrics]
    kept = min(1.0, max(0.01, fmean(yields))) if yields else work.kept
    mean = fmean(trained) if not dropped else kept * fmean(trained) + (1 - kept) * fmean(dropped)
    return replace(
        work,
        kept=kept,
        mean_response=max(1, min(work.max_response, round(mean))),
        sigma=_sigma(run, work),
    )


def _sigma(run: Run, work: Workload) -> float:
    """The spread of the logarithm of response lengths, from the transcripts; responses that were cut are left out."""
    logs = [math.log(max(1, item.tokens)) for item in run.transcripts if item.finish_reason == "stop"]
    return pstdev(logs) if len(logs) >= LEAST_RESPONSES else work.sigma
