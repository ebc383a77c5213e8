"""Time of a decoding step: reading weights, keys and values, or the arithmetic; plus launches, all-reduces, scheduling.

    step = max(reading, arithmetic) + layers × launch + sequences × scheduling + all-reduces

The constants are in `assumptions.py`. Experts that no running token uses are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.assumptions import EngineSoftware
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.parameters import count_parameters


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """The coefficients for one model, GPU and tensor-parallel size. Times are seconds."""

    dense: float  # reading everything but experts
    experts: float  # reading all experts
    idle_share: float  # of the experts that one token does not use; 0 for a dense model
    per_context_token: float  # reading its keys and values
    arithmetic: float  # per sequence
    fixed: float  # launches and the latency of all-reduces
    per_sequence: float  # scheduling, and the volume of all-reduces
    per_prompt_token: float  # prefill

    def step(self, running: float, context_tokens: float) -> float:
        """One token of each of `running` sequences, which together hold `context_tokens` tokens."""
        reading = self.dense + self.per_context_token * context_tokens
        if self.experts:
            reading += self.experts * (1 - self.idle_share**running)
        return max(reading, self.arithmetic * running) + self.fixed + self.per_sequence * running


def decode_model(
    shape: ModelShape, cluster: Cluster, tp: int, engine: EngineSoftware = "sglang", dtype_bytes: int = 2
) -> DecodeModel:
    parameters, gpu = count_parameters(shape), cluster.gpu
    bandwidth = gpu.bandwidth * 1e12 * assumptions.READ_SHARE
    read = parameters.total if shape.tied_embeddings else parameters.total - parameters.embedding
    experts = parameters.mlp if shape.is_moe else 0
    flops = gpu.tflops * 1e12 * assumptions.DECODE_MFU[engine] * tp
    active = parameters.layer_matrices_active + shape.vocab * shape.hidden
    latency = volume = 0.0
    if tp > 1:
        between = tp > cluster.gpus_per_node
        once = assumptions.ALL_REDUCE_BETWEEN_NODES if between else assumptions.ALL_REDUCE_SECONDS
        latency = 2 * shape.layers * once
        volume = 2 * shape.layers * 2 * shape.hidden * dtype_bytes * (tp - 1) / tp / cluster.wire(tp)
    return DecodeModel(
        dense=(read - experts) * dtype_bytes / tp / bandwidth,
        experts=experts * dtype_bytes / tp / bandwidth,
        idle_share=1 - shape.experts_per_token / shape.experts if shape.is_moe else 0.0,
        per_context_token=kv_bytes(shape, tp, dtype_bytes) / bandwidth,
        arithmetic=2 * active / flops,
        fixed=assumptions.SECONDS_PER_LAYER * shape.layers + latency,
        per_sequence=assumptions.SECONDS_PER_SEQUENCE[engine] + volume,
        per_prompt_token=2 * parameters.active / flops,
    )


def kv_bytes(shape: ModelShape, tp: int, dtype_bytes: int = 2) -> float:
    """Keys and values of one token on one GPU; a head is never divided."""
    return shape.attention_layers * 2 * max(1, shape.kv_heads / tp) * shape.head_dim * dtype_bytes
