"""A model directory that passes every check but takes no space: real headers, weights that are holes in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tiny_model import byte_tokenizer

from megatron_dapo.config import ModelShape
from megatron_dapo.files import safetensors_header
from megatron_dapo.weights.mapping import hf_shapes

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"

SMALL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 320,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def write_sparse_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(ModelShape.from_hf(config))
    header = safetensors_header([(name, torch.bfloat16, shape) for name, shape in shapes.items()])
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * sum(math.prod(shape) for shape in shapes.values()))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder
