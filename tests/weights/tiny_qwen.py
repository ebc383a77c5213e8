"""Tiny random Qwen models saved by transformers itself: what a user hands to the converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = ("qwen2", "qwen2-tied", "qwen3", "qwen3-moe", "qwen2-moe")
COMMON: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Norms and biases are not trivial, so that a swapped or forgotten tensor shows."""
    torch.manual_seed(KINDS.index(kind))
    if kind == "qwen2-moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = transformers.Qwen2MoeConfig(shared_expert_intermediate_size=80, **moe, **COMMON)
        model = transformers.Qwen2MoeForCausalLM(config)
    elif kind.startswith("qwen2"):
        config = transformers.Qwen2Config(tie_word_embeddings=kind == "qwen2-tied", **COMMON)
        model = transformers.Qwen2ForCausalLM(config)
    elif kind == "qwen3":  # heads · head_dim is not the hidden size
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=32, tie_word_embeddings=True, **COMMON))
    else:
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(head_dim=32, tie_word_embeddings=False, **moe, **COMMON)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.to(dtype).eval()


def save(model: Any, folder: Path, *, shard: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:  # published Qwen3-MoE configs say num_experts
        config["num_experts"] = config["num_local_experts"]
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
