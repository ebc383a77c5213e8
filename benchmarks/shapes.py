"""The shape that GPU benchmarks train: Qwen2.5-1.5B."""

from megatron_dapo.config import ModelShape

QWEN_1_5B = ModelShape(
    "qwen2", layers=28, hidden=1536, ffn_hidden=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936,
    max_positions=32768, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True, qk_norm=False,
)  # fmt: skip
