"""`policy`: the model that Megatron trains, its layout over ranks, and its optimizer."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from megatron_dapo.config.base import PathText, Section
from megatron_dapo.config.megatron_fields import OWNED, REFUSED, found_in

HEAD_LOGITS_BYTES = 1200 << 20  # 4096 tokens of a 152 k vocabulary in bf16
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
StateType = Literal["fp32", "bf16", "fp16", "fp8"]


class MegatronOptions(Section):
    """Fields of Megatron-Core's configuration objects, by their own names, for options without a key here.

    Names and types are checked against the installed version when a run starts and by `train --dry-run`. Data types are
    written fp32, bf16, fp16 or fp8. docs/megatron.md lists which options have keys.
    """

    model: dict[str, Any] = Field({})
    """Fields of TransformerConfig: layers, precision, communication."""
    ddp: dict[str, Any] = Field({})
    """Fields of DistributedDataParallelConfig: buckets and gradient checks."""
    optimizer: dict[str, Any] = Field({})
    """Fields of OptimizerConfig: AdamW and its memory."""

    def check(self) -> None:
        for kind in OWNED:
            for field in getattr(self, kind):
                owner, why = found_in(OWNED[kind], field), found_in(REFUSED[kind], field)
                if owner:
                    to_do = "remove it" if owner.startswith("this trainer") else "remove it, and set that instead"
                    raise ValueError(f"{kind}.{field} is set by {owner}; {to_do}")
                if why:
                    raise ValueError(f"{kind}.{field} cannot be used: {why}; remove it")


class MoEConfig(Section):
    """How Megatron runs the experts of a mixture-of-experts model."""

    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts. allgather may be faster with few ranks and needs pipeline_parallel 1; flex uses
    flex_backend and needs CUDA."""
    flex_backend: Literal["deepep", "hybridep"] = "deepep"
    """Communication library of flex."""
    permute_fusion: bool | None = None
    """One kernel orders tokens by expert; null: where Transformer Engine is installed."""
    router_fusion: bool = False
    """One kernel for top-k, softmax and the load-balancing loss; needs Transformer Engine 2.7."""
    grouped_gemm: bool | None = None
    """One kernel for all experts of a rank; null: where Transformer Engine is installed."""


class Fp8Config(Section):
    """fp8 matrix products in the transformer layers. Weights, output layer and optimizer keep their precision."""

    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"
    """Transformer Engine's scaling recipe. Hopper: blockwise or tensorwise; Blackwell: mxfp8."""
    format: Literal["e4m3", "hybrid"] = "hybrid"
    """hybrid: e5m2 for gradients, e4m3 for the rest."""
    first_last_layers_bf16: bool = False
    """Keep the first and the last layer in bf16."""

    @property
    def alignment(self) -> int:
        """Tokens of a packed micro-batch on one rank must be a multiple of this."""
        return {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.recipe]

    def check(self) -> None:
        if self.first_last_layers_bf16 and self.recipe in ("none", "delayed"):
            raise ValueError(
                f"first_last_layers_bf16 has no effect with recipe {self.recipe!r}: use tensorwise, blockwise or mxfp8"
            )


class OptimizerConfig(Section):
    """AdamW as in the published 32B run."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the linear and cosine schedules."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    warmup_steps: int = Field(10, ge=0)
    """Rollout steps over which lr rises linearly from 0."""
    decay_steps: int | None = Field(None, gt=0)
    """Rollout steps until min_lr, without pre-training; null: all."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's mean of the gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of Adam's mean of the squared gradients."""
    eps: float = Field(1e-8, gt=0)
    """Added to Adam's denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled from the gradient (AdamW)."""
    grad_clip: float = Field(1.0, ge=0)
    """Global gradient norm; 0 switches clipping off."""
    fused: bool | None = None
    """torch's fused AdamW where neither Transformer Engine nor apex has one; null: on CUDA."""
    cpu_offload: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer state in host memory, where its part of the step runs."""
    precision_aware: bool = False
    """Optimizer state in the types below; needs Transformer Engine's Adam."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type of the main weights."""
    exp_avg_dtype: StateType = "fp32"
    """Type of Adam's mean of the gradients."""
    exp_avg_sq_dtype: StateType = "fp32"
    """Type of Adam's mean of the squared gradients."""

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr}): lower min_lr")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) must be more than warmup_steps ({self.warmup_steps}): both count "
                "from the first step"
            )
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "fp32" and (not self.precision_aware or self.cpu_offload):
                why = "cpu_offload keeps fp32 state" if self.cpu_offload else "precision_aware is false"
                raise ValueError(f"{name} is {getattr(self, name)}, but {why}: remove it or change the other")


class LoraConfig(Section):
    """Low-rank adapters are trained instead of the model's weights, which are frozen. A learning rate ten to
    twenty times that of full training is a good start."""

    rank: int = Field(0, ge=0)
    """Rank of every adapter; 0: the model itself is trained."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are multiplied by alpha / rank."""
    targets: list[str] = Field([])
    """HF names of the layers with adapters, e.g. q_proj; empty: all linear layers of the blocks."""
    start: str = ""
    """PEFT directory of the adapter that training starts from; empty: a new one."""

    def check(self) -> None:
        if not self.rank and (self.targets or self.start):
            raise ValueError("targets and start need a rank above 0")


class PolicyConfig(Section):
    model: PathText = ""
    """A model: HF directory (config.json, safetensors, tokenizer), or its name on the hub, e.g. Qwen/Qwen2.5-1.5B or
    NAME@REVISION; the cache is used first, and nothing is downloaded with HF_HUB_OFFLINE=1."""
    megatron_checkpoint: PathText | None = None
    """A converted torch_dist directory to start from; null: load the HF weights directly."""
    tensor_parallel: int = Field(1, ge=1)
    """TP: ranks that share every layer; divides the attention heads. With more ranks than key/value heads, each of
    these heads is computed on several ranks."""
    pipeline_parallel: int = Field(1, ge=1)
    """PP: pipeline stages of consecutive layers."""
    first_stage_layers: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage; null: same as a middle stage."""
    last_stage_layers: int | None = Field(None, ge=1)
    """Layers of the last pipeline stage, which also has the output layer; null: same as a middle stage."""
    virtual_pipeline: int = Field(1, ge=1)
    """Model chunks per pipeline stage (interleaved 1F1B)."""
    context_parallel: int = Field(1, ge=1)
    """CP: ranks that share every sequence."""
    expert_parallel: int = Field(1, ge=1)
    """EP: ranks that share the experts of a MoE layer."""
    expert_tensor_parallel: int = Field(1, ge=1)
    """ETP: ranks that share every expert; attention keeps tensor_parallel."""
    sequence_parallel: bool | None = None
    """Split activations between tensor-parallel layers along the sequence, which saves memory; null: on when
    tensor_parallel > 1."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the model's computation; gradients and optimizer state are fp32 unless keys below say otherwise."""
    micro_batch_tokens: int = Field(32768, gt=0)
    """Token budget of one packed micro-batch (of all context-parallel ranks together)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass; full saves most memory, for a third more work."""
    recompute_modules: list[RecomputeModule] = Field(["core_attn"])
    """What selective recomputes in every layer. Transformer Engine's fused attention needs no core_attn."""
    recompute_layers: int | None = Field(None, ge=1)
    """With recompute: full, only the first N layers of each model chunk; null: all."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Transformer Engine's attention kernel."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None
    """How context-parallel ranks exchange keys and values; null: Transformer Engine's default."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with matrix products. Every micro-batch is padded to micro_batch_tokens."""
    deterministic: bool = False
    """Use only bitwise reproducible algorithms. Slower; for debugging."""
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are accumulated and summed over ranks; bf16 halves their memory and traffic, and
    rounds."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over ranks during the backward pass; null: on CUDA."""
    overlap_param_gather: bool | None = None
    """Gather updated weights during the next forward pass (distributed_optimizer); null: on CUDA with more than one
    data- or context-parallel rank."""
    gradient_accumulation_fusion: bool | None = None
    """Matrix products add weight gradients to their fp32 buffer directly; null: where Transformer Engine or NVIDIA's
    apex is installed."""
    head_chunk_tokens: int | None = Field(None, gt=0)
    """Tokens whose logits are in memory at once; null: as many as fit into 1.2 GiB."""
    routing_replay: Literal["off", "engine", "old_log_probs"] = "off"
    """Experts of each token in updates and old log-probs. off: those the router chooses. engine: those that generated
    it (R3; SGLang). old_log_probs: updates use those of the pass for the old log-probs."""
    true_on_policy: bool = False
    """Trainer and engine compute the same log-probs, bit for bit: train/mismatch_max is exactly 0, and any other value
    is a bug; the gate demands 0. Slower. Without LoRA, tensor or context parallelism: on CUDA dense models in bf16 with
    SGLang, with deterministic algorithms; on the CPU all models in fp32 with the embedded engine."""
    moe_aux_loss_coefficient: float = Field(0.0, ge=0)
    """Load-balancing loss of the router; 0: none."""
    moe: MoEConfig = MoEConfig()
    fp8: Fp8Config = Fp8Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    megatron: MegatronOptions = MegatronOptions()
    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait in any collective."""

    @property
    def uses_exact_kernels(self) -> bool:
        """true_on_policy on CUDA: the forward pass has the kernels of SGLang's servers."""
        return self.true_on_policy and self.precision == "bf16"

    @property
    def is_deterministic(self) -> bool:
        return self.deterministic or self.uses_exact_kernels

    def head_chunk(self, vocab: int) -> int:
        """Tokens whose logits are in memory at once. Larger chunks are faster."""
        if self.head_chunk_tokens is not None:
            return self.head_chunk_tokens
        token_bytes = -(-vocab // self.tensor_parallel) * (2 if self.precision == "bf16" else 4)
        return max(128, HEAD_LOGITS_BYTES // token_bytes)

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel

    def stage_layers(self, layers: int) -> list[int] | None:
        """Layers of each pipeline stage; None when the stages in the middle cannot share what is left."""
        given = [count for count in (self.first_stage_layers, self.last_stage_layers) if count is not None]
        middle, left = self.pipeline_parallel - len(given), layers - sum(given)
        if left < 0 or bool(left) != bool(middle) or (middle and left % middle):
            return None
        stages = [left // middle] * middle if middle else []
        if self.first_stage_layers is not None:
            stages.insert(0, self.first_stage_layers)
        return stages if self.last_stage_layers is None else [*stages, self.last_stage_layers]

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model (and its sequence shards)."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def check(self) -> None:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline is {self.virtual_pipeline} but pipeline_parallel is 1: "
                "set pipeline_parallel to 2 or more, or virtual_pipeline to 1"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel of 2 or more: remove it or raise tensor_parallel")
        for check in (self._check_stages, self._check_recompute, self._check_communication, self._check_precision):
            check()
        # Few models have heads for another tensor_parallel: check_model names those first.
        if self.alignment_problem and not self.tensor_parallel & (self.tensor_parallel - 1):
            raise ValueError(self.alignment_problem)

    @property
    def alignment_problem(self) -> str:
        """What is wrong with micro_batch_tokens; empty: nothing."""
        tokens, align = self.micro_batch_tokens, self.pack_alignment
        if tokens % align == 0:
            return ""
        unit = f" in multiples of {self.fp8.alignment} (fp8.recipe)" if self.fp8.alignment > 1 else ""
        return (
            f"micro_batch_tokens ({tokens}) must be a multiple of {align}, because the packed tokens are split over "
            f"2 × context_parallel chunks and, under sequence parallelism, over tensor_parallel ranks{unit}: use "
            f"{-(-tokens // align) * align}"
        )

    def _check_stages(self) -> None:
        ends = {name: getattr(self, name) for name in ("first_stage_layers", "last_stage_layers")}
        named = [name for name, count in ends.items() if count is not None]
        if named and self.pipeline_parallel == 1:
            raise ValueError(f"{named[0]} needs pipeline_parallel of 2 or more: remove it or raise pipeline_parallel")
        for name in named:
            if ends[name] % self.virtual_pipeline:
                raise ValueError(
                    f"{name} ({ends[name]}) must be a multiple of virtual_pipeline ({self.virtual_pipeline}), because "
                    "the chunks of a stage have equal sizes"
                )

    def _check_recompute(self) -> None:
        if self.recompute_modules != ["core_attn"] and self.recompute != "selective":
            raise ValueError(f"recompute_modules needs recompute: selective (it is {self.recompute})")
        if not self.recompute_modules:
            raise ValueError("recompute_modules is empty: name modules, or set recompute: none")
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(f"recompute_layers needs recompute: full (it is {self.recompute})")

    def _check_communication(self) -> None:
        if self.moe.dispatcher == "allgather" and self.pipeline_parallel > 1:
            raise ValueError(
                "moe.dispatcher allgather needs pipeline_parallel 1: pipeline stages exchange micro-batches of "
                "different lengths, which Megatron refuses with it; use alltoall"
            )
        experts = self.expert_parallel * self.expert_tensor_parallel
        replica = self.tensor_parallel * self.context_parallel
        if self.moe.dispatcher == "allgather" and replica % experts:
            raise ValueError(
                f"moe.dispatcher allgather needs expert_parallel × expert_tensor_parallel ({experts}) to divide "
                f"tensor_parallel × context_parallel ({replica}): it gathers equal numbers of tokens, and "
                "data-parallel ranks hold packs of different lengths; use alltoall"
            )
        if self.overlap_param_gather and not self.distributed_optimizer:
            raise ValueError(
                "overlap_param_gather needs distributed_optimizer: otherwise every rank updates all of its weights"
            )
        if self.overlap_param_gather and self.overlap_grad_reduce is False:
            raise ValueError("overlap_param_gather needs overlap_grad_reduce, because Megatron's buckets serve both")
        if self.cp_comm_type and self.context_parallel == 1:
            raise ValueError("cp_comm_type needs context_parallel of 2 or more: remove it or raise context_parallel")
        if self.tp_comm_overlap and not self.uses_sequence_parallel:
            raise ValueError("tp_comm_overlap needs tensor_parallel of 2 or more with sequence_parallel")

    def _check_precision(self) -> None:
        if self.lora.rank and (self.expert_tensor_parallel > 1 or self.fp8.recipe != "none" or self.tp_comm_overlap):
            raise ValueError("lora cannot be combined with expert_tensor_parallel, fp8 or tp_comm_overlap")
        if self.fp8.recipe != "none" and self.precision != "bf16":
            raise ValueError(f"fp8.recipe needs precision: bf16, in which weights are kept (it is {self.precision})")
        if self.gradient_reduction == "bf16" and self.precision != "bf16":
            raise ValueError("gradient_reduction: bf16 needs precision: bf16, because Megatron reduces in either fp32 "
                             "or the weights' type")  # fmt: skip
        optimizer = self.optimizer
        if (optimizer.precision_aware or optimizer.cpu_offload) and not self.distributed_optimizer:
            raise ValueError("optimizer.precision_aware and optimizer.cpu_offload need distributed_optimizer, which "
                             "implements them")  # fmt: skip
        if (optimizer.precision_aware or optimizer.cpu_offload) and self.precision != "bf16":
            raise ValueError("optimizer.precision_aware and optimizer.cpu_offload need precision: bf16")

    @property
    def sequence_alignment(self) -> int:
        """Packed sequences are padded to a multiple of this: context parallelism splits each into 2·cp chunks."""
        return 2 * self.context_parallel if self.context_parallel > 1 else 1

    @property
    def pack_alignment(self) -> int:
        """A packed micro-batch is padded to a multiple of this."""
        tensor = self.tensor_parallel if self.uses_sequence_parallel else 1
        return math.lcm(self.sequence_alignment, self.context_parallel * tensor * self.fp8.alignment)
