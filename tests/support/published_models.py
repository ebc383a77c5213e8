"""config.json of the published text Qwens, as `plan` knows them, and the size that their cards state."""

import importlib.util
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dapo.config import ModelShape


class Published(NamedTuple):
    config: dict[str, Any]
    billions: float  # parameters, without those of multi-token prediction
    active: float | None = None  # per token


# What a real config.json also has. It does not change the shape.
OTHER_KEYS = {
    "hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": 32768,
    "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True, "rope_scaling": None,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
KNOWN = json.loads((files("megatron_dapo.planner") / "models.json").read_text(encoding="utf-8"))
CONFIGS = {
    name: OTHER_KEYS | {"max_window_layers": config["num_hidden_layers"]} | config for name, config in KNOWN.items()
}
STATED = {  # billions of parameters, and of active ones
    "Qwen1.5-0.5B": (0.464,), "Qwen1.5-1.8B": (1.84,), "Qwen1.5-4B": (3.95,), "Qwen1.5-7B": (7.72,),
    "Qwen1.5-14B": (14.2,), "Qwen1.5-32B": (32.5,), "Qwen1.5-72B": (72.3,), "Qwen1.5-110B": (111.2,),
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7), "Qwen2-0.5B": (0.494,), "Qwen2-1.5B": (1.54,), "Qwen2-7B": (7.62,),
    "Qwen2-72B": (72.7,), "Qwen2-57B-A14B": (57.4, 14.2), "Qwen2.5-0.5B": (0.494,), "Qwen2.5-1.5B": (1.54,),
    "Qwen2.5-3B": (3.09,), "Qwen2.5-7B": (7.62,), "Qwen2.5-14B": (14.8,), "Qwen2.5-32B": (32.8,),
    "Qwen2.5-72B": (72.7,), "Qwen2.5-Math-1.5B": (1.54,), "Qwen2.5-Math-7B": (7.62,), "Qwen2.5-Math-72B": (72.7,),
    "Qwen2.5-Coder-7B": (7.62,), "Qwen2.5-Coder-32B": (32.8,), "QwQ-32B": (32.8,),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1.78,), "DeepSeek-R1-Distill-Qwen-7B": (7.62,),
    "DeepSeek-R1-Distill-Qwen-14B": (14.8,), "DeepSeek-R1-Distill-Qwen-32B": (32.8,), "Qwen3-0.6B": (0.596,),
    "Qwen3-1.7B": (1.72,), "Qwen3-4B": (4.02,), "Qwen3-4B-Instruct-2507": (4.02,), "Qwen3-8B": (8.19,),
    "Qwen3-14B": (14.8,), "Qwen3-32B": (32.8,), "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-30B-A3B-Instruct-2507": (30.5, 3.3), "Qwen3-235B-A22B": (235.1, 22.2),
    "Qwen3-235B-A22B-Thinking-2507": (235.1, 22.2), "Qwen3-Coder-30B-A3B": (30.5, 3.3),
    "Qwen3-Coder-480B-A35B": (480.2, 35.4), "Qwen3-Next-80B-A3B": (79.7, 3.9),
    "Llama-3.1-8B": (8.03,), "Llama-3.2-1B": (1.24,), "Llama-3.2-3B": (3.21,), "Llama-3.3-70B": (70.6,),
    "Mistral-7B-v0.3": (7.25,),
}  # fmt: skip
PUBLISHED = {name: Published(CONFIGS[name], *sizes) for name, sizes in STATED.items()}


def published(name: str) -> ModelShape:
    return ModelShape.from_hf(CONFIGS[name], name)


def published_runs() -> Any:
    return benchmark("published")


def benchmark(name: str) -> Any:
    """The module benchmarks/NAME.py."""
    file, key = Path(__file__).parents[2] / "benchmarks" / f"{name}.py", f"benchmark_{name}"
    if (module := sys.modules.get(key)) is None:
        sys.path.append(str(file.parent))  # they import one another
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
