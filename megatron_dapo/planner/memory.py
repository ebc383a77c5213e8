"""The trainer's memory on one rank, part by part, for every pipeline stage; the fullest stage decides.

Weights, gradients and optimizer state exist all the time; what the optimizer keeps in host memory does not count.
Beyond them, the peak is the largest of three moments: the head (all activations, plus the logits of a chunk), the
backward pass of a layer (all activations, plus the gradients inside it), and the optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.activations import (
    Layers,
    checkpoint_saved,
    head_memory,
    in_flight,
    layer_recomputed,
    layer_saved,
    layer_work,
)
from megatron_dapo.planner.hardware import GIB
from megatron_dapo.planner.parameters import RankParameters, count_parameters, rank_parameters, stage_layers

# CUDA context, cuBLAS and cuDNN workspaces; NCCL's buffers when there is more than one rank.
CONTEXT_BYTES, NCCL_BYTES = 1.0 * GIB, 2.0 * GIB
BUCKET_BYTES = 1.5 * GIB  # weights that are being sent to an engine
# Share of torch's allocations lost to fragmentation: packed micro-batches differ in size.
FRAGMENTATION = 0.05
STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one rank of pipeline stage `stage`."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved by the layers, for all micro-batches in flight
    layer: float  # recomputed layer and its gradients
    head: float
    step: float  # temporaries of the optimizer's step
    reserve: float

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def passes(self) -> float:
        """Beyond the static parts, at the peak of forward and backward. The head and a layer never run together."""
        return self.activations + max(self.layer, self.head)

    @property
    def allocated(self) -> float:
        """The prediction for torch.cuda.max_memory_allocated."""
        return self.static + max(self.passes, self.step)

    @property
    def total(self) -> float:
        return self.allocated + self.reserve

    @property
    def parts(self) -> dict[str, float]:
        """Adds up to `total`. Of head and layer, only the larger is part of the peak."""
        working = ("head", self.head) if self.head >= self.layer else ("layer", self.layer)
        if self.step > self.passes:
            moment = {"optimizer step": self.step}
        else:
            moment = {"activations": self.activations, working[0]: working[1]}
        static = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return {**static, **moment, "reserve": self.reserve}


def stage_memory(
    shape: ModelShape, policy: PolicyConfig, world: int, micro_batches: int, stage: int, layers: Layers = "te"
) -> TrainerMemory:
    """Memory of one rank of `stage` when `world` ranks train with at most `micro_batches` per update."""
    held = rank_parameters(shape, policy, stage)
    size = 2 if policy.precision == "bf16" else 4
    optimizer, step = _optimizer(held, policy, world, fused=layers == "te")
    last = stage == policy.pipeline_parallel - 1
    activations, layer = _passes(shape, policy, stage, micro_batches, layers)
    head = head_memory(shape, policy)
    weights = size * held.total + _fp8_copies(shape, policy, stage)
    gradients = (4 if policy.gradient_reduction == "fp32" else 2) * held.total
    memory = TrainerMemory(
        stage=stage,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations + (head.saved if last else 0.0),
        layer=layer + (head.kept_gradient if last else 0.0),
        head=head.work if last else 0.0,
        step=step,
        reserve=0.0,
    )
    reserve = CONTEXT_BYTES + (NCCL_BYTES if world > 1 else 0.0) + FRAGMENTATION * max(memory.passes, step)
    return TrainerMemory(
        stage, weights, gradients, optimizer, memory.activations, memory.layer, memory.head, step, reserve
    )


def trainer_memory(
    shape: ModelShape, policy: PolicyConfig, world: int, micro_batches: int, layers: Layers = "te"
) -> TrainerMemory:
    """The fullest stage's memory. Of the stages in the middle, the second is the largest."""
    stages = sorted({0, min(1, policy.pipeline_parallel - 1), policy.pipeline_parallel - 1})
    memories = [stage_memory(shape, policy, world, micro_batches, stage, layers) for stage in stages]
    return max(memories, key=lambda memory: memory.total)


def kept_while_engines_work(world: int) -> float:
    """Bytes that the trainer cannot offload from a GPU that it shares with an engine."""
    return CONTEXT_BYTES + BUCKET_BYTES + (NCCL_BYTES if world > 1 else 0.0)


def _fp8_copies(shape: ModelShape, policy: PolicyConfig, stage: int) -> float:
    """Transformer Engine keeps each weight matrix of the layers in fp8, once as it is and once transposed."""
    if policy.fp8.recipe == "none":
        return 0.0
    matrices = count_parameters(shape)
    layers = stage_layers(shape, policy, stage) / shape.layers
    parts = policy.expert_parallel * policy.expert_tensor_parallel if shape.is_moe else policy.tensor_parallel
    return 2 * layers * ((matrices.attention + matrices.shared) / policy.tensor_parallel + matrices.mlp / parts)


def _optimizer(held: RankParameters, policy: PolicyConfig, world: int, fused: bool) -> tuple[float, float]:
    """Bytes of optimizer state on the GPU (main weights in bf16 training, two Adam moments), and of temporaries in a
    step."""
    stage_ranks = world // policy.pipeline_parallel
    dense, experts = float(held.dense), float(held.experts)
    if policy.distributed_optimizer:
        dense /= stage_ranks // policy.tensor_parallel
        experts /= stage_ranks // (policy.expert_parallel * policy.expert_tensor_parallel)
    mine, options = dense + experts, policy.optimizer
    # torch's AdamW without a fused kernel holds the root of the second moment of all parameters.
    step = 0.0 if fused or options.fused is not False else 4 * mine
    if policy.gradient_reduction == "bf16" and not options.precision_aware:
        step += 4 * mine  # the step's fp32 copy of the gradients
    return _state_bytes(policy) * mine * (1 - options.cpu_offload), step


def _state_bytes(policy: PolicyConfig) -> int:
    """Per parameter: main weights (in bf16 training) and Adam's two moments."""
    options = policy.optimizer
    if not options.precision_aware or options.cpu_offload:
        return 12 if policy.precision == "bf16" else 8
    types = (options.main_params_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype)
    return sum(STATE_BYTES[name] for name in types)


def _passes(
    shape: ModelShape, policy: PolicyConfig, stage: int, micro_batches: int, layers: Layers
) -> tuple[float, float]:
    """Saved activations of all micro-batches in flight, and the working space of one layer."""
    count = stage_layers(shape, policy, stage)
    flying = in_flight(policy, stage, micro_batches)
    one, work = sum(layer_saved(shape, policy, layers).values()), layer_work(shape, policy)
    if policy.recompute != "full":
        return flying * count * one, work + layer_recomputed(shape, policy, layers)
    again = count if policy.recompute_layers is None else min(count, policy.recompute_layers * policy.virtual_pipeline)
    return flying * (again * checkpoint_saved(shape, policy) + (count - again) * one), one + work
