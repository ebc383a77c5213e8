"""The reward pool: grades responses from asyncio, thousands at a time, whatever the responses contain.

`grade` takes a text: `QuickGrader.quick` decides in this process what needs only string operations; the rest goes to
grading processes with limits on CPU time and memory. `grade_tokens` takes a response's tokens: a grading process
decodes and grades them. A process that hits a limit is replaced and the response tried again. A response that cannot
be graded is *ungraded* (`correct is None`, score 0, the reason); it is counted and never scored as wrong.

If the grader raises, the response is ungraded too. After `reward.max_errors` errors within
`reward.error_window_seconds` the grader counts as broken: every call raises `GraderError` with the last traceback.
This is the only type that `grade` raises because grading cannot go on, so the trainer can save first.

One thread per process exchanges messages with it. Only the event loop's thread changes counters and futures.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.reward.grader import FunctionGrader, GraderError, QuickGrader, load_grader
from megatron_dapo.reward.process import GradingProcess, GradingRequest, WorkerDied
from megatron_dapo.types import Grade, Prompt, Sample

BATCH = 64  # most responses in one message to a process


@dataclass(slots=True, eq=False)
class _Job(GradingRequest):
    future: asyncio.Future[Grade] | None = None


class RewardPool:
    """`async with RewardPool(config) as pool: grade = await pool.grade(prompt, sample)`."""

    decodes_tokens = True

    def __init__(self, config: RewardConfig, tokenizer: str = "") -> None:
        """`tokenizer`: the JSON of a `tokenizers.Tokenizer`; `grade_tokens` needs it."""
        self._config, self._tokenizer = config, tokenizer.encode()
        self._grader = load_grader(config)
        self._quick = self._grader.quick if isinstance(self._grader, QuickGrader) else None
        self._is_async = isinstance(self._grader, FunctionGrader) and self._grader.is_async
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[Grade]] = set()
        self._failure: GraderError | None = None
        self._counts: Counter[str] = Counter()
        self._crashes_in_a_row = 0
        self._error_times: deque[float] = deque()
        self._clock = time.monotonic
        self._seconds = 0.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        with self._changed:
            self._jobs.clear()
            self._changed.notify_all()
        for future in self._waiting:
            future.cancel()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in self._threads))

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        """The grade of `sample.text`. Raises GraderError once the grader counts as broken."""
        self._check_open()
        quick = self._grade_quickly(prompt, sample.text)
        return self._count(quick or await self._grade_in_process(_Job(prompt, sample.text)))

    async def grade_tokens(self, prompt: Prompt, sample: Sample) -> Grade:
        """The grade of the text that `sample.final_tokens` decode to."""
        self._check_open()
        return self._count(await self._grade_in_process(_Job(prompt, "", sample.final_tokens)))

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._loop is None or self._stopping.is_set():
            raise RuntimeError("RewardPool.grade was called outside of `async with pool`")

    def _count(self, grade: Grade) -> Grade:
        self._counts["graded" if grade.correct is not None else "ungraded"] += 1
        self._counts["correct"] += grade.correct is True
        return grade

    def metrics(self) -> dict[str, float]:
        """Counts since the pool was created; `reward/seconds` is the CPU time spent on grading, over all processes."""
        names = ("graded", "correct", "ungraded", "quick", "errors", "retries", "restarts")
        reasons = sorted(name for name in self._counts if name.startswith("ungraded/"))
        counted = {f"reward/{name}": float(self._counts[name]) for name in (*names, *reasons)}
        return {**counted, "reward/seconds": self._seconds}

    def _grade_quickly(self, prompt: Prompt, response: str) -> Grade | None:
        if self._quick is None:
            return None
        started = time.perf_counter()
        try:
            grade = self._quick(prompt, response)
        except Exception:  # the grading process will raise the same error and report its traceback
            return None
        self._counts["quick"] += grade is not None
        self._seconds += time.perf_counter() - started
        return grade

    async def _grade_in_process(self, job: _Job) -> Grade:
        assert self._loop is not None
        job.future = self._loop.create_future()
        self._waiting.add(job.future)
        try:
            self._enqueue([job])
            return await job.future
        finally:
            self._waiting.discard(job.future)

    # -- the queue between the event loop and the threads ------------------------------------------------

    def _enqueue(self, jobs: list[_Job]) -> None:
        with self._changed:
            self._jobs.extend(jobs)
            if self._idle < len(self._jobs) and len(self._threads) < self._config.worker_count:
                thread = threading.Thread(target=self._serve, name=f"grading-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify(len(jobs))

    def _next_batch(self) -> list[_Job]:
        """Waits for jobs; empty when the pool stops. A short queue is spread over the processes, not batched."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._stopping.is_set())
            self._idle -= 1
            if self._stopping.is_set():
                return []
            if self._is_async:
                size = self._config.concurrency
            else:
                size = min(BATCH, len(self._jobs) // (2 * self._config.worker_count))
            batch = [self._jobs.popleft()]
            while len(batch) < size and self._jobs and not (batch[0].alone or self._jobs[0].alone):
                batch.append(self._jobs.popleft())
            return batch

    # -- one thread per process --------------------------------------------------------------------------

    def _serve(self) -> None:
        process: GradingProcess | None = None
        try:
            while not self._stopping.is_set():  # jobs queue while a process starts
                process = process or GradingProcess(self._config, self._stopping, self._tokenizer)
                batch = self._next_batch()
                wanted = [job for job in batch if job.future is not None and not job.future.cancelled()]
                if wanted:
                    process = self._run(process, wanted)
        except WorkerDied:  # the pool stopped while the process was starting
            pass
        except GraderError as error:
            self._tell(self._fail, error)
        except Exception:  # e.g. no process or descriptor left: the callers that wait must be told
            self._tell(self._fail, GraderError(f"grading cannot go on:\n{traceback.format_exc()}"))
        finally:
            if process is not None:
                process.close()

    def _run(self, process: GradingProcess, batch: list[_Job]) -> GradingProcess | None:
        """Grades the batch; returns the process, or None if it must be replaced."""
        outstanding = dict(enumerate(batch))
        worn_out = False
        try:
            for index, reply in process.grade(list(batch)):
                job = outstanding.pop(index)
                if reply.get("limit"):
                    worn_out = True
                    self._tell(self._try_again, job, reply["limit"])
                else:
                    self._tell(self._settle, job, reply)
        except WorkerDied as death:
            if death.reason != "stopping":
                self._tell(self._after_death, list(outstanding.values()), death.reason)
            worn_out = True
        if worn_out:
            process.close()
            return None
        return process

    def _tell(self, function: Any, *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nothing waits for this grade any more
            self._stopping.set()

    # -- back in the event loop --------------------------------------------------------------------------

    def _settle(self, job: _Job, reply: dict[str, Any]) -> None:
        self._crashes_in_a_row = 0
        self._seconds += reply.get("seconds", 0.0)
        self._counts["quick"] += reply.get("quick", False)
        if "error" in reply:
            self._raised(job, reply["error"], reply["response"])
            return
        grade = Grade.from_state(reply["grade"])
        if grade.ungraded:
            self._counts["ungraded/by-grader"] += 1
        self._answer(job, grade)

    def _raised(self, job: _Job, trace: str, response: str) -> None:
        self._counts["errors"] += 1
        self._counts["ungraded/raised"] += 1
        self._answer(job, Grade(None, 0.0, None, f"the grader raised {trace.strip().splitlines()[-1]}"))
        now, window = self._clock(), self._config.error_window_seconds
        self._error_times.append(now)
        while now - self._error_times[0] > window:
            self._error_times.popleft()
        if (errors := len(self._error_times)) >= self._config.max_errors:
            self._fail(
                GraderError(
                    f"the grader {self._config.grader!r} raised {errors} times within {window:g} s "
                    f"(reward.max_errors is {self._config.max_errors}), last on prompt {job.prompt.id} with the "
                    f"response {response!r}:\n{trace}"
                )
            )

    def _after_death(self, jobs: list[_Job], reason: str) -> None:
        """The process died. If it graded one by one, the first job is the cause; if together, each is tried alone."""
        self._counts["restarts"] += 1
        self._crashes_in_a_row = self._crashes_in_a_row + 1 if reason == "crashed" else 0
        if self._crashes_in_a_row >= self._config.max_errors:
            self._fail(
                GraderError(
                    f"grading processes crashed {self._crashes_in_a_row} times in a row without grading anything in "
                    f"between (grader {self._config.grader!r}); see their output above, or raise reward.memory_mb"
                )
            )
            return
        causes = jobs[:1] if not self._is_async or len(jobs) == 1 else []
        others = jobs[len(causes) :]
        for job in others:
            job.alone = self._is_async
        if others:
            self._enqueue(others)
        for job in causes:
            self._try_again(job, reason)

    def _try_again(self, job: _Job, reason: str) -> None:
        job.failures += 1
        if job.failures <= self._config.retries:
            self._counts["retries"] += 1
            job.alone = True
            self._enqueue([job])
            return
        self._counts[f"ungraded/{reason}"] += 1
        self._answer(job, Grade(None, 0.0, None, f"{reason} ({job.failures} tries)"))

    def _answer(self, job: _Job, grade: Grade) -> None:
        if job.future is not None and not job.future.done():
            job.future.set_result(grade)

    def _fail(self, error: GraderError) -> None:
        """From now on every call raises `error`; so do the calls that are waiting."""
        self._failure = self._failure or error
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._failure)
