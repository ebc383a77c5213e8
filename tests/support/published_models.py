"""config.json of the published text Qwens: the values that decide the shape, and the size that their cards state."""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    config: dict[str, Any]
    billions: float  # parameters, without those of multi-token prediction
    active: float | None = None  # per token


def _model(architecture, hidden, ffn, layers, heads, kv, vocab, tied, positions, theta, **more):
    return {
        "architectures": [architecture], "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": positions, "rope_theta": theta, "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": layers,
        "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True, **more,
    }  # fmt: skip


def _qwen2(*sizes, positions=32768, theta=1e6):
    return _model("Qwen2ForCausalLM", *sizes, positions, theta)


def _qwen3(*sizes, positions=40960, theta=1e6):
    more = {"head_dim": 128, "attention_bias": False, "rope_scaling": None}
    return _model("Qwen3ForCausalLM", *sizes, positions, theta, **more)


def _moe(experts, per_token, ffn, normalised):
    return {
        "num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": ffn,
        "norm_topk_prob": normalised, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }  # fmt: skip


def _qwen3_moe(hidden, ffn, layers, heads, kv, experts, expert_ffn, positions=40960, theta=1e6, **more):
    more = {"head_dim": 128, "attention_bias": False, "rope_scaling": None} | more
    sizes = (hidden, ffn, layers, heads, kv, 151936, False, positions, theta)
    return _model("Qwen3MoeForCausalLM", *sizes, **_moe(experts, 8, expert_ffn, True), **more)


def _qwen2_moe(hidden, ffn, layers, heads, kv, vocab, positions, experts, per_token, expert_ffn, shared):
    sizes = (hidden, ffn, layers, heads, kv, vocab, False, positions, 1e6)
    more = _moe(experts, per_token, expert_ffn, False) | {"shared_expert_intermediate_size": shared}
    return _model("Qwen2MoeForCausalLM", *sizes, **more)


_NEXT = _model(
    "Qwen3NextForCausalLM", 2048, 5120, 48, 16, 2, 151936, False, 262144, 1e7, **_moe(512, 10, 512, True),
    head_dim=256, attention_bias=False, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, partial_rotary_factor=0.25,
    rope_scaling=None, shared_expert_intermediate_size=512,
)  # fmt: skip
_0_5B = (896, 4864, 24, 14, 2, 151936, True)
_1_5B = (1536, 8960, 28, 12, 2, 151936, True)
_3B = (2048, 11008, 36, 16, 2, 151936, True)
_7B = (3584, 18944, 28, 28, 4, 152064, False)
_14B = (5120, 13824, 48, 40, 8, 152064, False)
_32B = (5120, 27648, 64, 40, 8, 152064, False)
_72B = (8192, 29568, 80, 64, 8, 152064, False)
_30B_A3B = (2048, 6144, 48, 32, 4, 128, 768)
_235B_A22B = (4096, 12288, 94, 64, 4, 128, 1536)
_CODER = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}

PUBLISHED = {
    "Qwen1.5-0.5B": Published(_qwen2(1024, 2816, 24, 16, 16, 151936, True), 0.464),
    "Qwen1.5-1.8B": Published(_qwen2(2048, 5504, 24, 16, 16, 151936, False), 1.84),
    "Qwen1.5-4B": Published(_qwen2(2560, 6912, 40, 20, 20, 151936, False), 3.95),
    "Qwen1.5-7B": Published(_qwen2(4096, 11008, 32, 32, 32, 151936, False), 7.72),
    "Qwen1.5-14B": Published(_qwen2(5120, 13696, 40, 40, 40, 152064, False), 14.2),
    "Qwen1.5-32B": Published(_qwen2(5120, 27392, 64, 40, 8, 152064, False), 32.5),
    "Qwen1.5-72B": Published(_qwen2(8192, 24576, 80, 64, 64, 152064, False), 72.3),
    "Qwen1.5-110B": Published(_qwen2(8192, 49152, 80, 64, 8, 152064, False), 111.2),
    "Qwen1.5-MoE-A2.7B": Published(
        _qwen2_moe(2048, 5632, 24, 16, 16, 151936, 8192, 60, 4, 1408, 5632), 14.3, 2.7
    ),
    "Qwen2-0.5B": Published(_qwen2(*_0_5B, positions=131072), 0.494),
    "Qwen2-1.5B": Published(_qwen2(*_1_5B, positions=131072), 1.54),
    "Qwen2-7B": Published(_qwen2(*_7B, positions=131072), 7.62),
    "Qwen2-72B": Published(_qwen2(*_72B, positions=131072), 72.7),
    "Qwen2-57B-A14B": Published(
        _qwen2_moe(3584, 18944, 28, 28, 4, 151936, 131072, 64, 8, 2560, 20480), 57.4, 14.2
    ),
    "Qwen2.5-0.5B": Published(_qwen2(*_0_5B), 0.494),
    "Qwen2.5-1.5B": Published(_qwen2(*_1_5B, positions=131072), 1.54),
    "Qwen2.5-3B": Published(_qwen2(*_3B), 3.09),
    "Qwen2.5-7B": Published(_qwen2(*_7B, positions=131072), 7.62),
    "Qwen2.5-14B": Published(_qwen2(*_14B, positions=131072), 14.8),
    "Qwen2.5-32B": Published(_qwen2(*_32B, positions=131072), 32.8),
    "Qwen2.5-72B": Published(_qwen2(*_72B, positions=131072), 72.7),
    "Qwen2.5-Math-1.5B": Published(_qwen2(*_1_5B, positions=4096, theta=1e4), 1.54),
    "Qwen2.5-Math-7B": Published(_qwen2(*_7B, positions=4096, theta=1e4), 7.62),
    "Qwen2.5-Math-72B": Published(_qwen2(*_72B, positions=4096, theta=1e4), 72.7),
    "Qwen2.5-Coder-7B": Published(_qwen2(*_7B), 7.62),
    "Qwen2.5-Coder-32B": Published(_qwen2(*_32B), 32.8),
    "QwQ-32B": Published(_qwen2(*_32B, positions=40960), 32.8),
    "DeepSeek-R1-Distill-Qwen-1.5B": Published(_qwen2(*_1_5B[:-1], False, positions=131072, theta=1e4), 1.78),
    "DeepSeek-R1-Distill-Qwen-7B": Published(_qwen2(*_7B, positions=131072, theta=1e4), 7.62),
    "DeepSeek-R1-Distill-Qwen-14B": Published(_qwen2(*_14B, positions=131072), 14.8),
    "DeepSeek-R1-Distill-Qwen-32B": Published(_qwen2(*_32B, positions=131072), 32.8),
    "Qwen3-0.6B": Published(_qwen3(1024, 3072, 28, 16, 8, 151936, True), 0.596),
    "Qwen3-1.7B": Published(_qwen3(2048, 6144, 28, 16, 8, 151936, True), 1.72),
    "Qwen3-4B": Published(_qwen3(2560, 9728, 36, 32, 8, 151936, True), 4.02),
    "Qwen3-4B-Instruct-2507": Published(
        _qwen3(2560, 9728, 36, 32, 8, 151936, True, positions=262144, theta=5e6), 4.02
    ),
    "Qwen3-8B": Published(_qwen3(4096, 12288, 36, 32, 8, 151936, False), 8.19),
    "Qwen3-14B": Published(_qwen3(5120, 17408, 40, 40, 8, 151936, False), 14.8),
    "Qwen3-32B": Published(_qwen3(5120, 25600, 64, 64, 8, 151936, False), 32.8),
    "Qwen3-30B-A3B": Published(_qwen3_moe(*_30B_A3B), 30.5, 3.3),
    "Qwen3-30B-A3B-Instruct-2507": Published(_qwen3_moe(*_30B_A3B, positions=262144, theta=1e7), 30.5, 3.3),
    "Qwen3-235B-A22B": Published(_qwen3_moe(*_235B_A22B), 235.1, 22.2),
    "Qwen3-235B-A22B-Thinking-2507": Published(_qwen3_moe(*_235B_A22B, positions=262144, theta=5e6), 235.1, 22.2),
    "Qwen3-Coder-30B-A3B": Published(_qwen3_moe(2048, 5472, *_30B_A3B[2:], 262144, 1e7, **_CODER), 30.5, 3.3),
    "Qwen3-Coder-480B-A35B": Published(
        _qwen3_moe(6144, 8192, 62, 96, 8, 160, 2560, 262144, 1e7, **_CODER), 480.2, 35.4
    ),
    "Qwen3-Next-80B-A3B": Published(_NEXT, 79.7, 3.9),
}  # fmt: skip
