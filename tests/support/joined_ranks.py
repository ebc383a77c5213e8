"""Tests that need ranks share forks: jobs of one world size run one after the other in the same forked ranks.

jobs = RankJobs()
scores = jobs.add(2, score, "tp2")       # score(rendezvous, "tp2") in two ranks

def test_scores():
    first, second = scores.results()     # the first test that asks makes the fork, the others read
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dapo.errors import RanksTimedOut
from megatron_dapo.policy.megatron.runtime import shutdown
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks

# Each job leaves process groups, with about fifty threads in each rank that wake up a hundred times a second. Joining a
# new world costs as much as a small job.
JOBS_PER_WORLD = 4
JOBS_PER_FORK = 12


@dataclass
class Job:
    """One function call in every rank of a world."""

    jobs: RankJobs
    world: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    outcomes: list[tuple[bool, Any]] | None = field(default=None, repr=False)

    def results(self) -> list[Any]:
        """What each rank returned. Fails with the first rank's traceback if the function raised."""
        if self.outcomes is None:
            self.jobs.run(self)
        assert self.outcomes is not None
        for rank, (ok, value) in enumerate(self.outcomes):
            assert ok, f"rank {rank} of {self.world}:\n{value}"
        return [value for _, value in self.outcomes]


@dataclass
class RankJobs:
    timeout: float = 280.0
    waiting: dict[int, list[Job]] = field(default_factory=dict)

    def add(self, world: int, function: Callable[..., Any], *args: Any) -> Job:
        job = Job(self, world, function, args)
        self.waiting.setdefault(world, []).append(job)
        return job

    def run(self, asked: Job) -> None:
        """The job and its neighbours: as many as end within the timeout, also on a busy machine."""
        waiting = self.waiting[asked.world]
        place = next(i for i, job in enumerate(waiting) if job is asked)
        first = place - place % JOBS_PER_FORK
        # Those that were added after a fork of their block have it without the others.
        jobs = [job for job in waiting[first : first + JOBS_PER_FORK] if job.outcomes is None]
        try:
            per_rank = run_ranks(asked.world, _run_all, jobs, timeout=self.timeout)
        except RanksTimedOut as error:
            per_rank = [[(False, str(error))] * len(jobs)] * asked.world
        for job, outcomes in zip(jobs, zip(*per_rank, strict=True), strict=True):
            job.outcomes = list(outcomes)


def _run_all(rendezvous: Rendezvous, jobs: list[Job]) -> list[tuple[bool, Any]]:
    outcomes = []
    for first in range(0, len(jobs), JOBS_PER_WORLD):
        here = replace(rendezvous, url=f"{rendezvous.url}-{first}")
        outcomes += [_run(here, job) for job in jobs[first : first + JOBS_PER_WORLD]]
        shutdown()
    return outcomes


def _run(rendezvous: Rendezvous, job: Job) -> tuple[bool, Any]:
    try:
        return True, job.function(rendezvous, *job.args)
    except Exception:
        return False, traceback.format_exc()
