"""The reward pool: grades responses from asyncio, thousands at a time, whatever the responses contain.

`grade` takes a text: `Grader.quick` decides in this process what needs only string operations; the rest goes to
grading processes (`reward.worker`). `grade_tokens` takes a response's tokens: a grading process decodes and grades
them. A process that hits a limit is replaced and the response tried again. A response that cannot be graded is
*ungraded* (`correct is None`, score 0, the reason); it is counted and never scored as wrong.

A process is judged by what it uses, not by the clock. The kernel limits CPU time inside it, resident memory is watched
here, and it counts as stuck only after `stuck_seconds` of sleep without using CPU time or replying. Waiting for a core
on an overloaded machine is none of these.

If the grader raises, the response is ungraded too, and each distinct error is logged once. After `reward.max_errors`
errors within `reward.error_window_seconds` the grader counts as broken: every call raises `GraderError` with the last
traceback. This is the only type that `grade` raises because grading cannot go on, so the trainer can save first.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial

import psutil

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.plugins import log_once
from megatron_dapo.processes.frames import Frame
from megatron_dapo.processes.supervised import ProcessEnded, WorkerProcess, worker_environment
from megatron_dapo.reward.grader import FunctionGrader, GraderError, Graders, load_grader
from megatron_dapo.types import Grade, Prompt, Sample, Tokens, json_default

BATCH = 64  # most responses in one message to a process
USAGE_SECONDS = 0.25  # between two looks at what a process uses: a look costs as much as grading a response
START_SECONDS = 120.0
CLOSE_SECONDS = 0.5  # an idle process exits by itself
COMMAND = [sys.executable, "-m", "megatron_dapo.reward.worker"]


@dataclass(slots=True, eq=False)
class _Job:
    """One response to grade, and how often that has failed."""

    prompt: Prompt
    response: str
    tokens: Tokens | None  # instead of `response`: the process decodes them
    future: asyncio.Future[Grade]
    failures: int = 0
    alone: bool = False  # graded in a batch of its own, because its last batch killed the process


class GradingProcess:
    def __init__(self, worker: WorkerProcess, config: RewardConfig, pid: int, has_tokenizer: bool) -> None:
        self._worker = worker
        self._config = config
        self._usage = psutil.Process(pid)
        self._memory_limit = config.memory_mb * 2**20 + (self._usage.memory_info().rss if has_tokenizer else 0)
        self._cpu_seconds = -1.0
        self._awake_at = 0.0

    @classmethod
    async def start(cls, config: RewardConfig, tokenizer: bytes) -> GradingProcess:
        """`tokenizer`: the JSON of a `tokenizers.Tokenizer`, for jobs that have tokens. Raises ProcessEnded if a signal
        ends the process meanwhile."""
        worker = await WorkerProcess.start(COMMAND, worker_environment(config.environment))
        try:
            _, (ready,) = worker.send({"config": config.model_dump(mode="json")}, tokenizer)
            async with asyncio.timeout(START_SECONDS):
                header, _ = await ready
            if header["problem"]:
                raise GraderError(f"a grading process (grader {config.grader!r}) could not start:\n{header['problem']}")
            return cls(worker, config, header["pid"], bool(tokenizer))
        except BaseException as error:
            await worker.end(CLOSE_SECONDS)
            if isinstance(error, ProcessEnded) and error.code < 0:
                raise
            if isinstance(error, TimeoutError):
                raise GraderError(f"a grading process did not start within {START_SECONDS:.0f} s") from None
            if isinstance(error, ProcessEnded | psutil.NoSuchProcess):
                raise GraderError(
                    f"a grading process (grader {config.grader!r}) could not start: it {error}; its output is on stderr"
                ) from None
            raise

    def send(self, jobs: list[_Job]) -> list[asyncio.Future[Frame]]:
        """The futures of the replies."""
        seconds = self._config.cpu_seconds * (1 + max(job.failures for job in jobs))
        header = {
            "cpu_seconds": seconds, "has_tokens": [job.tokens is not None for job in jobs],
            "prompts": [json.dumps(job.prompt.to_state(), default=json_default) for job in jobs],
        }  # fmt: skip
        parts = [job.response.encode(errors="surrogatepass") if job.tokens is None else job.tokens for job in jobs]
        return self._worker.send(header, *parts, replies=len(jobs))[1]

    async def watch(self, replies: list[asyncio.Future[Frame]]) -> str:
        """Returns when all replies are there: "", or why the process ended before: cpu-time, memory, stuck, crashed."""
        finished = asyncio.gather(*replies, return_exceptions=True)
        self._awake_at = time.monotonic()
        while True:
            done, _ = await asyncio.wait([finished], timeout=USAGE_SECONDS)
            if done:
                ends = [found.code for found in finished.result() if isinstance(found, ProcessEnded)]
                return "" if not ends else "cpu-time" if ends[0] == -signal.SIGPROF else "crashed"
            if reason := self._limit_hit():
                await self._worker.end()
                return reason

    def _limit_hit(self) -> str:
        try:
            with self._usage.oneshot():
                times, status, resident = self._usage.cpu_times(), self._usage.status(), self._usage.memory_info().rss
        except psutil.NoSuchProcess:  # the replies will fail
            return ""
        if resident > self._memory_limit:
            return "memory"
        cpu, now = times.user + times.system, time.monotonic()
        if cpu > self._cpu_seconds or status in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
            self._cpu_seconds = cpu
            self._awake_at = now
        asleep_since = max(self._awake_at, self._worker.last_reply)
        return "stuck" if now - asleep_since > self._config.stuck_seconds else ""

    async def close(self) -> None:
        """Ends the process and all its descendants."""
        await self._worker.end(CLOSE_SECONDS)


class RewardPool(Graders):
    """`async with RewardPool(config) as pool: grade = await pool.grade(prompt, sample)`.

    `reward/seconds` is the CPU time spent on grading, over all processes.
    """

    decodes_tokens = True
    counted = ("graded", "correct", "ungraded", "quick", "errors", "retries", "restarts")

    def __init__(self, config: RewardConfig, tokenizer: str = "") -> None:
        """`tokenizer`: the JSON of a `tokenizers.Tokenizer`; `grade_tokens` needs it."""
        super().__init__()
        self._config = config
        self._worker_count = config.worker_count
        self._tokenizer = tokenizer.encode()
        self._grader = load_grader(config)
        self._is_async = isinstance(self._grader, FunctionGrader) and self._grader.is_async
        self._jobs: deque[_Job] = deque()
        self._added = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # one per process
        self._idle = 0
        self._is_open = False
        self._waiting: set[asyncio.Future[Grade]] = set()
        self._failure: GraderError | None = None
        self._crashes_in_a_row = 0
        self._error_times: deque[float] = deque()
        self._logged: set[str] = set()
        self._clock = time.monotonic
        self._seconds = 0.0

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        for future in self._waiting:
            future.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        self._check_open()
        quick = self._grade_quickly(prompt, sample.text)
        return self._count(quick or await self._grade_in_process(prompt, sample.text, None))

    async def grade_tokens(self, prompt: Prompt, sample: Sample) -> Grade:
        self._check_open()
        return self._count(await self._grade_in_process(prompt, "", sample.final_tokens))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "reward/seconds": self._seconds}

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_open:
            raise RuntimeError("RewardPool.grade was called outside of `async with pool`")

    def _grade_quickly(self, prompt: Prompt, response: str) -> Grade | None:
        started = time.perf_counter()
        try:
            grade = self._grader.quick(prompt, response)
        except Exception:  # the grading process will raise the same error and report its traceback
            return None
        self._counts["quick"] += grade is not None
        self._seconds += time.perf_counter() - started
        return grade

    async def _grade_in_process(self, prompt: Prompt, response: str, tokens: Tokens | None) -> Grade:
        future: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            self._enqueue([_Job(prompt, response, tokens, future)])
            return await future
        finally:
            self._waiting.discard(future)

    # ---- the queue ----

    def _enqueue(self, jobs: list[_Job]) -> None:
        self._jobs.extend(jobs)
        self._added.set()
        if self._idle < len(self._jobs) and len(self._tasks) < self._worker_count:
            self._tasks.append(asyncio.ensure_future(self._serve()))

    async def _next_batch(self) -> list[_Job]:
        """Waits for jobs. A short queue is spread over the processes, not batched."""
        self._idle += 1
        while not self._jobs:
            self._added.clear()
            await self._added.wait()
        self._idle -= 1
        few = min(BATCH, len(self._jobs) // (2 * self._worker_count))
        size = self._config.concurrency if self._is_async else few
        batch = [self._jobs.popleft()]
        while len(batch) < size and self._jobs and not (batch[0].alone or self._jobs[0].alone):
            batch.append(self._jobs.popleft())
        return batch

    # ---- one task per process ----

    async def _serve(self) -> None:
        process: GradingProcess | None = None
        try:
            while self._failure is None:
                try:
                    process = process or await GradingProcess.start(self._config, self._tokenizer)  # jobs queue
                except ProcessEnded:
                    self._after_death([], "crashed")
                    continue
                wanted = [job for job in await self._next_batch() if not job.future.cancelled()]
                if wanted and not await self._run(process, wanted):
                    await process.close()
                    process = None
        except GraderError as error:
            self._fail(error)
        except Exception:  # e.g. no process or descriptor left: the callers that wait must be told
            self._fail(GraderError(f"grading cannot go on:\n{traceback.format_exc().rstrip()}"))
        finally:
            if process is not None:
                await process.close()

    async def _run(self, process: GradingProcess, batch: list[_Job]) -> bool:
        """Grades the batch; False if the process must be replaced."""
        replies = process.send(batch)
        for job, reply in zip(batch, replies, strict=True):
            reply.add_done_callback(partial(self._replied, job))
        reason = await process.watch(replies)
        if reason:
            unanswered = [job for job, reply in zip(batch, replies, strict=True) if reply.exception() is not None]
            self._after_death(unanswered, reason)
        return not reason and not any("limit" in reply.result()[0] for reply in replies)

    def _replied(self, job: _Job, future: asyncio.Future[Frame]) -> None:
        if future.cancelled() or future.exception() is not None:
            return  # the process has ended
        reply = future.result()[0]
        if "limit" in reply:
            self._try_again(job, reply["limit"])
            return
        self._crashes_in_a_row = 0
        self._seconds += reply.get("seconds", 0.0)
        self._counts["quick"] += reply.get("quick", False)
        if "error" in reply:
            self._raised(job, reply["error"], reply["trace"], reply["response"])
            return
        grade = Grade.from_state(reply["grade"])
        if grade.ungraded:
            self._counts["ungraded/by-grader"] += 1
        self._answer(job, grade)

    def _raised(self, job: _Job, error: str, trace: str, response: str) -> None:
        self._counts["errors"] += 1
        self._counts["ungraded/raised"] += 1
        self.last_error = error
        self._answer(job, Grade(None, 0.0, None, f"the grader raised {error}"))
        now, window = self._clock(), self._config.error_window_seconds
        self._error_times.append(now)
        while now - self._error_times[0] > window:
            self._error_times.popleft()
        if (errors := len(self._error_times)) >= (most := self._config.max_errors):
            often = f" {errors} times within {window:g} s (reward.max_errors is {most}), last" if most > 1 else ""
            self._fail(
                GraderError(
                    f"the grader {self._config.grader!r} raised{often} on prompt {job.prompt.id} with the response "
                    f"{response!r}:\n{trace}"
                )
            )
        else:
            log_once(self._logged, f"the grader {self._config.grader!r}", error, trace)

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
        if not job.future.done():
            job.future.set_result(grade)

    def _fail(self, error: GraderError) -> None:
        """From now on every call raises `error`; so do the calls that are waiting."""
        self._failure = self._failure or error
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._failure)
