"""The rollouts of a run, as the loop sees them: rank 0 has the driver, all other ranks only wait for it.

Every method is called by all ranks, in the same order, and returns when rank 0's part of it is done. Its result is
rank 0's; the others get None. An error of the driver is a `DriverError` on every rank.

Weights go to the engines in two calls (`WeightSync`). `send`: all ranks produce the buckets, and the engines load them.
`serve`: the engines take memory for their KV cache, check the version and serve it. Between the two a trainer that
shares GPUs with the engines offloads its weights (`Colocation`). Ranks other than 0 send buckets of their own where
`rollout.weights.senders` or engines on several nodes ask for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from megatron_dapo import fault_points
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.data import RunData
from megatron_dapo.engines.protocol import WeightReport
from megatron_dapo.engines.sglang.weight_proof import checksums_of
from megatron_dapo.evaluation import Evaluation
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.policy import Policy
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.gather import WeightBuckets
from megatron_dapo.sync.remote_sender import RemoteSender, SenderLink
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.trainer.signals import Stopped
from megatron_dapo.types import StepBatch

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.engine import SGLangEngine

T = TypeVar("T")


def weight_buckets(policy: Policy, config: Config) -> WeightBuckets:
    """Collective. The buckets of this run: who owns them, and which ranks hand them to engines."""
    rollout, weights = config.rollout, config.rollout.weights
    if rollout.sends_adapters:
        return policy.adapter_buckets()
    nodes = ranks_by_node() if rollout.engines_read_memory else []
    several = len(nodes) > 1
    if several:
        _check_servers(rollout.servers.server_count, nodes, weights.keep_snapshot)
    return policy.weight_buckets(
        weights.bucket_bytes,
        senders=weights.senders if several or rollout.broadcasts_weights else "one",
        nodes=nodes if several else (),
        keep_memory=not rollout.servers.share_gpus,
        quantization=weights.quantization,
    )


def ranks_by_node() -> list[list[int]]:
    """Collective. The ranks of each node, in rank order."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, f"{socket.gethostname()}/{os.environ.get('SLURM_NODEID', '')}")
    return [[rank for rank, name in enumerate(names) if name == node] for node in dict.fromkeys(names)]


def _check_servers(servers: int, nodes: list[list[int]], keep_snapshot: bool) -> None:
    if keep_snapshot:
        raise ConfigError(
            f"the trainer is on {len(nodes)} nodes, and with this rollout.weights.transport no rank has all weights: "
            "set rollout.weights.keep_snapshot to false"
        )
    if servers % len(nodes):
        raise ConfigError(
            f"{servers} servers cannot be on {len(nodes)} trainer nodes, the same number on each, as this "
            "rollout.weights.transport needs: list them node by node in rollout.servers.urls, or use disk"
        )


class WeightSync:
    """Every method is called by all ranks, in the same order; ranks other than 0 pass None for `rollouts`."""

    def __init__(self, buckets: WeightBuckets, collectives: Collectives, timeout: float = 600.0) -> None:
        """`timeout`: of one transfer to the engines (rollout.weights.timeout)."""
        self._buckets = buckets
        self._collectives = collectives
        self._timeout = timeout
        self._remote = RemoteSender(checksums_of)
        self._updates = 0
        self._store: dist.Store | None = None
        if buckets.has_remote_senders:
            # A connection of its own: a wait would block other users of the trainer's.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def send(self, version: int, rollouts: RolloutDriver | None) -> None:
        """Every server that works has all weights afterwards. Raises DriverError if none has."""
        self._updates += 1
        buckets, link, loading = self._buckets.buckets(), self._link(), None
        stream = BucketStream(link)
        if rollouts is not None:
            loading = rollouts.load_weights(version, stream)
            loading.add_done_callback(stream.close)
        try:  # engines may need long until they read: nobody waits for that inside a bucket
            opened = stream.opened if rollouts is not None else None
            self._collectives.wait(opened, f"waiting for a server that takes weight version {version}", stoppable=True)
        except Stopped:
            if loading is not None:
                loading.cancel()
            raise
        self._collectives.arrive()  # nor for a late rank
        if rollouts is not None:
            stream.fill(buckets)
        elif link is not None:
            self._remote.send(buckets, link)  # rank 0 learns of an error and raises it for all
        else:
            for _ in buckets:  # takes part in every bucket, so that the owners receive their shards
                pass
        self._collectives.wait(loading, f"sending weight version {version} to the engines")

    def _link(self) -> SenderLink | None:
        if self._store is None:
            return None
        rank = self._collectives.runtime.rank
        return SenderLink(self._store, rank, self._buckets.senders, self._updates, self._timeout)

    def serve(self, version: int, rollouts: RolloutDriver | None) -> WeightReport | None:
        """The engines serve `version` afterwards. Raises DriverError if none does."""
        fault_points.reach("sync/before_serve")
        serving = rollouts.serve_weights(version) if rollouts is not None else None
        return self._collectives.wait(serving, f"waiting until the engines serve weight version {version}")


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
                f"sampling the batch of step {step + 1}", lambda driver: driver.batch(step), stoppable=True
            )

    def remove_batch(self, step: int) -> None:
        """The trainer has made a step of it."""
        self.sampling = False
        if self._driver is not None:
            self._driver.queue.remove(step)

    def reject_batch(self, step: int) -> None:
        """It must not be trained on; `sample` collects it again."""
        self.wait_for(f"rejecting the batch of step {step + 1}", lambda driver: driver.reject(step))

    def collect_ahead(self, step: int) -> None:
        """While `step` is trained, the engines generate what `rollout.max_staleness` and kept weights admit. Not after
        a resume in the middle of a step: the weights of its beginning, which the engines must serve, do not exist any
        more."""
        rollout, last = self._config.rollout, self._config.trainer.steps - 1
        if self.served_version is not None and (ahead := max(rollout.max_staleness, self.served_version - step)):
            self._collect_to(last if rollout.in_flight else min(last, step + ahead))

    def _collect_to(self, step: int) -> None:
        if self._driver is not None:
            self._driver.collect_to(step)

    def await_ahead(self, step: int) -> None:
        """Unless weights change in flight, batches belong to the weights they were started with: they are complete
        before these change."""
        rollout = self._config.rollout
        ahead = rollout.max_staleness or self.served_version == step
        if not ahead or rollout.in_flight or step >= self._config.trainer.steps:
            return
        with self._observer.phase("rollout"):
            fault_points.reach("loop/before_await_ahead")
            self.wait_for(f"sampling ahead of step {step + 1}", lambda driver: driver.queue.idle(), stoppable=True)

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

    def shared_base(self) -> dict[str, str] | None:
        """`SGLangEngine.shared_base`, of the one rank."""
        doing = "mapping the engine's weights"
        return self.wait_for(doing, lambda driver: cast("SGLangEngine", driver.engine).shared_base())

    def connect(self, policy: Policy) -> None:
        """Before the first weights are sent: plans the buckets."""
        buckets = weight_buckets(policy, self._config)
        self._weights = WeightSync(buckets, self._collectives, self._config.rollout.weights.timeout)

    def load_weights(self, version: int) -> None:
        """The engines have all weights afterwards, and no bucket is in use any more."""
        assert self._weights is not None, "connect() comes first"
        fault_points.reach("loop/before_sync")
        self._weights.send(version, self._driver)

    def serve_weights(self, version: int) -> WeightReport | None:
        assert self._weights is not None, "connect() comes first"
        report = self._weights.serve(version, self._driver)
        self.served_version = version
        return report

    def keep_weights(self, version: int) -> None:
        """`version` has the weights of the one before it: no group ages, and engines that keep them serve it."""
        if self.served_version is not None and not self._config.rollout.shares_gpus:
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
