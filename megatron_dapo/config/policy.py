"""`policy`: the model that Megatron trains, its layout over ranks, and its optimizer."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import PathText, Section

HEAD_LOGITS_BYTES = 1200 << 20  # 4096 tokens of a 152 k vocabulary in bf16


class OptimizerConfig(Section):
    """AdamW as in the published 32B run."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after the warm-up.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the linear and cosine schedules.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate schedule after the warm-up."
    )
    warmup_steps: int = Field(10, ge=0, description="Rollout steps over which lr rises linearly from 0.")
    decay_steps: int | None = Field(None, gt=0, description="Rollout steps until min_lr; null: trainer.steps.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's mean of the gradients.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's mean of the squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled from the gradient (AdamW).")
    grad_clip: float = Field(1.0, ge=0, description="Global gradient norm; 0 switches clipping off.")

    @model_validator(mode="after")
    def _order(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr}): lower min_lr")
        return self


class PolicyConfig(Section):
    model: PathText = Field("", description="HF directory (config.json, safetensors, tokenizer) of a Qwen model.")
    megatron_checkpoint: PathText | None = Field(
        None,
        description="A converted torch_dist directory to start from; null: load the HF weights directly.",
    )
    tensor_parallel: int = Field(1, ge=1, description="TP: ranks that share every layer; divides both kinds of heads.")
    pipeline_parallel: int = Field(1, ge=1, description="PP: pipeline stages of consecutive layers.")
    virtual_pipeline: int = Field(1, ge=1, description="Model chunks per pipeline stage (interleaved 1F1B).")
    context_parallel: int = Field(1, ge=1, description="CP: ranks that share every sequence.")
    expert_parallel: int = Field(1, ge=1, description="EP: ranks that share the experts of a MoE layer.")
    sequence_parallel: bool | None = Field(
        None,
        description="Split activations between tensor-parallel layers along the sequence, which saves memory; "
        "null: on when tensor_parallel > 1.",
    )
    distributed_optimizer: bool = Field(True, description="Shard optimizer state over data-parallel ranks.")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="Precision of the model's computation; gradients and optimizer state are always fp32."
    )
    micro_batch_tokens: int = Field(
        32768,
        gt=0,
        description="Token budget of one packed micro-batch (of all context-parallel ranks together).",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Recompute activations in the backward pass; full saves most memory, for a third more work."
    )
    head_chunk_tokens: int | None = Field(
        None, gt=0, description="Tokens whose logits are in memory at once; null: as many as fit into 1.2 GiB."
    )
    moe_aux_loss_coefficient: float = Field(0.0, ge=0, description="Load-balancing loss of the router; 0: none.")
    optimizer: OptimizerConfig = OptimizerConfig()
    timeout_seconds: float = Field(1800.0, gt=0, description="Longest wait in any collective.")

    def head_chunk(self, vocab: int) -> int:
        """Tokens whose logits are in memory at once. Larger chunks are faster."""
        if self.head_chunk_tokens is not None:
            return self.head_chunk_tokens
        token_bytes = -(-vocab // self.tensor_parallel) * (2 if self.precision == "bf16" else 4)
        return max(128, HEAD_LOGITS_BYTES // token_bytes)

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model (and its sequence shards)."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @model_validator(mode="after")
    def _layout(self) -> PolicyConfig:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline is {self.virtual_pipeline} but pipeline_parallel is 1: "
                "set pipeline_parallel to 2 or more, or virtual_pipeline to 1"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel of 2 or more: remove it or raise tensor_parallel")
        align = self.pack_alignment
        if self.micro_batch_tokens % align:
            raise ValueError(
                f"micro_batch_tokens ({self.micro_batch_tokens}) must be a multiple of {align}, because the packed "
                "tokens are split over 2 × context_parallel chunks and, under sequence parallelism, over "
                f"tensor_parallel ranks: use {-(-self.micro_batch_tokens // align) * align}"
            )
        return self

    @property
    def sequence_alignment(self) -> int:
        """Packed sequences are padded to a multiple of this: context parallelism splits each into 2·cp chunks."""
        return 2 * self.context_parallel if self.context_parallel > 1 else 1

    @property
    def pack_alignment(self) -> int:
        """A packed micro-batch is padded to a multiple of this."""
        tensor = self.tensor_parallel if self.uses_sequence_parallel else 1
        return math.lcm(self.sequence_alignment, self.context_parallel * tensor)
