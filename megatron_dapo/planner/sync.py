"""The time of a weight update, from the same steps as the code: gather, send, load, prove; a snapshot beside them.

Buckets pass through gather, send and load one after the other. Different buckets are in different stages at the same
time, so the slowest stage decides; but an engine that receives a broadcast loads it before it receives the next. A
sender has two blocks of memory, so the snapshot of the last two buckets delays nothing. What comes on top:

- fixed: pause, labels, cache flush, resume, and the proof, once per update
- names: SGLang looks every tensor's name up, and searches a list of 3 × experts for each tensor of an expert. With
  `weights.pack_experts` a run of experts in a bucket has one name, and needs no search.

- distributed: every bucket is one broadcast from its sender to all engine GPUs. Engines take one bucket at a time, so
  more senders do not add bandwidth. They remove the traffic between pipeline stages (senders: stage) or expert-parallel
  ranks (expert_group), and gather while another one sends.
- tensor: engines copy from the trainer's memory on the same GPU or node. On several nodes each bucket first goes to one
  rank of each node, in turn, so a GPU receives 1 / (GPUs of a node) of the model.
- fp8 (`weights.quantization`): half of the bytes, but a second tensor, the scales, for every matrix.
- disk: written once, then read by every node of engines at the same time.
- adapter: only LoRA's adapter; each server computes its SHA-256 and goes on generating before and after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.assumptions import GIB
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.parameters import adapter_parameters, count_parameters


@dataclass(frozen=True, slots=True)
class SyncTime:
    """Seconds. `gather`, `send`, `load` and `snapshot` overlap, except that a broadcast (`serial`) and its load do not;
    `names` and `fixed` are added."""

    bytes: float
    tensors: int
    senders: int
    gather: float
    send: float
    load: float
    snapshot: float
    names: float
    fixed: float
    serial: bool = False

    @property
    def total(self) -> float:
        engine = self.send + self.load if self.serial else max(self.send, self.load)
        return max(self.gather, engine, self.snapshot) + self.names + self.fixed

    def describe(self) -> str:
        parts = {name: getattr(self, name) for name in ("gather", "send", "load", "snapshot", "names", "fixed")}
        shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items() if seconds >= 0.005)
        senders = f"{self.senders} sender{'s' if self.senders > 1 else ''}"
        return f"{self.bytes / GIB:.1f} GiB in {self.tensors:,} tensors from {senders}: {shown}"


def sent(shape: ModelShape, weights: WeightTransportConfig) -> tuple[float, int]:
    """Bytes and tensors of an update."""
    found = count_parameters(shape)
    size, tensors = 2.0 * found.total, found.tensors
    if weights.quantization == "none":
        return size, tensors
    # One byte each, and a scale for each block.
    return size - found.quantised * (1 - 4 / 128**2), tensors + found.quantised_tensors


def adapter_size(shape: ModelShape, policy: PolicyConfig) -> tuple[float, int]:
    """Bytes and tensors of LoRA's adapter in a dense model."""
    whole = policy.model_copy(update={"tensor_parallel": 1})
    parameters = sum(adapter_parameters(shape, whole, stage).total for stage in range(policy.pipeline_parallel))
    return 2.0 * parameters, 2 * shape.layers * (len(policy.lora.targets) or 7)


def count_names(shape: ModelShape, weights: WeightTransportConfig) -> tuple[int, int]:
    """Names that SGLang looks up in an update: those of experts, which it searches for, and the others, at most."""
    size, tensors = sent(shape, weights)
    if not shape.is_moe:
        return 0, tensors
    kinds = 1 if weights.quantization == "none" else 2  # weights, and scales
    experts, buckets = 3 * shape.experts * shape.moe_layers, math.ceil(size / weights.bucket_bytes)
    others = tensors - kinds * experts
    if not weights.pack_experts:
        return kinds * experts, others
    return 0, others + kinds * min(experts, shape.layers + buckets)  # a bucket ends a run, and so does a layer


def count_senders(shape: ModelShape, policy: PolicyConfig, weights: WeightTransportConfig) -> int:
    if weights.senders == "one":
        return 1
    experts = policy.expert_parallel if shape.is_moe and weights.senders == "expert_group" else 1
    return policy.pipeline_parallel * experts


def sync_time(
    shape: ModelShape,
    policy: PolicyConfig,
    weights: WeightTransportConfig,
    cluster: Cluster,
    engine_nodes: int,
    engine_tensor_parallel: int = 1,
) -> SyncTime:
    fixed = assumptions.PAUSE_SECONDS
    if weights.transport == "adapter":
        size, tensors = adapter_size(shape, policy)
        return SyncTime(size, tensors, 1, 0.0, 0.0, size / assumptions.SHA256_BYTES_PER_SECOND, 0.0, 0.0, fixed)
    size, tensors = sent(shape, weights)
    senders = count_senders(shape, policy, weights)
    searched, found = count_names(shape, weights)
    search = assumptions.SECONDS_PER_EXPERT_NAME + assumptions.SECONDS_PER_NAME_COMPARED * 3 * shape.experts / 2
    lookups = assumptions.SECONDS_PER_NAME * found + search * searched
    if weights.transport == "disk":
        one = size / assumptions.DISK_BYTES_PER_SECOND
        all_ = engine_nodes * size / assumptions.DISK_TOTAL_BYTES_PER_SECOND
        return SyncTime(size, tensors, 1, 0.0, one + max(one, all_), 0.0, 0.0, 0.0, fixed)
    network = cluster.gpu.network * 1e9 * assumptions.WIRE_SHARE
    nvlink = cluster.gpu.nvlink * 1e9 * assumptions.WIRE_SHARE
    # Shards travel to their sender: inside a tensor-parallel group by NVLink; from other stages and expert-parallel
    # ranks through the network where they are on other nodes.
    whole, tp = 2.0 * count_parameters(shape).total, policy.tensor_parallel
    gather = whole * (tp - 1) / tp / senders / nvlink
    apart = policy.pipeline_parallel * (policy.expert_parallel if shape.is_moe else 1) / senders
    if apart > 1:
        wire = network if cluster.trainer_gpus > cluster.gpus_per_node else nvlink
        gather += whole / senders * (1 - 1 / apart) / wire
    # Each sender keeps its own part.
    copied = max(0.0, size / senders - 2 * weights.bucket_bytes) if weights.keep_snapshot else 0.0
    snapshot = copied / assumptions.SNAPSHOT_BYTES_PER_SECOND
    load = size / engine_tensor_parallel / assumptions.LOAD_BYTES_PER_SECOND  # each engine GPU copies its own shards
    if weights.transport == "tensor":
        several = cluster.trainer_gpus > cluster.gpus_per_node
        received = size / cluster.gpus_per_node / network  # by one GPU; buckets go to the node's GPUs in turn
        send = max(received, size / senders / network) if several else 0.0
    else:
        send = size / min(network if cluster.gpus > cluster.gpus_per_node else nvlink, assumptions.BROADCAST_LIMIT)
    serial = weights.transport == "distributed"
    return SyncTime(size, tensors, senders, gather, send, load, snapshot, lookups, fixed, serial)


def buffer_bytes(shape: ModelShape, precision: str, weights: WeightTransportConfig, cluster: Cluster) -> float:
    """GPU memory of a sender: two buckets, and not the shards of one from other ranks, which it frees."""
    size = 4 if precision == "fp32" else 2
    largest = size * shape.vocab * shape.hidden  # a parameter that is larger than a bucket is one of its own
    bucket = min(size * count_parameters(shape).total, max(weights.bucket_bytes, largest))
    passed_on = weights.transport == "tensor" and cluster.trainer_gpus > cluster.gpus_per_node  # to other nodes
    # What is passed on has a third block, and so has what is quantised. The other two are smaller then, but not always.
    return bucket * (2 + passed_on + (weights.quantization != "none"))
