"""The shapes that GPU benchmarks train: Qwen2.5-1.5B and 7B, and a few layers of Qwen3-30B-A3B."""

from megatron_dapo.config import ModelShape

QWEN_1_5B = ModelShape(
    "qwen2", layers=28, hidden=1536, ffn_hidden=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936,
    max_positions=32768, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True, qk_norm=False,
)  # fmt: skip

QWEN_7B = ModelShape(
    "qwen2", layers=28, hidden=3584, ffn_hidden=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064,
    max_positions=32768, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=False, qkv_bias=True, qk_norm=False,
)  # fmt: skip

QWEN_30B_A3B_LAYERS = ModelShape(
    "qwen3_moe", layers=4, hidden=2048, ffn_hidden=6144, heads=32, kv_heads=4, head_dim=128, vocab=151936,
    max_positions=32768, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=False, qkv_bias=False, qk_norm=True,
    experts=128, experts_per_token=8, expert_ffn_hidden=768,
)  # fmt: skip
