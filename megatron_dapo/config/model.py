"""The shape of a Qwen model, read from its HF config.json. Imports no torch, so planners and checks can use it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture's name says about the model, beyond the numbers in its config.json."""

    kind: str
    qkv_bias: bool = False  # always; else where config.json has attention_bias
    qk_norm: bool = False
    moe: bool = False
    shared_expert: bool = False  # beside the routed experts, with a sigmoid gate


# A variant that combines these features is one more line here. New tensors need templates in `weights/mapping.py`.
ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", qkv_bias=True, moe=True, shared_expert=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", qk_norm=True, moe=True),
}
SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model that the trainer, the converters and the planner need."""

    architecture: str  # `Architecture.kind`
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str = "bfloat16"
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden: int = 0
    norm_topk_prob: bool = True
    shared_ffn_hidden: int = 0  # of the shared expert

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def has_shared_expert(self) -> bool:
        return self.shared_ffn_hidden > 0

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelShape:
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{file} not found: {path} is not a HF model directory") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return cls.from_hf(config, str(file))

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config") -> ModelShape:
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(config).__name__}")
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None:
            raise ConfigError(
                f"{where}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported(config, where, architecture)
        read = _Reader(config, where, str(name))
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        shape = cls(
            architecture=architecture.kind,
            layers=read.integer("num_hidden_layers"),
            hidden=hidden,
            ffn_hidden=read.integer("intermediate_size"),
            heads=heads,
            kv_heads=read.integer("num_key_value_heads", default=heads),
            head_dim=read.integer("head_dim", default=hidden // heads),
            vocab=read.integer("vocab_size"),
            max_positions=read.integer("max_position_embeddings", default=32768),
            rope_theta=read.rope_theta(),
            norm_eps=read.number("rms_norm_eps", default=1e-6),
            tied_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=architecture.qkv_bias or read.flag("attention_bias"),
            qk_norm=architecture.qk_norm,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            **(read.experts() if architecture.moe else {}),
            **({"shared_ffn_hidden": read.integer(SHARED)} if architecture.shared_expert else {}),
        )
        if shape.heads % shape.kv_heads:
            raise ConfigError(
                f"{where}: num_attention_heads ({shape.heads}) must be a multiple of num_key_value_heads "
                f"({shape.kv_heads})"
            )
        return shape


class _Reader:
    """Reads values of a config.json with the type that the key must have."""

    def __init__(self, config: dict[str, Any], where: str, name: str) -> None:
        self._config, self._where, self._name = config, where, name

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{self._where}: {key!r} is missing; a {self._name} config must have it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}: {key!r} must be a positive integer (found {value!r})")
        return value

    def number(self, key: str, default: float, source: dict[str, Any] | None = None) -> float:
        value = (self._config if source is None else source).get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self._where}: {key!r} must be a positive number (found {value!r})")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key!r} must be true or false (found {value!r})")
        return bool(value)

    def rope_theta(self) -> float:
        """Newer files have it in rope_parameters."""
        return self.number("rope_theta", self.number("rope_theta", 10000.0, _rope(self._config, self._where)))

    def experts(self) -> dict[str, Any]:
        newer = "num_experts" if self._config.get("num_experts") is not None else "num_local_experts"
        return {
            "experts": self.integer(newer),
            "experts_per_token": self.integer("num_experts_per_tok"),
            "expert_ffn_hidden": self.integer("moe_intermediate_size"),
            "norm_topk_prob": self.flag("norm_topk_prob"),
        }


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: 'rope_parameters' and 'rope_scaling' must be objects (found {rope!r})")
    return rope


def _refuse_unsupported(config: dict[str, Any], where: str, architecture: Architecture) -> None:
    """A feature that would change the model's results if it were ignored is an error."""
    rope = _rope(config, where)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ConfigError(f"{where}: rope type {rope_type!r} is not supported; only the default RoPE is")
    if config.get("use_sliding_window"):
        raise ConfigError(f"{where}: sliding-window attention is not supported; set use_sliding_window to false")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {config['hidden_act']!r}; Qwen models use 'silu'")
    if config.get("quantization_config"):
        raise ConfigError(f"{where}: quantised weights are not supported; use the bf16 checkpoint")
    if config.get("qkv_bias") is False and architecture.qkv_bias:
        raise ConfigError(f"{where}: qkv_bias is false; {architecture.kind} is supported with the bias only")
    if architecture.moe:
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ConfigError(f"{where}: dense layers inside a MoE model are not supported (mlp_only_layers)")
