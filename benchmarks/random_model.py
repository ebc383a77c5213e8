"""Models without abilities, for benchmarks on one GPU.

`write_random_model` writes a configuration, a tokenizer, and weight files that are all hole. SGLang loads them with
--load-format dummy, which gives it random weights of its own.

    python benchmarks/random_model.py KIND OUT --tokenizer DIR [--layers N]

writes random weights, for a trainer and a server that must have the same. All layers are equal, so that 65 GB take
seconds on a RAM disk.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


WRITERS = 12  # processes
BLOCK = 2**24 - 3  # random values, repeated: making them takes longer than writing them
made: dict[tuple[Any, ...], torch.Tensor] = {}  # shared with the forked writers

Shapes = dict[str, tuple[int, ...]]


def even_length(prompt: Any, response: str) -> bool:
    """A grader for what such a model writes."""
    return len(response) % 2 == 0


def write_description(config: dict[str, Any], folder: Path, tokenizer_of: Path) -> Shapes:
    """Everything but the weights, whose shapes it returns."""
    folder.mkdir(parents=True)
    for pattern in ("tokenizer*", "vocab.*", "merges.txt", "*.jinja", "special_tokens_map.json", "added_tokens.json"):
        for path in tokenizer_of.glob(pattern):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return hf_shapes(ModelShape.from_dir(str(folder)))


def write_random_model(kind: str, folder: Path, tokenizer_of: Path) -> Path:
    """The weight files' names are checked; they are not read."""
    shapes = write_description(CONFIGS[kind], folder, tokenizer_of)
    header = safetensors_header((name, torch.bfloat16, shape) for name, shape in shapes.items())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * sum(math.prod(shape) for shape in shapes.values()))
    return folder


def random_tensor(name: str, shape: tuple[int, ...], layers: int) -> torch.Tensor:
    """The same for all layers. What is added to the residual stream is small, so that it does not grow."""
    key = (*name.split(".")[-2:], shape)
    if key not in made:
        scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        count = math.prod(shape)
        block = torch.ones(1) if "norm" in name else scale * torch.randn(min(count, BLOCK))
        made[key] = block.bfloat16().repeat(-(-count // len(block)))[:count].view(shape)
    return made[key]


def write_file(file: Path, shapes: Shapes, layers: int) -> dict[str, str]:
    save_file({name: random_tensor(name, shape, layers) for name, shape in shapes.items()}, file, {"format": "pt"})
    return dict.fromkeys(shapes, file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(CONFIGS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="HF directory with the tokenizer's files")
    parser.add_argument("--layers", type=int, help="instead of all")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = args.layers or CONFIGS[args.kind]["num_hidden_layers"]
    files: dict[str, Shapes] = {}
    for name, shape in write_description(
        CONFIGS[args.kind] | {"num_hidden_layers": layers}, args.out, args.tokenizer
    ).items():
        layer = re.search(r"layers\.(\d+)\.", name)
        files.setdefault(f"model-{layer[1] if layer else 'rest'}.safetensors", {})[name] = shape
        random_tensor(name, shape, layers)
    with ProcessPoolExecutor(WRITERS, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(write_file, args.out / name, shapes, layers) for name, shapes in files.items()]
        index = {name: file for job in jobs for name, file in job.result().items()}
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main()
