"""The engine: does it fit at its tensor-parallel size, how much does its KV cache hold, how fast does it decode.

A decoding step of `running` sequences reads the weights once and every sequence's keys and values, or is bound by
arithmetic, plus a fixed cost per layer and per sequence. The fixed costs were fitted to SGLang 0.5.17 on an H200 with
a 1.5B model: 395, 22 800 and 48 400 tokens/s at 1, 64 and 256 running sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.planner.hardware import GIB, Cluster
from megatron_dapo.planner.parameters import Parameters, count_parameters
from megatron_dapo.planner.workload import Workload

FRACTION = "--mem-fraction-static"  # of the card, for weights and KV cache
DEFAULT_FRACTION = 0.88  # what SGLang takes unless it is told
OVERHEAD_BYTES = 3.0 * GIB  # CUDA context, graphs, activations: outside that fraction; also what stays after a release
BANDWIDTH_SHARE = 0.8  # of the data sheet's, reached when weights and KV cache are read
DECODE_MFU = 0.5
SECONDS_PER_LAYER, SECONDS_PER_SEQUENCE = 60e-6, 6e-6
ALL_REDUCE_SECONDS = 12e-6  # latency of one of the two all-reduces in a layer, at tensor parallel > 1
DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Bytes per GPU unless said otherwise."""

    tensor_parallel: int
    servers: int
    weights: float
    kv_per_token: float
    kv_room: float  # what is left for the KV cache
    overhead: float
    running: int  # sequences that one server decodes at a time, at the mean length
    longest: int
    external: int = 0  # servers that were given by URL

    @property
    def kv_tokens(self) -> int:
        """Tokens that one server's KV cache holds."""
        return max(0, int(self.kv_room / self.kv_per_token))

    @property
    def kv_least(self) -> float:
        """KV cache of one sequence of the greatest length: less cannot serve."""
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
    # A sequence that has begun grows to its full length: count with what it holds on average, half of its response.
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


def takes_turns(rollout: RolloutConfig) -> bool:
    """Whether engines on the trainer's GPUs let their memory go: configured, or nobody gave them a share of it."""
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
    if shape.is_moe:  # experts that no running token chose are not read
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
    """Seconds of one step's generation: prompts, the full batches, and the longest answers that run on alone."""
    tp = engine.tensor_parallel
    samples = work.generated / engine.servers
    context = work.mean_prompt + work.mean_response / 2
    step = decode_step(shape, parameters, cluster, tp, engine.running, context)
    prompts = work.generated / work.samples_per_prompt * work.mean_prompt / engine.servers
    prefill = prompts * 2 * parameters.active / tp / (cluster.gpu.tflops * 1e12 * DECODE_MFU)
    tail = (work.max_response - work.mean_response) * decode_step(shape, parameters, cluster, tp, 1, work.longest)
    return {"prompts": prefill, "decoding": samples * work.mean_response / engine.running * step, "tail": tail}
