"""Weight sync, driven by the main thread: every rank's shards become buckets, and the engines load and serve them.

    send    all ranks produce the buckets, rank 0's engines load them; on return no bucket is in use any more
    serve   the engines take memory for their KV cache, check the version and serve it

Between the two a trainer that shares GPUs with the engines offloads its weights (`Colocation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_dapo import fault_points
from megatron_dapo.engines.protocol import Bucket, WeightReport
from megatron_dapo.trainer.caller_thread import CallerThread
from megatron_dapo.trainer.collectives import BEAT_SECONDS, Collectives
from megatron_dapo.weights.sync import WeightBuckets, discard

if TYPE_CHECKING:
    from megatron_dapo.trainer.rollout_driver import RolloutDriver


class WeightSync:
    """Every method is called by all ranks, in the same order; ranks other than 0 pass None for `rollouts`."""

    def __init__(self, buckets: WeightBuckets, collectives: Collectives) -> None:
        self._buckets, self._collectives = buckets, collectives

    def send(self, version: int, rollouts: RolloutDriver | None) -> None:
        """Every server that works has all weights afterwards. Raises DriverError if none has."""
        buckets = _Buckets(self._buckets.buckets())
        loading, caller = None, CallerThread()
        if rollouts is not None:
            loading = rollouts.load_weights(version, buckets, caller)
            loading.add_done_callback(caller.wake)
            while not caller.run(until=lambda: buckets.exhausted or loading.done(), timeout=BEAT_SECONDS):
                pass  # a bucket is a collective, with its own timeout; the engine's request has one, too
        discard(buckets)  # on rank 0 nothing is left, unless the engine gave up early: the other ranks still send
        self._collectives.wait(loading, f"sending weight version {version} to the engines", caller=caller)

    def serve(self, version: int, rollouts: RolloutDriver | None) -> WeightReport | None:
        """The engines serve `version` afterwards. Raises DriverError if none does."""
        fault_points.reach("sync/before_serve")
        serving = rollouts.serve_weights(version) if rollouts is not None else None
        return self._collectives.wait(serving, f"waiting until the engines serve weight version {version}")


class _Buckets:
    """An iterator that knows whether it has been read to its end."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self._buckets, self.exhausted = buckets, False

    def __iter__(self) -> Iterator[Bucket]:
        return self

    def __next__(self) -> Bucket:
        fault_points.reach("sync/before_bucket")
        try:
            return next(self._buckets)
        except StopIteration:
            self.exhausted = True
            raise


def describe(report: WeightReport) -> str:
    rate = report.bytes / report.seconds / 1e9
    return (
        f"weights: {report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s ({rate:.1f} GB/s); "
        f"{report.proof}"
    )
