"""The rollouts of a run, as the loop sees them: rank 0 has the driver, all other ranks only wait for it.

Every method is called by all ranks, in the same order, and returns when rank 0's part of it is done. Its result is
rank 0's; the others get None. An error of the driver is a `DriverError` on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_dapo import fault_points
from megatron_dapo.config import Config
from megatron_dapo.data import RunData
from megatron_dapo.engines.protocol import WeightReport
from megatron_dapo.evaluation import Evaluation
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.trainer.weight_sync import WeightSync, weight_buckets
from megatron_dapo.types import StepBatch

T = TypeVar("T")


class Rollouts:
    def __init__(self, config: Config, collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives
        self._observer: Observer = NullObserver()
        self._driver: RolloutDriver | None = None  # rank 0
        self._starting: Future[None] | None = None  # rank 0
        self._weights: WeightSync | None = None
        self.served_version: int | None = None  # by the engines
        self.sampling = False  # whether the trainer waits for a batch, or computes with it and has not removed it

    def wait_for(
        self,
        doing: str,
        work: Callable[[RolloutDriver], Coroutine[Any, Any, T]],
        *,
        stoppable: bool = False,
        bounded: bool = False,
    ) -> T | None:
        """Rank 0's driver does the work, and all ranks wait for its end. `bounded`: it has its own time limit."""
        future = None if self._driver is None else self._driver.submit(work(self._driver), bounded=bounded)
        return self._collectives.wait(future, doing, stoppable=stoppable)

    # ---- start and end ----

    def open(self, observer: Observer, data: RunData | None) -> None:
        """Rank 0 only: loads the tokenizer and, unless they are given, the prompts."""
        self._observer = observer
        self._driver = self._collectives.driver = RolloutDriver(self._config, observer, data)

    def start(self) -> None:
        """Begins to start the engines and the graders."""
        if self._driver is not None:
            self._starting = self._driver.start()

    def await_start(self) -> None:
        self._collectives.wait(self._starting, "starting the engines", stoppable=True)

    def close_engines(self) -> None:
        """Ends the servers, and with them their GPU memory, before the rest."""
        self.wait_for("closing the engines", RolloutDriver.close_engines, bounded=True)

    def close(self) -> None:
        """Does not wait for other ranks, and may be called twice."""
        if self._driver is not None:
            self._driver.close()

    # ---- batches ----

    def sample(self, step: int) -> StepBatch | None:
        """The batch of `step`, which stays here until `remove_batch`."""
        with self._observer.phase("rollout"):
            has_batch = self._collectives.agree(self._driver is not None and self._driver.queue.has(step))
            self.sampling = self.sampling or not has_batch
            self._collect_to(step)
            return self.wait_for(
                f"sampling the batch of step {step}", lambda driver: driver.batch(step), stoppable=True
            )

    def remove_batch(self, step: int) -> None:
        """The trainer has made a step of it."""
        self.sampling = False
        if self._driver is not None:
            self._driver.queue.remove(step)

    def reject_batch(self, step: int) -> None:
        """It must not be trained on; `sample` collects it again."""
        self.wait_for(f"rejecting the batch of step {step}", lambda driver: driver.reject(step))

    def collect_ahead(self, step: int) -> None:
        """While `step` is trained, the engines generate what `rollout.max_staleness` admits. Not after a resume in the
        middle of a step: the weights of its beginning, which the engines must serve, do not exist any more."""
        rollout, last = self._config.rollout, self._config.trainer.steps - 1
        if rollout.max_staleness and self.served_version is not None:
            self._collect_to(last if rollout.in_flight else min(last, step + rollout.max_staleness))

    def _collect_to(self, step: int) -> None:
        if self._driver is not None:
            self._driver.collect_to(step)

    def await_ahead(self, step: int) -> None:
        """Unless weights change in flight, batches belong to the weights they were started with: they are complete
        before these change."""
        rollout = self._config.rollout
        if not rollout.max_staleness or rollout.in_flight or step >= self._config.trainer.steps:
            return
        with self._observer.phase("rollout"):
            fault_points.reach("loop/before_await_ahead")
            self.wait_for(f"sampling ahead of step {step}", lambda driver: driver.queue.idle(), stoppable=True)

    @contextlib.contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """The engines generate nothing for a batch meanwhile; what it has so far is part of the state."""
        if self._config.rollout.in_flight:
            self.wait_for("interrupting the rollouts", lambda driver: driver.queue.interrupt())
        yield
        if self._config.rollout.in_flight:
            self.collect_ahead(step)

    def stop(self) -> None:
        """For the last save: nothing runs any more, and everything that was interrupted is in `state`."""
        self.wait_for("interrupting the rollouts", RolloutDriver.stop)

    def wait_until(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Rank 0 asks again and again, all ranks wait; False: it was not over after `seconds`."""
        over = self.wait_for(
            "waiting for room on the disk", lambda d: d.poll(is_over, seconds), stoppable=True, bounded=True
        )
        return self._collectives.agree(bool(over))

    def reward_metrics(self) -> dict[str, float]:
        """What the graders did since the last call."""
        return {} if self._driver is None else self._driver.reward_metrics()

    def evaluate(self, step: int) -> Evaluation | None:
        doing = f"evaluating after step {step}"
        with self._observer.phase("evaluate") as phase, self.paused(step):
            return self.wait_for(doing, lambda driver: driver.evaluate(step, phase.update), stoppable=True)

    # ---- weights and memory ----

    def connect(self, policy: Policy) -> None:
        """Before the first weights are sent: plans the buckets."""
        buckets = weight_buckets(policy, self._config)
        self._weights = WeightSync(buckets, self._collectives, self._config.rollout.weights.timeout)

    def load_weights(self, version: int) -> None:
        """The engines have all weights afterwards, and no bucket is in use any more."""
        assert self._weights is not None, "connect() comes first"
        self._weights.send(version, self._driver)

    def serve_weights(self, version: int) -> WeightReport | None:
        assert self._weights is not None, "connect() comes first"
        report = self._weights.serve(version, self._driver)
        self.served_version = version
        return report

    def keep_weights(self, version: int) -> None:
        """The engines' weights are those of `version` as well: nothing has changed."""
        self.served_version = version
        if self._driver is not None:
            self._driver.keep_weights(version)

    def release_memory(self) -> None:
        doing = "waiting until the engines release their GPU memory"
        self.wait_for(doing, lambda driver: driver.engine.release_memory(), bounded=True)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Call while nothing is being collected."""
        return {} if self._driver is None else self._driver.state()

    def check(self, state: dict[str, Any], batches: list[dict[str, Any]]) -> None:
        """Rank 0 only: raises where `restore`, or a step with one of the saved batches or of `batches`, would fail."""
        assert self._driver is not None
        self._driver.check(state, batches)

    def restore(self, state: dict[str, Any], next_step: int) -> None:
        """`next_step`: the step after those that are trained or being trained."""
        if self._driver is not None:
            self._driver.restore(state, next_step)
