"""Shapes of published models, written as their config.json has them."""

from megatron_dapo.config import ModelShape

_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, "rope_theta": 1e6, "head_dim": 128}


def sizes(hidden, ffn, layers, heads, kv, vocab, tied):
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip


CONFIGS = {
    "Qwen2.5-0.5B": _QWEN2 | sizes(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": _QWEN2 | sizes(1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": _QWEN2 | sizes(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-32B": _QWEN2 | sizes(5120, 27648, 64, 40, 8, 152064, False),
    "Llama-3.1-70B": _QWEN3 | sizes(8192, 28672, 80, 64, 8, 128256, False),  # but for the norms of q and k
    "Qwen3-14B": _QWEN3 | sizes(5120, 17408, 40, 40, 8, 151936, False),
    "Qwen3-8B": _QWEN3 | sizes(4096, 12288, 36, 32, 8, 151936, False),
    "Qwen3-30B-A3B": _QWEN3
    | sizes(2048, 6144, 48, 32, 4, 151936, False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def published(name: str) -> ModelShape:
    return ModelShape.from_hf(CONFIGS[name], name)
