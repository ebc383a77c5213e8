"""Tiny models with random float32 weights and a tokenizer of single bytes, written as HF directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig

EOS = "<|endoftext|>"
VOCABULARY = 320  # 256 bytes, the EOS token, and ids that no text uses


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {EOS: len(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def tiny_config(kind: str = "qwen3", *, hidden: int = 64, layers: int = 2, intermediate: int = 128):
    common = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "eos_token_id": 256, "bos_token_id": None,
    }  # fmt: skip
    match kind:
        case "qwen2":
            return Qwen2Config(**common)
        case "qwen2_yarn":
            rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
            return Qwen2Config(**common, rope_parameters=rope)
        case "llama":
            rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
            return LlamaConfig(**common | {"bos_token_id": 256}, rope_parameters=rope)
        case "mistral":
            return MistralConfig(**common | {"bos_token_id": 256}, head_dim=32, sliding_window=None)
        case "qwen3":
            return Qwen3Config(**common, head_dim=16)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **common, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                norm_topk_prob=True,
            )  # fmt: skip
        case "qwen2_moe":
            return Qwen2MoeConfig(
                **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                shared_expert_intermediate_size=96,
            )  # fmt: skip
        case "qwen3_next" | "qwen3_5":
            hybrid = {
                "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * (layers // 2),
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                "linear_value_head_dim": 12, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }  # fmt: skip
            if kind == "qwen3_5":
                return Qwen3_5TextConfig(**common, **hybrid)
            return Qwen3NextConfig(
                **common, **hybrid, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                shared_expert_intermediate_size=96, norm_topk_prob=True,
            )  # fmt: skip
    raise ValueError(kind)


def tiny_model(kind: str = "qwen3", seed: int = 0, **shape: int):
    """Random weights, larger than the usual initialisation, so that the distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif name.endswith("A_log"):
                parameter.uniform_(0.01, 1.0).log_()
    return model.eval()


def write_model(path: Path, kind: str = "qwen3", seed: int = 0, **shape: int) -> Path:
    tiny_model(kind, seed, **shape).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def reference_logprobs(model, prompt, response, temperature: float = 1.0) -> np.ndarray:
    """transformers' own log-probs of `response` after `prompt`, in one full forward pass."""
    tokens = torch.tensor([[*map(int, prompt), *map(int, response)]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor([int(t) for t in response]).unsqueeze(1))
    return chosen.squeeze(1).numpy()


def changed_weights(model, seed: int) -> list[tuple[str, torch.Tensor]]:
    """The model's checkpoint tensors with a little noise added: what an engine receives after a training step."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    return [(n, t + 0.1 * t.abs().mean() * torch.randn(t.shape, generator=generator)) for n, t in state.items()]
