"""Memory of an engine: whether it fits at its tensor-parallel size, and how many tokens its KV cache holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.planner.assumptions import DEFAULT_FRACTION, ENGINE_OVERHEAD_BYTES
from megatron_dapo.planner.generation import Fleet
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.server_model import decode_model, kv_bytes
from megatron_dapo.planner.workload import Workload

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Sizes are bytes per GPU unless stated otherwise."""

    tensor_parallel: int
    servers: int
    weights: float
    kv_per_token: float
    kv_room: float  # bytes left for the KV cache
    running: int  # sequences that one server decodes at once, at the mean length
    longest: int
    external: int = 0  # external servers

    @property
    def kv_tokens(self) -> int:
        """Tokens that one server's KV cache holds."""
        return max(0, int(self.kv_room / self.kv_per_token))

    @property
    def fits(self) -> bool:
        """An engine must hold one sequence of the maximum length."""
        return self.kv_tokens >= self.longest


def plan_engine(
    shape: ModelShape, rollout: RolloutConfig, cluster: Cluster, work: Workload, occupied: float = 0.0, tp: int = 0
) -> EnginePlan:
    """`occupied`: bytes that the trainer keeps on the same GPU while the engine generates. `tp` 0: as configured."""
    tp = tp or rollout.servers.tensor_parallel
    size = DTYPE_BYTES.get(rollout.servers.dtype, 2)
    weights = count_parameters(shape).total * weight_bytes(rollout) / tp
    kv_per_token = kv_bytes(shape, tp, size)
    fraction = memory_fraction(rollout.servers.arguments)
    memory = cluster.gpu.memory
    room = min(fraction * memory, memory - occupied - ENGINE_OVERHEAD_BYTES) - weights
    tokens = max(0.0, room / kv_per_token)
    held = work.mean_prompt + work.lengths.held
    external = len(rollout.servers.urls)
    servers = external or (cluster.engine_gpus or cluster.gpus) // tp
    share = -(-work.generated // max(1, servers))
    return EnginePlan(
        tensor_parallel=tp,
        servers=servers,
        weights=weights,
        kv_per_token=kv_per_token,
        kv_room=max(0.0, room),
        running=max(1, min(rollout.servers.max_running, int(tokens / held), share)),
        longest=work.longest,
        external=external,
    )


def weight_bytes(rollout: RolloutConfig) -> float:
    """Of one parameter in an engine."""
    quantised = rollout.weights.quantization != "none"
    return 1.0 if quantised else DTYPE_BYTES.get(rollout.servers.dtype, 2)


def hands_over(rollout: RolloutConfig) -> bool:
    """Whether colocated engines release their memory to the trainer: configured, or no share of it is configured."""
    return rollout.servers.share_gpus or rollout.servers.need_own_gpus


def memory_fraction(arguments: list[str]) -> float:
    """`--mem-fraction-static X` among the server's arguments, as two items or with an equals sign."""
    number = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    found = re.search(rf"(?:^| )--mem-fraction-static[ =]{number}(?= |$)", " ".join(arguments))
    return float(found[1]) if found else DEFAULT_FRACTION


def fleet_of(shape: ModelShape, engine: EnginePlan, rollout: RolloutConfig, cluster: Cluster) -> Fleet:
    """The engines as a queueing model."""
    sizes = DTYPE_BYTES.get(rollout.servers.dtype, 2), weight_bytes(rollout)
    decode = decode_model(shape, cluster, engine.tensor_parallel, "sglang", *sizes, rollout.sends_adapters)
    return Fleet(engine.servers, decode, engine.kv_tokens, rollout.servers.max_running)
