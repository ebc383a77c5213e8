"""Qwen3, 2507, Coder: norms of queries and keys; the MoE has no shared expert."""

from megatron_dapo.config.families import Family

# transformers would also add a bias to the attention's output.
NO_BIAS = {"attention_bias": False}
FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        nullable=("num_key_value_heads",),
        fixed=NO_BIAS,
        qk_norm=True,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "norm_topk_prob": False, "decoder_sparse_step": 1},
        fixed=NO_BIAS,
        aliases={"num_local_experts": "num_experts"},
        qk_norm=True,
        moe=True,
    ),
)
