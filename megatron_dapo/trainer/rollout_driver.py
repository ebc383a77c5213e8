"""Rank 0's rollouts: a thread with an event loop in which sampling, grading, evaluation and weight updates run.

The main thread trains. It starts an operation here and gets a future, so every wait of the main thread can be watched
(`Rollouts`). Batches are collected in a `BatchQueue`, also while the main thread trains and sends weights. `progress`
counts what the thread has achieved. It stands still when the thread is blocked or nothing finishes, and the watchdog
then ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from megatron_dapo import fault_points
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data import RunData, load_run_data
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import Engine, WeightReport, derive_seed
from megatron_dapo.engines.server_load import watch_load
from megatron_dapo.errors import EngineError
from megatron_dapo.evaluation import Evaluation, evaluate_sets
from megatron_dapo.files import read_end
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.reward.combined import ResponseGrader
from megatron_dapo.rollout.agents.functions import close_shared, load_rollout_function, take_shared_metrics
from megatron_dapo.rollout.pending_group import CarryOver
from megatron_dapo.rollout.sampler import Sampler, SamplingLimitError
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.trainer.watchdog import log_folder
from megatron_dapo.types import Group, StepBatch

if TYPE_CHECKING:
    from megatron_dapo.engines.teacher import Teacher

T = TypeVar("T")
CLOSE_SECONDS = 120.0
CANCEL_SECONDS = 10.0
SETTLE_SECONDS = 300.0
PULSE_SECONDS = 1.0
ERROR_SHARE = 0.01  # of a step's responses; where grading begins to fail on more, a warning names the last error


class BatchQueue:
    """The batches that are collected ahead of the trainer. All methods but `has`, `remove`, `state` and `restore` run
    in the event loop of the rollout thread."""

    def __init__(
        self, collect: Callable[[int], Awaitable[StepBatch]], weight_version: Callable[[], int], max_staleness: int
    ) -> None:
        self._collect = collect
        self._weight_version = weight_version
        self._max_staleness = max_staleness
        self._complete: dict[int, StepBatch] = {}
        self._next = 0  # the step whose batch is collected next
        self._last = -1  # the last step whose batch may be collected now
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    # ---- collecting ----

    def run_to(self, step: int) -> None:
        """Collects batches up to that of `step`, or of a later step that an earlier call named; returns at once."""
        self._last = max(self._last, step)
        if self._task is None and self._error is None and self._next <= self._last:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._next <= self._last:
                if self._next not in self._complete:
                    while self._weight_version() < self._next - self._max_staleness:
                        await self._changed.wait()
                    batch = await self._collect(self._next)
                    # No await between the two: a batch that is complete is never lost.
                    self._complete[self._next] = batch
                self._next += 1
                self.notify()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
        finally:
            self._task = None
            self.notify()

    def notify(self) -> None:
        """Everything that waits here looks again: a batch is complete, or the engines serve another version."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def get(self, step: int) -> StepBatch:
        """The batch of `step`, as soon as it is complete. It stays in the queue."""
        while step not in self._complete:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._complete[step]

    async def idle(self) -> None:
        """Returns when every batch that `run_to` asked for is complete."""
        while self._task is not None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def interrupt(self) -> None:
        if (task := self._task) is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def reject(self, step: int) -> StepBatch:
        """Removes the batch of `step`, which is collected again when it is asked for; later ones stay."""
        await self.interrupt()
        self._next = min(self._next, step)
        return self._complete.pop(step)

    # ---- from the main thread ----

    def has(self, step: int) -> bool:
        return step in self._complete

    def remove(self, step: int) -> None:
        """The trainer has made a step of this batch."""
        self._complete.pop(step, None)

    def state(self) -> list[dict[str, Any]]:
        """The complete batches. Call while nothing is collected."""
        return [self._complete[step].to_state() for step in sorted(self._complete)]

    def restore(self, state: list[dict[str, Any]], next_step: int) -> None:
        """`next_step`: the step after those that the trainer has."""
        self._complete = {batch.step: batch for batch in map(StepBatch.from_state, state)}
        self._next = next_step

    def remove_staler(self, limit: int) -> list[StepBatch]:
        """Returns the batches with tokens that are more than `limit` versions old. They are collected again."""
        stale = [batch for batch in self._complete.values() if batch.metrics["rollout/staleness_max"] > limit]
        return [self._complete.pop(batch.step) for batch in stale]


class RolloutDriver:
    def __init__(self, config: Config, observer: Observer | None = None, data: RunData | None = None) -> None:
        """Loads the tokenizer and, unless they are given, the prompts; `start` starts everything else."""
        from transformers import AutoTokenizer  # takes seconds, and the other ranks do without it

        tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
        data = data or load_run_data(config, tokenizer)
        self.config = config
        self.cursor = data.mixture(config)
        self.problems = data.evaluation
        self._progress = 0
        self.queue = BatchQueue(
            self._collect,
            lambda: max(self.engine.weight_version, self.sampler.unchanged_to),
            config.rollout.max_staleness,
        )
        self._observer = observer or NullObserver()
        self._responses = ResponseGrader(config.reward, tokenizer)
        self._function = load_rollout_function(config, tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)
        self._grading_fails = False  # in the last step, on more than a few responses
        self._operations: set[asyncio.Task[Any] | None] = set()  # that run
        self._opened = contextlib.AsyncExitStack()
        self._counted: dict[str, float] = {}
        self._tool_counts = Counter[str]()  # since the last batch
        self._engine: Engine | None = None
        self._sampler: Sampler | None = None
        self._teacher: Teacher | None = None

    # ---- start and close ----

    def start(self) -> Future[None]:
        """Starts the engine and the graders."""
        self._thread.start()
        return self.submit(self._open(), bounded=True)

    async def _open(self) -> None:
        logs = log_folder(self.config.trainer.run_dir)
        showing = asyncio.ensure_future(self._show_start(logs))
        try:
            self._engine = await open_engine(self.config.rollout, self.config.policy.model, logs)
        finally:
            showing.cancel()
        closing = self._opened
        closing.push_async_callback(self.close_engines)
        await self._responses.graders.open()
        closing.push_async_callback(self._responses.graders.close)
        closing.push_async_callback(close_shared)
        if self.config.algorithm.distillation.enabled:
            from megatron_dapo.engines.teacher import open_teacher

            self._teacher = await open_teacher(self.config.algorithm.distillation)
            closing.push_async_callback(self._teacher.close)
        self._sampler = Sampler(
            self._engine,
            self._responses.grade,
            self.cursor.next_prompt,
            self.config.rollout,
            groups_per_step=self.config.trainer.prompts_per_step,
            seed=self.config.trainer.seed,
            on_progress=self._observer.sampling,
            on_request=self._observer.request,
            on_decided=self.cursor.record,
            on_kept=None if self._teacher is None else self._teacher.begin,
            function=self._function,
        )
        closing.callback(self._sampler.close)

    async def _show_start(self, logs: Path) -> None:
        """Until cancelled: how long the engines have been starting, and what their log says."""
        started, limit = time.monotonic(), self.config.rollout.servers.start_timeout
        before = newest_line(logs)
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            line = newest_line(logs)
            self._observer.starting(time.monotonic() - started, limit, line if line != before else "")

    def close(self) -> None:
        """Ends what was started here, and nothing else. Never raises: a run that ends has its own outcome."""
        if not self._thread.is_alive():
            return
        closed = asyncio.run_coroutine_threadsafe(self._opened.aclose(), self._loop)
        closed.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        try:
            closed.result(CLOSE_SECONDS)
        except TimeoutError:  # the thread is a daemon; if it comes back, it still closes everything
            return _say(f"waited {CLOSE_SECONDS:g} s for the engines and graders to close; leaving them")
        except Exception as error:
            _say(f"the engines and graders did not close cleanly: {type(error).__name__}: {error}")
        self._thread.join(CLOSE_SECONDS)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        if left := asyncio.all_tasks(self._loop):  # a run that failed leaves operations
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))

    async def close_engines(self) -> None:
        """Ends the servers, and with them their GPU memory."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "it is not started, or closed"
        return self._engine

    # ---- operations ----

    def submit(self, work: Coroutine[Any, Any, T], *, bounded: bool = False) -> Future[T]:
        """Runs `work` in the rollout thread. `bounded` work has its own time limit: the running event loop alone counts
        as progress."""
        return asyncio.run_coroutine_threadsafe(self._operate(work, bounded), self._loop)

    async def _operate(self, work: Coroutine[Any, Any, T], bounded: bool) -> T:
        task = asyncio.current_task()
        self._operations.add(task)
        pulse = asyncio.ensure_future(self._pulse()) if bounded else None
        try:
            return await work
        finally:
            if pulse is not None:
                pulse.cancel()
            self._progress += 1
            self._operations.discard(task)

    async def _pulse(self) -> None:
        while True:
            self._progress += 1
            await asyncio.sleep(PULSE_SECONDS)

    async def stop(self) -> None:
        """Interrupts what is being collected. Nothing else runs afterwards, and `state` has everything of what was
        cancelled."""
        await self.queue.interrupt()
        others = [task for task in self._operations if task is not None and task is not asyncio.current_task()]
        if others and (await asyncio.wait(others, timeout=SETTLE_SECONDS))[1]:
            raise EngineError(f"waited {SETTLE_SECONDS:.0f} s for interrupted requests to return")

    async def poll(self, is_over: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not is_over():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(PULSE_SECONDS)
        return True

    # ---- sampling and evaluation ----

    def collect_to(self, step: int) -> None:
        """Collects batches up to that of `step` in the background, each as soon as it is admitted."""
        self._loop.call_soon_threadsafe(self.queue.run_to, step)

    async def batch(self, step: int) -> StepBatch:
        """The batch of `step`, when it is complete. It stays in the queue until it is removed."""
        batch = await self.queue.get(step)
        if self._teacher is not None:  # the batch is still in the queue, so an interruption loses nothing
            batch.metrics |= await self._teacher.score(batch.samples, self._advance)
        return batch

    async def reject(self, step: int) -> None:
        """The batch of `step` must not be trained on: its prompts are sampled again."""
        self.sampler.put_back(await self.queue.reject(step))

    @property
    def sampler(self) -> Sampler:
        assert self._sampler is not None, "start() comes first"
        return self._sampler

    @property
    def progress(self) -> int:
        return self._progress + (self._sampler.reports if self._sampler else 0)

    def _advance(self) -> None:
        self._progress += 1

    async def _collect(self, step: int) -> StepBatch:
        fault_points.reach("rollouts/before_collect")
        self.cursor.begin_step(step)
        async with watch_load(self.engine) as load:
            try:
                batch = await self.sampler.collect(step)
            except SamplingLimitError as error:
                self._add_texts(error.rejected.values())
                self._write_rejected(step + 1, error.rejected)
                raise
        batch.metrics |= {**self.cursor.metrics(batch), **load.metrics()}
        self._tool_counts.update(take_shared_metrics() if self._function is not None else {})
        batch.metrics, self._tool_counts = batch.metrics | self._tool_counts, Counter()
        self._add_texts([*batch.groups[: self.config.observe.samples_groups or None], *batch.rejected.values()])
        fault_points.reach("rollouts/after_collect")
        self._progress += 1
        return batch

    def _add_texts(self, shown: Iterable[Group]) -> None:
        self._responses.add_texts([sample for group in shown for sample in group.samples])

    def _write_rejected(self, step: int, rejected: dict[str, Group]) -> None:
        """The samples of a step that has no batch."""
        if self.config.observe.samples_every:
            samples = transcripts.choose(step, [], 0, self.config.observe.samples_responses, rejected=rejected)
            with contextlib.suppress(OSError):
                transcripts.write(Path(self.config.trainer.run_dir) / "samples", samples)

    async def evaluate(self, step: int, on_progress: Callable[[int, int], None]) -> Evaluation:
        def advance(done: int, total: int) -> None:
            self._progress += 1
            fault_points.reach("rollouts/evaluating")
            on_progress(done, total)

        seed = derive_seed(self.config.trainer.seed, step, "evaluation", 0)
        settings = self.config.resolved_evaluate
        before = self._reward_counts()
        self._tool_counts.update(take_shared_metrics())
        try:
            return await evaluate_sets(
                self.engine, self.problems, self._responses, settings, seed, advance, self._function
            )
        finally:  # what graders and tools did in it is not the next step's
            _ = take_shared_metrics(), self._take_reward_counts()
            self._counted = {name: value - before.get(name, 0.0) for name, value in self._counted.items()}

    def reward_metrics(self) -> dict[str, float]:
        """What the graders did since the last call: retries, restarts, errors, seconds."""
        found = self._take_reward_counts()
        ungraded, graded = (found.pop(f"reward/{name}") for name in ("ungraded", "graded"))
        before, total = self._grading_fails, ungraded + graded
        self._grading_fails = found["reward/errors"] > ERROR_SHARE * total
        if self._grading_fails and not before:
            error = self._responses.graders.last_error
            self._observer.warn(f"ungraded: {ungraded:g} of {total:g} responses; the grader's last error: {error}")
        return found

    def _take_reward_counts(self) -> dict[str, float]:
        found = self._reward_counts()
        self._counted = {name: self._counted.get(name, 0.0) + value for name, value in found.items()}
        return found

    def _reward_counts(self) -> dict[str, float]:
        now = self._responses.graders.metrics()
        names = [f"reward/{name}" for name in ("graded", "ungraded", "errors", "retries", "restarts", "seconds")]
        reasons = sorted(name for name in {**now, **self._counted} if name.startswith("reward/ungraded/"))
        return {name: now.get(name, 0.0) - self._counted.get(name, 0.0) for name in (*names, *reasons)}

    # ---- weights ----

    def load_weights(self, version: int, buckets: BucketStream) -> Future[None]:
        return self.submit(self.engine.load_weights(version, buckets), bounded=True)

    def serve_weights(self, version: int) -> Future[WeightReport]:
        return self.submit(self._serve_weights(version), bounded=True)

    def keep_weights(self, version: int) -> None:
        """The engine's weights are those of `version` as well."""
        self.sampler.unchanged_to = version
        self._loop.call_soon_threadsafe(self.queue.notify)

    async def _serve_weights(self, version: int) -> WeightReport:
        report = await self.engine.serve_weights(version)
        self.queue.notify()
        return report

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Call while nothing is being collected."""
        rollouts = {
            "cursor": self.cursor.state_dict(),
            "sampler": self.sampler.state(),
            "samples_per_prompt": self.config.rollout.samples_per_prompt,
            "max_staleness": self.config.rollout.max_staleness,
            "reward": self._reward_counts(),  # of the step that is not recorded yet
        }
        return {"rollouts": rollouts, "batches": self.queue.state()}

    def check(self, state: dict[str, Any], batches: list[dict[str, Any]]) -> None:
        """Raises where `restore`, or a step with a saved batch, would fail. Before `start`."""
        rollouts = state["rollouts"]
        self.cursor.load_state_dict(rollouts["cursor"])
        self._check_group_size(rollouts)
        CarryOver.from_state(rollouts["sampler"])
        dict(rollouts["reward"])
        for saved in [*state["batches"], *batches]:
            batch = StepBatch.from_state(saved)
            shaped, _ = shape_batch(batch, self.config)
            if not np.isfinite(shaped.advantages).all():
                raise ValueError(f"the batch of step {batch.step + 1} has advantages that are not finite")

    def restore(self, state: dict[str, Any], next_step: int) -> None:
        """`next_step`: the step after those that are trained or being trained."""
        rollouts, limit = state["rollouts"], self.config.rollout.max_staleness
        self.queue.restore(state["batches"], next_step)
        self.cursor.load_state_dict(rollouts["cursor"])
        self._check_group_size(rollouts)
        lowered = rollouts.get("max_staleness", 0) > limit  # what is staler now is generated again
        # The groups of an interrupted step are then carried over to it, which drops those that are too stale.
        self.sampler.restore(rollouts["sampler"] | ({"interrupted": None} if lowered else {}))
        if lowered and (stale := self.queue.remove_staler(limit)):
            for batch in stale:
                self.sampler.put_back(batch)
            self._observer.warn(f"rollout.max_staleness was lowered to {limit}; batches generated again: {len(stale)}")
        self._counted = {name: -value for name, value in rollouts["reward"].items()}

    def _check_group_size(self, state: dict[str, Any]) -> None:
        ours, saved = self.config.rollout.samples_per_prompt, state["samples_per_prompt"]
        carried_over = len(state["sampler"]["surplus"]) + len(state["sampler"]["unfinished"])
        if saved != ours and carried_over:
            raise ConfigError(
                f"rollout.samples_per_prompt is {ours}, but the checkpoint carries over {carried_over} groups of "
                f"{saved} samples: use {saved}, or start another run_dir"
            )


def newest_line(logs: Path) -> str:
    """The last line of the server log that was written to last; empty if there is none."""
    try:
        log = max(logs.glob("server-*.log"), key=lambda path: path.stat().st_mtime)
        lines = read_end(log, 4096).decode(errors="replace").splitlines()
    except (OSError, ValueError):  # no log yet
        return ""
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def _say(text: str) -> None:
    print(f"megatron-dapo: {text}", file=sys.stderr, flush=True)
