"""A model with the published shape and random weights, as a HF directory: for runs that need a size, not an ability.

    python benchmarks/random_model.py Qwen2.5-32B OUT --tokenizer DIR

All layers have the same weights, so that 65 GB take seconds. OUT may be on a RAM disk.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_dapo.config import ModelShape
from megatron_dapo.planner.models import published_configs
from megatron_dapo.weights.mapping import parameter_mappings

Sizes = dict[str, tuple[int, ...]]
PROCESSES = 12
BLOCK = 2**24 - 3  # random values, repeated: making them takes longer than writing them
made: dict[Any, torch.Tensor] = {}  # shared with the forked writers


def tensor_of(name: str, size: tuple[int, ...], layers: int) -> torch.Tensor:
    """Of one name in all layers the same."""
    key = (*name.split(".")[-2:], size)
    if key not in made:
        last = name.endswith(("o_proj.weight", "down_proj.weight"))  # what is added to the stream: it must not grow
        count = math.prod(size)
        block = torch.randn(min(count, BLOCK)) * (0.02 / ((2 * layers) ** 0.5 if last else 1))
        made[key] = block.bfloat16().repeat(-(-count // len(block)))[:count].view(size)
        if "norm" in name:
            made[key] = torch.ones(size, dtype=torch.bfloat16)
    return made[key]


def write(out: Path, name: str, sizes: Sizes, layers: int) -> dict[str, str]:
    save_file({key: tensor_of(key, size, layers) for key, size in sizes.items()}, out / name, {"format": "pt"})
    return dict.fromkeys(sizes, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of a published model, e.g. Qwen2.5-32B")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="HF directory with the tokenizer's files")
    parser.add_argument("--layers", type=int, help="fewer than published")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.tokenizer.glob("*token*"):
        shutil.copy(file, args.out)
    config = published_configs()[args.name]
    kind = str(config["architectures"][0]).removesuffix("ForCausalLM").lower()  # type: ignore[index]
    config |= {"model_type": kind, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151643}
    config |= {"num_hidden_layers": args.layers} if args.layers else {}
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    shape = ModelShape.from_dir(args.out)
    files: defaultdict[str, Sizes] = defaultdict(dict)
    for mapping in parameter_mappings(shape).values():
        if not mapping.tied:
            files[f"model-{mapping.layer if mapping.layer is not None else 'rest'}.safetensors"] |= dict(
                zip(mapping.hf, mapping.hf_shapes, strict=True)
            )
    for sizes in files.values():
        for key, size in sizes.items():
            tensor_of(key, size, shape.layers)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(write, args.out, name, sizes, shape.layers) for name, sizes in files.items()]
        index = {key: name for job in jobs for key, name in job.result().items()}
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main()
