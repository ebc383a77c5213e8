"""Qwen models on Megatron-Core.

- `gpt`               Megatron's configuration and `PolicyModel`, from a HF shape and a layout
- `local_spec`        layers without Transformer Engine: RMSNorm and attention in torch
- `gated_delta_net`   the linear-attention layer of Qwen3-Next and Qwen3.5; `delta_rule`: its recurrence, packed
- `hybrid_spec`       puts these layers into Megatron's block
- `router`            the router of a MoE layer: load-balancing loss, expert load
- `rotary`            rotary position embedding for packed sequences; `rotary_triton`: its kernel
- `varlen_attention`  torch's attention kernel for packed sequences
"""
