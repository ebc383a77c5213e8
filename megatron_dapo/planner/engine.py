"""Memory and speed of an engine: whether it fits at its tensor-parallel size, its KV cache, its decoding time.

A decoding step of `running` sequences takes the longer of two times: reading the weights and all keys and values, or
the arithmetic. A fixed cost per layer and per sequence is added. It was fitted to SGLang 0.5.17 on an H200 with a
1.5B model: 395, 22 800 and 48 400 tokens/s at 1, 64 and 256 running sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.planner.hardware import GIB, Cluster
from megatron_dapo.planner.parameters import Parameters, count_parameters
from megatron_dapo.planner.workload import Workload

FRACTION = "--mem-fraction-static"  # of the card, for weights and KV cache
DEFAULT_FRACTION = 0.88  # SGLang's default
OVERHEAD_BYTES = 3.0 * GIB  # CUDA context, graphs, activations: outside that fraction, and kept after a release
BANDWIDTH_SHARE = 0.8  # share of the data sheet's that reading weights and KV cache reaches
DECODE_MFU = 0.5
SECONDS_PER_LAYER, SECONDS_PER_SEQUENCE = 60e-6, 6e-6
ALL_REDUCE_SECONDS = 12e-6  # latency of one of the two all-reduces in a layer, at tensor parallel > 1
DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Sizes are bytes per GPU unless stated otherwise."""

    tensor_parallel: int
    servers: int
    weights: float
    kv_per_token: float
    kv_room: float  # bytes left for the KV cache
    overhead: float
    running: int  # sequences that one server decodes at once, at the mean length
    longest: int
    external: int = 0  # external servers

    @property
    def kv_tokens(self) -> int:
        """Tokens that one server's KV cache holds."""
        return max(0, int(self.kv_room / self.kv_per_token))

    @property
    def kv_least(self) -> float:
        """KV cache of one sequence of the maximum length, which an engine must hold."""
        return self.longest * self.kv_per_token

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.longest

    @property
    def least(self) -> float:
        return self.weights + self.kv_least + self.overhead


def plan_engine(
    shape: ModelShape, rollout: RolloutConfig, cluster: Cluster, work: Workload, occupied: float = 0.0, tp: int = 0
) -> EnginePlan:
    """`occupied`: bytes that the trainer keeps on the same GPU while the engine generates. `tp` 0: as configured."""
    tp = tp or rollout.servers.tensor_parallel
    size = DTYPE_BYTES.get(rollout.servers.dtype, 2)
    weights = count_parameters(shape).total * size / tp
    kv_per_token = shape.layers * 2 * max(1, shape.kv_heads / tp) * shape.head_dim * size
    fraction = memory_fraction(rollout.servers.arguments)
    memory = cluster.gpu.memory
    room = min(fraction * memory, memory - occupied - OVERHEAD_BYTES) - weights
    tokens = max(0.0, room / kv_per_token)
    # On average a running sequence holds its prompt and half of its response.
    held = work.mean_prompt + work.mean_response / 2
    external = len(rollout.servers.urls)
    servers = external or (cluster.engine_gpus or cluster.gpus) // tp
    share = -(-work.generated // max(1, servers))
    return EnginePlan(
        tensor_parallel=tp,
        servers=servers,
        weights=weights,
        kv_per_token=kv_per_token,
        kv_room=max(0.0, room),
        overhead=OVERHEAD_BYTES,
        running=max(1, min(rollout.servers.max_running, int(tokens / held), share)),
        longest=work.longest,
        external=external,
    )


def hands_over(rollout: RolloutConfig) -> bool:
    """Whether colocated engines release their memory to the trainer: configured, or no share of it is configured."""
    return rollout.servers.share_gpus or not any(a.startswith(FRACTION) for a in rollout.servers.arguments)


def memory_fraction(arguments: list[str]) -> float:
    """`--mem-fraction-static X` among the server's arguments, as two items or with an equals sign."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == FRACTION:
            text = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else "")
            try:
                return float(text)
            except ValueError:
                return DEFAULT_FRACTION
    return DEFAULT_FRACTION


def decode_step(
    shape: ModelShape, parameters: Parameters, cluster: Cluster, tp: int, running: float, context: float
) -> float:
    """Seconds for one token of each of `running` sequences that hold `context` tokens each."""
    gpu = cluster.gpu
    matrices = parameters.total - parameters.embedding
    if shape.tied_embeddings:
        matrices = parameters.total
    if shape.is_moe:  # experts that no running token uses are not read
        unused = (1 - shape.experts_per_token / shape.experts) ** running
        matrices -= round(parameters.mlp * unused)
    bandwidth = gpu.bandwidth * 1e12 * BANDWIDTH_SHARE
    kv_per_token = shape.layers * 2 * max(1, shape.kv_heads / tp) * shape.head_dim * 2
    reading = (matrices * 2 / tp + running * context * kv_per_token) / bandwidth
    active = parameters.layer_matrices_active + shape.vocab * shape.hidden
    arithmetic = running * 2 * active / tp / (gpu.tflops * 1e12 * DECODE_MFU)
    fixed = SECONDS_PER_LAYER * shape.layers + SECONDS_PER_SEQUENCE * running
    reduce = 0.0
    if tp > 1:
        volume = 2 * running * shape.hidden * 2 * (tp - 1) / tp
        reduce = 2 * shape.layers * (ALL_REDUCE_SECONDS + volume / cluster.wire(tp))
    return max(reading, arithmetic) + fixed + reduce


def generation_seconds(
    shape: ModelShape, parameters: Parameters, cluster: Cluster, engine: EnginePlan, work: Workload
) -> dict[str, float]:
    """Seconds of one step's generation: prompts, full batches, and the longest responses at the end."""
    tp = engine.tensor_parallel
    samples = work.generated / engine.servers
    context = work.mean_prompt + work.mean_response / 2
    step = decode_step(shape, parameters, cluster, tp, engine.running, context)
    prompts = work.generated / work.samples_per_prompt * work.mean_prompt / engine.servers
    prefill = prompts * 2 * parameters.active / tp / (cluster.gpu.tflops * 1e12 * DECODE_MFU)
    tail = (work.max_response - work.mean_response) * decode_step(shape, parameters, cluster, tp, 1, work.longest)
    return {"prompts": prefill, "decoding": samples * work.mean_response / engine.running * step, "tail": tail}
