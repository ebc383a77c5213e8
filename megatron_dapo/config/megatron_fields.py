"""Fields of Megatron-Core's configuration objects that `policy.megatron` may not set: those that one of our keys sets,
and those that would break a promise of this trainer. `policy/megatron/options.py` checks the names and types of the
others against the installed version.
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def _by_field(fields: dict[str, str]) -> dict[str, str]:
    """Patterns of fields to their key or reason, from the key or reason with its fields."""
    return {field: text for text, names in fields.items() for field in names.split()}


# The key that sets them, and the fields (patterns). First match wins.
OWNED: dict[str, dict[str, str]] = {
    "model": _by_field({
        "policy.tensor_parallel": "tensor_model_parallel_size",
        "policy.pipeline_parallel": "pipeline_model_parallel_size variable_seq_lengths",
        "policy.virtual_pipeline":
            "virtual_pipeline_model_parallel_size overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs",
        "policy.context_parallel": "context_parallel_size",
        "policy.expert_parallel": "expert_model_parallel_size",
        "policy.expert_tensor_parallel": "expert_tensor_parallel_size",
        "policy.sequence_parallel": "sequence_parallel",
        "policy.first_stage_layers": "num_layers_in_first_pipeline_stage",
        "policy.last_stage_layers": "num_layers_in_last_pipeline_stage",
        "policy.first_stage_layers and policy.last_stage_layers":
            "pipeline_model_parallel_layout account_for_*_in_pipeline_split",
        "policy.precision": "bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
        "policy.recompute": "recompute_granularity",
        "policy.recompute_layers": "recompute_method recompute_num_layers",
        "policy.recompute_modules": "recompute_modules moe_layer_recompute",
        "policy.attention_backend": "attention_backend",
        "policy.cp_comm_type": "cp_comm_type",
        "policy.tp_comm_overlap": "tp_comm_overlap",
        "policy.deterministic": "deterministic_mode",
        "policy.gradient_accumulation_fusion": "gradient_accumulation_fusion",
        "policy.fp8.recipe": "fp8 fp8_recipe",
        "policy.fp8.first_last_layers_bf16": "first_last_layers_bf16",
        "policy.moe.dispatcher": "moe_token_dispatcher_type moe_enable_deepep",
        "policy.moe.flex_backend": "moe_flex_dispatcher_backend",
        "policy.moe.permute_fusion": "moe_permute_fusion",
        "policy.moe.router_fusion": "moe_router_fusion",
        "policy.moe.grouped_gemm": "moe_grouped_gemm",
        "policy.routing_replay": "moe_enable_routing_replay",
        "policy.moe_aux_loss_coefficient": "moe_aux_loss_coeff moe_router_load_balancing_type",
        "this trainer: its exact normaliser needs one value": "calculate_per_token_loss",
        "this trainer: its own output layer computes the loss (policy.head_chunk_tokens)": "cross_entropy_*",
        "this trainer: weights are loaded, not initialised":
            "use_cpu_initialization perform_initialization init_model_with_meta_device",
        "policy.model: it follows from the model's config.json":
            "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels "
            "add_bias_linear add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value "
            "glu_linear_offset num_moe_experts moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax "
            "moe_router_score_function moe_router_num_groups moe_router_group_topk "
            "moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_router_enable_expert_bias "
            "moe_router_bias_update_rate moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "moe_layer_freq moe_latent_size rotary_interleaved normalization qk_layernorm qk_l2_norm "
            "layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm "
            "softmax_scale softmax_type attention_output_gate window_size window_attn_skip_freq no_rope_freq "
            "multi_latent_attention mtp_* experimental_attention_variant dsa_* linear_* mamba_* use_mamba_* "
            "is_hybrid_model heterogeneous_* hetereogenous_* mrope_section",
    }),
    "ddp": _by_field({
        "policy.gradient_reduction": "grad_reduce_in_fp32",
        "policy.overlap_grad_reduce": "overlap_grad_reduce",
        "policy.overlap_param_gather": "overlap_param_gather",
        "policy.distributed_optimizer": "use_distributed_optimizer",
        "this trainer: its exact normaliser needs one value": "average_in_collective",
    }),
    "optimizer": _by_field({
        "policy.optimizer.lr": "lr decoupled_lr",
        "policy.optimizer.min_lr": "min_lr decoupled_min_lr",
        "policy.optimizer.weight_decay": "weight_decay",
        "policy.optimizer.beta1": "adam_beta1",
        "policy.optimizer.beta2": "adam_beta2",
        "policy.optimizer.eps": "adam_eps",
        "policy.optimizer.grad_clip": "clip_grad",
        "policy.precision": "bf16 fp16 params_dtype",
        "policy.fp8.recipe": "fp8_recipe",
        "policy.distributed_optimizer": "use_distributed_optimizer",
        "policy.overlap_param_gather": "overlap_param_gather",
        "policy.optimizer.precision_aware": "use_precision_aware_optimizer",
        "policy.gradient_reduction": "main_grads_dtype",
        "policy.optimizer.main_params_dtype": "main_params_dtype",
        "policy.optimizer.exp_avg_dtype": "exp_avg_dtype",
        "policy.optimizer.exp_avg_sq_dtype": "exp_avg_sq_dtype",
        "policy.optimizer.cpu_offload": "optimizer_cpu_offload optimizer_offload_fraction",
    }),
}  # fmt: skip

# Why a field cannot be used here, and the fields (patterns).
REFUSED: dict[str, dict[str, str]] = {
    "model": _by_field({
        "it makes log-probs random, so that ratios are not 1 before the first update":
            "hidden_dropout attention_dropout moe_input_jitter_eps",
        "the router would ignore its weights": "moe_router_force_load_balancing",
        "only policy.moe_aux_loss_coefficient is defined per global batch": "moe_z_loss_coeff",
        "tokens would be dropped or padded, which no engine does: the trainer's log-probs would be another model's":
            "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy",
        "its parameters have other names than those that checkpoints and sync know": "moe_use_legacy_grouped_gemm",
        "the trainer does not build the process groups that it needs":
            "moe_extended_tp hierarchical_context_parallel_sizes hybrid_context_parallel "
            "max_seqlen_per_dp_cp_rank",
        "weights stay in bf16: checkpoints and weight sync read them": "fp8_param fp4_param",
        "packed micro-batches differ in length, and a CUDA graph has one shape": "*cuda_graph*",
        "the trainer's own output layer computes that gradient": "defer_embedding_wgrad_compute wgrad_deferral_limit",
        "it needs another pipeline schedule than the trainer's":
            "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release delay_wgrad_compute "
            "num_microbatches_with_partial_activation_checkpoints",
        "it is for inference with Megatron": "flash_decode inference_* use_inference_optimized_layers",
        "Transformer Engine's layers are used where it is installed": "transformer_impl",
    }),
    "ddp": _by_field({
        "the trainer's checkpoints and weight sync need Megatron's DDP, not FSDP":
            "use_megatron_fsdp use_custom_fsdp fsdp_* *_sharding_strategy preserve_fp32_weights "
            "suggested_communication_unit_size keep_fp8_transpose_cache",
        "weights stay in bf16: checkpoints and weight sync read them":
            "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
        "the trainer does not build the process groups that it needs": "num_distributed_optimizer_instances",
        "it needs another pipeline schedule than the trainer's": "align_param_gather delay_wgrad_compute",
    }),
    "optimizer": _by_field({
        "the trainer's checkpoints hold the state of AdamW": "optimizer sgd_* muon_*",
        "it belongs to fp16 training; policy.precision is bf16 or fp32": "loss_scale* *_loss_scale hysteresis",
        "weights stay in bf16: checkpoints and weight sync read them": "reuse_grad_buf_for_mxfp8_param_ag",
        "it needs another pipeline schedule than the trainer's": "overlap_param_gather_with_optimizer_step",
        "checkpoints hold whole main weights, which any layout and any Adam can load": "store_param_remainders",
    }),
}  # fmt: skip


def found_in(patterns: dict[str, str], field: str) -> str | None:
    """The key or reason in a table of OWNED or REFUSED for this field of Megatron-Core."""
    return next((found for pattern, found in patterns.items() if fnmatchcase(field, pattern)), None)
