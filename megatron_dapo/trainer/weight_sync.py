"""Weight sync, driven by the main thread: every rank's shards become buckets, and the engines load and serve them.

    send    all ranks produce the buckets, the engines load them; on return no bucket is in use any more
    serve   the engines take memory for their KV cache, check the version and serve it

Between the two a trainer that shares GPUs with the engines offloads its weights (`Colocation`). Rank 0 drives the
engines. Other ranks send buckets of their own where `rollout.weights.senders` or engines on several nodes ask for it.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_dapo import fault_points
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.engines.protocol import WeightReport
from megatron_dapo.engines.sglang.weight_proof import checksums_of
from megatron_dapo.policy.policy import Policy
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.gather import WeightBuckets
from megatron_dapo.sync.remote_sender import RemoteSender, SenderLink
from megatron_dapo.trainer.collectives import Collectives

if TYPE_CHECKING:
    from megatron_dapo.trainer.rollout_driver import RolloutDriver


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
            stream.wait_until_opened()
        self._collectives.arrive()  # engines may need long until they read: nobody waits for that inside a bucket
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


def describe(report: WeightReport) -> str:
    moving = report.seconds - report.parts.get("memory", 0.0)
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.parts.items())
    return (
        f"weights: {report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s"
        f"{f' ({parts})' if parts else ''}, {report.bytes / max(moving, 1e-9) / 1e9:.1f} GB/s without taking memory "
        f"back; {report.proof}"
    )
