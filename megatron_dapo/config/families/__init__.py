"""Model families: what `model_type` says about a model, beyond the numbers in its config.json.

Each module beside this one is a family, or closely related ones: its `FAMILIES` are found by `model_type`.
docs/add_a_family.md shows how to add one.

- `tensors`     templates of tensors, and the tables that most families share
- `qwen2`       Qwen1.5, Qwen2, Qwen2.5, with and without experts
- `qwen3`       Qwen3, with and without experts
- `qwen3_next`  Qwen3-Next and Qwen3.5: gated DeltaNet layers
- `llama`       Llama 2 and 3
- `mistral`     Mistral without a sliding window
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.config.families.tensors import STANDARD, Tensors


@dataclass(frozen=True, slots=True)
class Family:
    """The name of a family in `model_type`, and how its models differ from a Llama."""

    model_type: str
    architecture: str  # in `architectures`
    defaults: Mapping[str, Any]  # transformers' values of the keys that config.json may leave out
    nullable: tuple[str, ...] = ()  # keys whose null means: derived from others
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with only one supported value
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys
    tensors: Tensors = STANDARD
    hidden_by_heads: bool = False  # the hidden size must be a multiple of the number of heads
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False
    normalised_experts: bool = False  # always; else where config.json has norm_topk_prob
    shared_expert: bool = False  # beside the routed experts, with a sigmoid gate
    # Of gated DeltaNet layers: "fused" by key head (qkvz, ba) or "separate" (qkv, z, b, a).
    linear_projections: str = ""
    attention_gate: bool = False  # q_proj also has a sigmoid gate on the attention's output
    zero_centred_norms: bool = False  # norms multiply by 1 + weight
    text_config: bool = False  # a model with a vision tower: the text model is under text_config and language_model
    carried: tuple[str, ...] = ()  # prefixes of tensors that are converted but neither trained nor synced
    window_key: str = "use_sliding_window"  # switches sliding-window attention on

    @property
    def prefix(self) -> str:
        """Of the HF names of the text model."""
        return "model.language_model." if self.text_config else "model."


_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    family.model_type: family for module in _MODULES for family in getattr(module, "FAMILIES", ())
}


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json: by `model_type`, as transformers does, or by `architectures` if that is missing."""
    if "model_type" in config:
        kind = config["model_type"]
        return FAMILIES.get(kind) if isinstance(kind, str) else None
    name = architecture_of(config)
    return next((family for family in FAMILIES.values() if family.architecture == name), None)


def architecture_of(config: Mapping[str, Any]) -> Any:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else names
