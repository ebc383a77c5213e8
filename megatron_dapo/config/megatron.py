"""`policy.megatron`, `policy.moe` and `policy.fp8`: options of Megatron-Core.

`policy.megatron` passes fields of Megatron-Core's configuration objects on by name. A field that one of our keys sets
is an error that names the key. A field that would break a promise of this trainer is an error that says why. Both are
found here, without Megatron; `policy/megatron/options.py` checks names and types against the installed version.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_dapo.config.base import Section

_SHAPE = "policy.model: it follows from the model's config.json"
_SHAPE_FIELDS = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels add_bias_linear
    add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset num_moe_experts
    moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups
    moe_router_group_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_layer_freq moe_latent_size rotary_interleaved normalization qk_layernorm qk_l2_norm
    layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm softmax_scale
    softmax_type attention_output_gate window_size window_attn_skip_freq no_rope_freq multi_latent_attention mtp_*
    experimental_attention_variant dsa_* linear_* mamba_* use_mamba_* is_hybrid_model heterogeneous_*
    hetereogenous_* mrope_section
"""
_HEAD = "this trainer: its own output layer computes the loss (policy.head_chunk_tokens)"
_LOADED = "this trainer: weights are loaded, not initialised"
_NORMALISER = "this trainer: its exact normaliser needs one value"
_STAGES = "policy.first_stage_layers and policy.last_stage_layers"

# Field of Megatron-Core (a pattern): the key that sets it. First match wins.
OWNED: dict[str, dict[str, str]] = {
    "model": {
        "tensor_model_parallel_size": "policy.tensor_parallel",
        "pipeline_model_parallel_size": "policy.pipeline_parallel",
        "virtual_pipeline_model_parallel_size": "policy.virtual_pipeline",
        "context_parallel_size": "policy.context_parallel",
        "expert_model_parallel_size": "policy.expert_parallel",
        "expert_tensor_parallel_size": "policy.expert_tensor_parallel",
        "sequence_parallel": "policy.sequence_parallel",
        "num_layers_in_first_pipeline_stage": "policy.first_stage_layers",
        "num_layers_in_last_pipeline_stage": "policy.last_stage_layers",
        "pipeline_model_parallel_layout": _STAGES,
        "account_for_*_in_pipeline_split": _STAGES,
        "bf16": "policy.precision",
        "fp16": "policy.precision",
        "params_dtype": "policy.precision",
        "pipeline_dtype": "policy.precision",
        "enable_autocast": "policy.precision",
        "autocast_dtype": "policy.precision",
        "recompute_granularity": "policy.recompute",
        "recompute_method": "policy.recompute_layers",
        "recompute_num_layers": "policy.recompute_layers",
        "recompute_modules": "policy.recompute_modules",
        "moe_layer_recompute": "policy.recompute_modules",
        "attention_backend": "policy.attention_backend",
        "cp_comm_type": "policy.cp_comm_type",
        "tp_comm_overlap": "policy.tp_comm_overlap",
        "deterministic_mode": "policy.deterministic",
        "gradient_accumulation_fusion": "policy.gradient_accumulation_fusion",
        "fp8": "policy.fp8.recipe",
        "fp8_recipe": "policy.fp8.recipe",
        "first_last_layers_bf16": "policy.fp8.first_last_layers_bf16",
        "moe_token_dispatcher_type": "policy.moe.dispatcher",
        "moe_enable_deepep": "policy.moe.dispatcher",
        "moe_flex_dispatcher_backend": "policy.moe.flex_backend",
        "moe_permute_fusion": "policy.moe.permute_fusion",
        "moe_router_fusion": "policy.moe.router_fusion",
        "moe_grouped_gemm": "policy.moe.grouped_gemm",
        "moe_enable_routing_replay": "policy.routing_replay",
        "moe_aux_loss_coeff": "policy.moe_aux_loss_coefficient",
        "moe_router_load_balancing_type": "policy.moe_aux_loss_coefficient",
        "overlap_p2p_comm": "policy.virtual_pipeline",
        "batch_p2p_comm": "policy.virtual_pipeline",
        "deallocate_pipeline_outputs": "policy.virtual_pipeline",
        "variable_seq_lengths": "policy.pipeline_parallel",
        "calculate_per_token_loss": _NORMALISER,
        "cross_entropy_*": _HEAD,
        "use_cpu_initialization": _LOADED,
        "perform_initialization": _LOADED,
        "init_model_with_meta_device": _LOADED,
        **dict.fromkeys(_SHAPE_FIELDS.split(), _SHAPE),
    },
    "ddp": {
        "grad_reduce_in_fp32": "policy.gradient_reduction",
        "overlap_grad_reduce": "policy.overlap_grad_reduce",
        "overlap_param_gather": "policy.overlap_param_gather",
        "use_distributed_optimizer": "policy.distributed_optimizer",
        "average_in_collective": _NORMALISER,
    },
    "optimizer": {
        "lr": "policy.optimizer.lr",
        "min_lr": "policy.optimizer.min_lr",
        "decoupled_lr": "policy.optimizer.lr",
        "decoupled_min_lr": "policy.optimizer.min_lr",
        "weight_decay": "policy.optimizer.weight_decay",
        "adam_beta1": "policy.optimizer.beta1",
        "adam_beta2": "policy.optimizer.beta2",
        "adam_eps": "policy.optimizer.eps",
        "clip_grad": "policy.optimizer.grad_clip",
        "bf16": "policy.precision",
        "fp16": "policy.precision",
        "params_dtype": "policy.precision",
        "fp8_recipe": "policy.fp8.recipe",
        "use_distributed_optimizer": "policy.distributed_optimizer",
        "overlap_param_gather": "policy.overlap_param_gather",
        "use_precision_aware_optimizer": "policy.optimizer.precision_aware",
        "main_grads_dtype": "policy.gradient_reduction",
        "main_params_dtype": "policy.optimizer.main_params_dtype",
        "exp_avg_dtype": "policy.optimizer.exp_avg_dtype",
        "exp_avg_sq_dtype": "policy.optimizer.exp_avg_sq_dtype",
        "optimizer_cpu_offload": "policy.optimizer.cpu_offload",
        "optimizer_offload_fraction": "policy.optimizer.cpu_offload",
    },
}

_DROPPED = "tokens would be dropped or padded, which no engine does: the trainer's log-probs would be another model's"
_RANDOM = "it makes log-probs random, so that ratios are not 1 before the first update"
_FP8_WEIGHTS = "weights stay in bf16: checkpoints and weight sync read them"
_VARIABLE = "packed micro-batches differ in length, and a CUDA graph has one shape"
_FSDP = "the trainer's checkpoints and weight sync need Megatron's DDP, not FSDP"
_GROUPS = "the trainer does not build the process groups that it needs"
_SCHEDULE = "it needs another pipeline schedule than the trainer's"
_INFERENCE = "it is for inference with Megatron"
_ADAM = "the trainer's checkpoints hold the state of AdamW"
_LOSS_SCALE = "it belongs to fp16 training; policy.precision is bf16 or fp32"

# Field of Megatron-Core (a pattern): why it cannot be used here.
REFUSED: dict[str, dict[str, str]] = {
    "model": {
        "hidden_dropout": _RANDOM,
        "attention_dropout": _RANDOM,
        "moe_input_jitter_eps": _RANDOM,
        "moe_router_force_load_balancing": "the router would ignore its weights",
        "moe_z_loss_coeff": "only policy.moe_aux_loss_coefficient is defined per global batch",
        "moe_token_dropping": _DROPPED,
        "moe_expert_capacity_factor": _DROPPED,
        "moe_pad_expert_input_to_capacity": _DROPPED,
        "moe_token_drop_policy": _DROPPED,
        "moe_use_legacy_grouped_gemm": "its parameters have other names than those that checkpoints and sync know",
        "moe_extended_tp": _GROUPS,
        "hierarchical_context_parallel_sizes": _GROUPS,
        "hybrid_context_parallel": _GROUPS,
        "max_seqlen_per_dp_cp_rank": _GROUPS,
        "fp8_param": _FP8_WEIGHTS,
        "fp4_param": _FP8_WEIGHTS,
        "*cuda_graph*": _VARIABLE,
        "defer_embedding_wgrad_compute": "the trainer's own output layer computes that gradient",
        "wgrad_deferral_limit": "the trainer's own output layer computes that gradient",
        "overlap_moe_expert_parallel_comm": _SCHEDULE,
        "ep_overlap_early_attn_memory_release": _SCHEDULE,
        "delay_wgrad_compute": _SCHEDULE,
        "num_microbatches_with_partial_activation_checkpoints": _SCHEDULE,
        "flash_decode": _INFERENCE,
        "inference_*": _INFERENCE,
        "use_inference_optimized_layers": _INFERENCE,
        "transformer_impl": "Transformer Engine's layers are used where it is installed",
    },
    "ddp": {
        "use_megatron_fsdp": _FSDP,
        "use_custom_fsdp": _FSDP,
        "fsdp_*": _FSDP,
        "*_sharding_strategy": _FSDP,
        "preserve_fp32_weights": _FSDP,
        "suggested_communication_unit_size": _FSDP,
        "keep_fp8_transpose_cache": _FSDP,
        "fp8_param_gather": _FP8_WEIGHTS,
        "reuse_grad_buf_for_mxfp8_param_ag": _FP8_WEIGHTS,
        "num_distributed_optimizer_instances": _GROUPS,
        "align_param_gather": _SCHEDULE,
        "delay_wgrad_compute": _SCHEDULE,
    },
    "optimizer": {
        "optimizer": _ADAM,
        "sgd_*": _ADAM,
        "muon_*": _ADAM,
        "loss_scale*": _LOSS_SCALE,
        "*_loss_scale": _LOSS_SCALE,
        "hysteresis": _LOSS_SCALE,
        "reuse_grad_buf_for_mxfp8_param_ag": _FP8_WEIGHTS,
        "overlap_param_gather_with_optimizer_step": _SCHEDULE,
        "store_param_remainders": "checkpoints hold whole main weights, which any layout and any Adam can load",
    },
}


def owner_of(kind: str, field: str) -> str | None:
    """Our key that sets this field of Megatron-Core; None when no key does."""
    return _first_match(OWNED[kind], field)


def _first_match(patterns: dict[str, str], field: str) -> str | None:
    return next((found for pattern, found in patterns.items() if fnmatchcase(field, pattern)), None)


class MegatronOptions(Section):
    """Fields of Megatron-Core's configuration objects, by their own names, for options that have no key of their own.

    Names and types are checked against the installed version when a run starts and by `train --dry-run`. Data types are
    written fp32, bf16, fp16 or fp8. docs/megatron.md lists which options have keys.
    """

    model: dict[str, Any] = Field({}, description="Fields of TransformerConfig: layers, precision, communication.")
    ddp: dict[str, Any] = Field({}, description="Fields of DistributedDataParallelConfig: buckets and gradient checks.")
    optimizer: dict[str, Any] = Field({}, description="Fields of OptimizerConfig: AdamW and its memory.")

    @model_validator(mode="after")
    def _fields(self) -> MegatronOptions:
        for kind in OWNED:
            for field in getattr(self, kind):
                owner, why = owner_of(kind, field), _first_match(REFUSED[kind], field)
                if owner:
                    to_do = "remove it" if owner.startswith("this trainer") else "remove it, and set that instead"
                    raise ValueError(f"{kind}.{field} is set by {owner}; {to_do}")
                if why:
                    raise ValueError(f"{kind}.{field} cannot be used: {why}; remove it")
        return self


class MoEConfig(Section):
    """How Megatron runs the experts of a mixture-of-experts model."""

    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall",
        description="How tokens reach their experts. allgather may be faster with few ranks and needs "
        "pipeline_parallel 1; flex uses flex_backend and needs CUDA.",
    )
    flex_backend: Literal["deepep", "hybridep"] = Field("deepep", description="Communication library of flex.")
    permute_fusion: bool | None = Field(
        None, description="One kernel orders tokens by expert; null: where Transformer Engine is installed."
    )
    router_fusion: bool = Field(
        False, description="One kernel for top-k, softmax and the load-balancing loss; needs Transformer Engine 2.7."
    )
    grouped_gemm: bool | None = Field(
        None, description="One kernel for all experts of a rank; null: where Transformer Engine is installed."
    )


class Fp8Config(Section):
    """fp8 matrix products in the transformer layers. Weights, output layer and optimizer keep their precision."""

    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        "none", description="Transformer Engine's scaling recipe. Hopper: blockwise or tensorwise; Blackwell: mxfp8."
    )
    format: Literal["e4m3", "hybrid"] = Field("hybrid", description="hybrid: e5m2 for gradients, e4m3 for the rest.")
    first_last_layers_bf16: bool = Field(False, description="Keep the first and the last layer in bf16.")

    @property
    def alignment(self) -> int:
        """Tokens of a packed micro-batch on one rank must be a multiple of this."""
        return {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.recipe]

    @model_validator(mode="after")
    def _layers(self) -> Fp8Config:
        if self.first_last_layers_bf16 and self.recipe in ("none", "delayed"):
            raise ValueError(
                f"first_last_layers_bf16 has no effect with recipe {self.recipe!r}: use tensorwise, blockwise or mxfp8"
            )
        return self
