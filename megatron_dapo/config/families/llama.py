"""Llama 2 and 3, and models with their architecture. Llama 3.1 and newer have a rope type of their own."""

from megatron_dapo.config.families import Family

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
        nullable=("num_key_value_heads", "head_dim"),
        fixed={"attention_bias": False, "mlp_bias": False},
        hidden_by_heads=True,
        window_key="sliding_window",
    ),
)
