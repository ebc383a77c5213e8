"""Tiny random models saved by transformers itself: what a user hands to the converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

KINDS = ("qwen2", "qwen2-tied", "qwen3", "qwen3-moe", "qwen2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe",
         "llama", "mistral", "mixed-moe")  # fmt: skip
HYBRID = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
COMMON: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Norms and biases are not trivial, so that a swapped or forgotten tensor shows."""
    torch.manual_seed(KINDS.index(kind))
    if kind in HYBRID:
        model = _hybrid(kind)
    elif kind in ("qwen2-moe", "mixed-moe"):
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        if kind == "mixed-moe":  # of the four layers, only the last one has experts
            moe |= {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
        config = transformers.Qwen2MoeConfig(shared_expert_intermediate_size=80, **moe, **COMMON)
        model = transformers.Qwen2MoeForCausalLM(config)
    elif kind.startswith("qwen2"):
        config = transformers.Qwen2Config(tie_word_embeddings=kind == "qwen2-tied", **COMMON)
        model = transformers.Qwen2ForCausalLM(config)
    elif kind == "llama":
        rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
        config = transformers.LlamaConfig(tie_word_embeddings=True, **COMMON | {"rope_parameters": rope})
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(head_dim=32, sliding_window=None, **COMMON))
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


def _hybrid(kind: str) -> Any:
    """Gated DeltaNet layers; Qwen3.5 with its vision tower."""
    common = COMMON | {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    if kind == "qwen3-next":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = transformers.Qwen3NextConfig(shared_expert_intermediate_size=80, norm_topk_prob=True, **moe, **common)
        return transformers.Qwen3NextForCausalLM(config)
    common["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16}  # fmt: skip
    if kind == "qwen3.5-moe":
        del common["intermediate_size"]
        common |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                   "shared_expert_intermediate_size": 80}  # fmt: skip
        config = transformers.Qwen3_5MoeConfig(text_config=common, vision_config=vision, tie_word_embeddings=False)
        return transformers.Qwen3_5MoeForConditionalGeneration(config)
    config = transformers.Qwen3_5Config(text_config=common, vision_config=vision, tie_word_embeddings=False)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def mtp_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Some of those of multi-token prediction, which transformers does not save."""
    generator = torch.Generator().manual_seed(9)
    sizes = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,), "mtp.layers.0.self_attn.k_proj.weight": (64, 64)}
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


def save(model: Any, folder: Path, *, shard: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:  # published Qwen3-MoE configs say num_experts
        config["num_experts"] = config["num_local_experts"]
        (folder / "config.json").write_text(json.dumps(config))
    if config["architectures"][0].startswith(("Qwen3Next", "Qwen3_5")):
        _add(folder, mtp_tensors(next(model.parameters()).dtype))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """To the checkpoint's only file, or as one more."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
        return
    save_file(tensors, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    known = json.loads(index.read_text())
    known["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index.write_text(json.dumps(known))
