"""Qwen models on Megatron-Core.

- `gpt`               Megatron's configuration and `PolicyModel`, from a HF shape and a layout
- `local_spec`        layers without Transformer Engine: RMSNorm and attention in torch
- `router`            the router of a MoE layer: load-balancing loss, expert load
- `rotary`            rotary position embedding for packed sequences; `rotary_triton`: its kernel
- `varlen_attention`  torch's attention kernel for packed sequences
"""
