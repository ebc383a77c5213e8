"""Qwen1.5, Qwen2 and Qwen2.5, and models distilled into them. QKV bias; the MoE has a gated shared expert."""

from megatron_dapo.config.families import Family

FAMILIES = (
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        nullable=("num_key_value_heads",),
        qkv_bias=True,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        fixed={"qkv_bias": True},
        qkv_bias=True,
        moe=True,
        shared_expert=True,
    ),
)
