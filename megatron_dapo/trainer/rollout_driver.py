"""Rank 0's way to the engines: a thread with an event loop, in which sampling, grading and weight updates run.

The main thread trains; it starts a coroutine here and gets a future. So the next batch can be generated while this
one trains (`rollout.max_staleness: 1`), and every wait of the main thread can be watched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from transformers import AutoTokenizer

from megatron_dapo.config import Config
from megatron_dapo.data import PromptCursor, load_prompts
from megatron_dapo.engines.factory import open_engine
from megatron_dapo.engines.protocol import Bucket, Engine, WeightReport, derive_seed
from megatron_dapo.evaluate import EvalResult, evaluate
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.rollout.accounting import Progress
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.trainer.watchdog import log_folder
from megatron_dapo.types import StepBatch

T = TypeVar("T")
CLOSE_SECONDS = 120.0
SETTLE_SECONDS = 300.0


class Rollouts:
    def __init__(self, config: Config, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.config = config
        tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
        self.prompts = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
        self.cursor = PromptCursor(self.prompts, config.trainer.seed)
        self.problems = (
            load_prompts(config.evaluate.data, tokenizer, config.rollout.max_prompt_tokens)
            if config.evaluate.data.path
            else None
        )
        self._decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
        self._on_progress = on_progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._idle = asyncio.Event()
        self._idle.set()
        self._complete: StepBatch | None = None
        self._counted: dict[str, float] = {}
        self._engine: Engine | None = None
        self._pool: RewardPool | None = None
        self._sampler: Sampler | None = None

    # ---- life ----

    def start(self) -> Future[None]:
        """Starts the engine and the graders."""
        self._thread.start()
        return self._submit(self._open())

    async def _open(self) -> None:
        logs = log_folder(self.config.trainer.run_dir)
        self._engine = await open_engine(self.config.rollout, self.config.policy.model, logs)
        self._pool = await RewardPool(self.config.reward).__aenter__()
        self._sampler = Sampler(
            self._engine,
            self._pool.grade,
            lambda: self.cursor.take(1)[0],
            self.config.rollout,
            groups_per_step=self.config.trainer.prompts_per_step,
            seed=self.config.trainer.seed,
            decode=self._decode,
            on_progress=self._on_progress,
        )

    def close(self) -> None:
        """Ends what was started here, and nothing else."""
        if not self._thread.is_alive():
            return
        try:
            self._submit(self._close()).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)

    async def _close(self) -> None:
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)
        if self._engine is not None:
            await self._engine.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- work ----

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    @property
    def sampler(self) -> Sampler:
        assert self._sampler is not None, "start() comes first"
        return self._sampler

    def collect(self, step: int) -> Future[StepBatch]:
        """Cancelling the future cuts the batch short: what was sampled so far is then in `state`, see `settle`."""
        return self._submit(self._collect(step))

    async def _collect(self, step: int) -> StepBatch:
        self._idle.clear()
        try:
            self._complete = await self.sampler.collect(step)
            return self._complete
        finally:
            self._idle.set()

    def settle(self, step: int) -> StepBatch | None:
        """Waits until the cancelled batch of this step has put everything into the sampler's state. Returns it where
        it was complete before it could be cut: then it is the caller's to keep."""
        self._submit(self._idle.wait()).result(SETTLE_SECONDS)
        return self._complete if self._complete is not None and self._complete.step == step else None

    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Future[WeightReport]:
        return self._submit(self.engine.update_weights(version, buckets))

    def release_memory(self) -> Future[None]:
        return self._submit(self.engine.release_memory())

    def evaluate(self, step: int, progress: Callable[[int, int], None] | None = None) -> Future[EvalResult]:
        assert self.problems is not None and self._pool is not None
        seed = derive_seed(self.config.trainer.seed, step, "evaluation", 0)
        settings = self.config.resolved_evaluate
        return self._submit(evaluate(self.engine, self.problems, self._pool, settings, seed, progress))

    def reward_metrics(self) -> dict[str, float]:
        """What the graders needed since the last call: retries, restarts, errors, seconds."""
        found = self._reward_counts()
        self._counted = {name: self._counted.get(name, 0.0) + value for name, value in found.items()}
        return found

    def _reward_counts(self) -> dict[str, float]:
        assert self._pool is not None
        now = self._pool.metrics()
        names = ("reward/errors", "reward/retries", "reward/restarts", "reward/seconds")
        return {name: now[name] - self._counted.get(name, 0.0) for name in names}

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Call while nothing is being collected."""
        return {
            "cursor": self.cursor.state_dict(),
            "sampler": self.sampler.state(),
            "reward": self._reward_counts(),  # of the step that is not yet observed
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state["cursor"])
        self.sampler.restore(state["sampler"])
        self._counted = {name: -value for name, value in state.get("reward", {}).items()}
