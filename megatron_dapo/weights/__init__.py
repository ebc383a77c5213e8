"""HF Qwen weights and Megatron weights: one table, streaming converters, live loading and sync."""
