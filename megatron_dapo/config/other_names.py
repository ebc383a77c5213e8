"""Our keys by the names that other tools use (docs/migration.md): an error about an unknown key names ours."""

from __future__ import annotations

# Names whose last part is enough to recognise them.
KNOWN_ELSEWHERE = {
    name: ours
    for ours, names in {
        "algorithm.clip_low": "eps_clip epsilon clip_ratio_low ratio_clip_min",
        "algorithm.clip_high": "eps_clip_higher epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
        "algorithm.dual_clip": "clip_ratio_c eps_clip_c c_clip ratio_clip_c",
        "algorithm.aggregation": "loss_agg_mode loss_type token_level_loss calculate_per_token_loss",
        "algorithm.overlong.filter": "overlong_filter overlong_filtering mask_truncated_completions",
        "algorithm.overlong.cache_length": "overlong_tokens soft_cache_length overlong_buffer_length",
        "algorithm.overlong.factor": "overlong_penalty_factor penalty_factor",
        "algorithm.overlong.max_length": "soft_max_length",
        "algorithm.overlong.penalty": "overlong_reward_penalty overlong_buffer",
        "algorithm.kl.coefficient": "kl_loss_coef kl_ctl reference_policy_kl_penalty kl_coef kl_beta",
        "algorithm.kl.estimator": "kl_loss_type kl_estimator",
        "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
        "algorithm.off_policy.importance_weight": "use_tis rollout_is use_decoupled_loss",
        "algorithm.off_policy.weight_cap": "tis_clip rollout_is_threshold",
        "algorithm.off_policy.token_mask": "behav_imp_weight_cap behave_imp_weight_cap",
        "rollout.max_staleness": "max_head_offpolicyness",
        "rollout.dynamic_sampling": "dynamic_sample filter_groups use_dynamic_sampling",
        "rollout.group_filter": "dynamic_sampling_filter_path dynamic_filter_fn should_accept_fn",
        "rollout.generate": "custom_generate_function_path default_agent_loop agent_loop_config_path",
        "rollout.sampler.fill": "dynamic_bs",
        "rollout.sampler.oversampling": "gen_batch_size over_sampling_batch_size batch_multiplier",
        "rollout.sampler.max_generation_batches": "max_num_gen_batches max_resample_times "
        "dynamic_sampling_max_gen_batches",
        "rollout.sampler.unfinished": "partial_rollout",
        "rollout.samples_per_prompt": "n_samples num_generations n_samples_per_prompt num_generations_per_prompt",
        "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens max_tokens",
        "rollout.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len",
        "policy.tensor_parallel": "tensor_model_parallel_size tp tp_size",
        "policy.pipeline_parallel": "pipeline_model_parallel_size pp pp_size",
        "policy.context_parallel": "context_parallel_size cp cp_size",
        "policy.expert_parallel": "expert_model_parallel_size ep ep_size",
        "policy.micro_batch_tokens": "max_tokens_per_gpu max_tokens_per_mb ppo_max_token_len_per_gpu",
        "policy.recompute": "gradient_checkpointing activation_checkpointing",
        "policy.model": "hf_checkpoint model_name model_path",
        "policy.precision": "dtype bf16 torch_dtype mixed_precision",
        "policy.optimizer.lr": "learning_rate",
        "policy.optimizer.grad_clip": "clip_grad max_grad_norm gradient_clipping",
        "policy.optimizer.warmup_steps": "lr_warmup_steps",
        "data.path": "train_files prompt_data",
        "data.question_column": "prompt_key input_key",
        "data.answer_column": "label_key answer_key",
        "evaluate.data.path": "val_files eval_prompt_data",
        "evaluate.every": "test_freq eval_interval val_period eval_steps eval_every",
        "trainer.mini_batch_prompts": "ppo_mini_batch_size global_batch_size",
        "trainer.prompts_per_step": "train_batch_size rollout_batch_size num_prompts_per_step batch_size",
        "trainer.run_dir": "output_dir save_dir log_dir",
        "trainer.steps": "num_rollout total_training_steps max_num_steps max_steps num_steps",
        "trainer.checkpoint.every": "save_freq save_interval save_period save_every save_steps",
    }.items()
    for name in names.split()
}

# Names, most of them verl's (without the leading actor_rollout_ref.), whose last part does not identify them.
VERL = {
    "actor.use_kl_loss": "algorithm.kl.coefficient",
    "actor.optim.lr": "policy.optimizer.lr",
    "actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "actor.grad_clip": "policy.optimizer.grad_clip",
    "actor.megatron.param_offload": "rollout.servers.share_gpus",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.name": "rollout.engine",
    "rollout.tp": "rollout.servers.tensor_parallel",
    "rollout.tensor_model_parallel_size": "rollout.servers.tensor_parallel",
    "rollout.gpu_memory_utilization": "rollout.servers.arguments",
    "rollout.free_cache_engine": "rollout.servers.share_gpus",
    "rollout.temperature": "rollout.temperature",
    "rollout.top_p": "rollout.top_p",
    "rollout.top_k": "rollout.top_k",
    "rollout.val_kwargs.top_p": "evaluate.top_p",
    "rollout.val_kwargs.top_k": "evaluate.top_k",
    "rollout.val_kwargs.temperature": "evaluate.temperature",
    "rollout.val_kwargs.n": "evaluate.samples",
    "rollout.response_length": "rollout.max_response_tokens",
    "rollout.prompt_length": "rollout.max_prompt_tokens",
    "model": "policy.model",
    "model.path": "policy.model",
    "data.file": "data.path",
    "data.files": "data.path",
    "evaluate.n": "evaluate.samples",
    "evaluate.freq": "evaluate.every",
    "slurm.queue": "slurm.partition",
    "data.truncation": "data.too_long",
    "algorithm.filter_groups.enable": "rollout.dynamic_sampling",
    "algorithm.filter_groups.metric": "rollout.group_filter",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage",
    "algorithm.rollout_correction.rollout_rs": "algorithm.off_policy.token_mask",
    "reward_model.overlong_buffer.enable": "algorithm.overlong.penalty",
    "reward_model.overlong_buffer.len": "algorithm.overlong.cache_length",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.project_name": "observe.wandb.project",
    "trainer.experiment_name": "observe.wandb.name",
    "trainer.logger": "observe.wandb.mode",
    "trainer.nnodes": "slurm.nodes",
    "trainer.n_gpus_per_node": "slurm.gpus_per_node",
}


def our_name(path: str) -> str | None:
    """Our key for a dotted key of another tool; None if it is not known."""
    path = path.removeprefix("actor_rollout_ref.")
    return VERL.get(path) or KNOWN_ELSEWHERE.get(path.rpartition(".")[2])
