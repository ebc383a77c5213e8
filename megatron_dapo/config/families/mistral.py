"""Mistral from version 0.2 on: without a sliding window."""

from megatron_dapo.config.families import Family

FAMILIES = (
    Family(
        "mistral",
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "sliding_window": 4096},
        nullable=("num_key_value_heads", "head_dim"),
        window_key="sliding_window",
    ),
)
