"""Qwen models on Megatron-Core.

- `gpt`               `PolicyModel`, from a HF shape and a layout
- `lora`              adapters on the linear layers of a frozen model
- `local_spec`        layers without Transformer Engine: RMSNorm, rotary embedding and attention in torch
- `exact`             their forward passes with the kernels of an SGLang server (policy.true_on_policy)
- `gated_delta_net`   the linear-attention layer of Qwen3-Next and Qwen3.5; `delta_rule`: its recurrence, packed
- `router`            the router of a MoE layer: load-balancing loss, expert load, replay of given experts
"""
