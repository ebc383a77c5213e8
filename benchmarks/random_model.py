"""Models without weights, for benchmarks on one GPU: a configuration, a tokenizer, and weight files that are all hole.

SGLang loads them with --load-format dummy, which gives it random weights of its own.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config import ModelShape
from megatron_dapo.files import safetensors_header
from megatron_dapo.weights.mapping import hf_shapes

COMMON = {
    "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "initializer_range": 0.02,
}  # fmt: skip
QWEN2 = COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": QWEN2 | {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "dense": QWEN2 | {
        "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32b": QWEN2 | {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "moe": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 16,
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def write_random_model(kind: str, folder: Path, tokenizer_of: Path) -> Path:
    """The weight files' names are checked; they are not read."""
    folder.mkdir(parents=True)
    for pattern in ("tokenizer*", "vocab.*", "merges.txt", "*.jinja", "special_tokens_map.json", "added_tokens.json"):
        for path in tokenizer_of.glob(pattern):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    shapes = hf_shapes(ModelShape.from_dir(str(folder)))
    header = safetensors_header((name, torch.bfloat16, shape) for name, shape in shapes.items())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * sum(math.prod(shape) for shape in shapes.values()))
    return folder
