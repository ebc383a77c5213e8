"""The shape of a Qwen model, read from its HF config.json. Imports no torch, so planners and checks can use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import ConfigError

ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about the architecture that the trainer, the converters and the planner need."""

    architecture: str  # qwen2 | qwen3 | qwen3_moe
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

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelShape:
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{file} not found: {path} is not a HF model directory") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return cls.from_hf(config, str(file))

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config") -> ModelShape:
        names = config.get("architectures") or [None]
        kind = ARCHITECTURES.get(names[0] or "")
        if kind is None:
            raise ConfigError(
                f"{where}: architecture {names[0]!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise ConfigError(f"{where}: {key!r} is missing; a {names[0]} config must have it")
            return config[key]

        _refuse_unsupported(config, where, kind)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        heads = need("num_attention_heads")
        moe: dict[str, Any] = {}
        if kind == "qwen3_moe":
            moe = {
                "experts": config.get("num_experts") or need("num_local_experts"),  # newer files use the second name
                "experts_per_token": need("num_experts_per_tok"),
                "expert_ffn_hidden": need("moe_intermediate_size"),
                "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
            }
        return cls(
            architecture=kind,
            layers=need("num_hidden_layers"),
            hidden=need("hidden_size"),
            ffn_hidden=need("intermediate_size"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or need("hidden_size") // heads,
            vocab=need("vocab_size"),
            max_positions=config.get("max_position_embeddings", 32768),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind != "qwen2",
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            **moe,
        )


def _refuse_unsupported(config: dict[str, Any], where: str, kind: str) -> None:
    """Features that would change the numbers if they were ignored are errors."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ConfigError(f"{where}: rope type {rope_type!r} is not supported; only the default RoPE is")
    if config.get("use_sliding_window"):
        raise ConfigError(f"{where}: sliding-window attention is not supported; set use_sliding_window to false")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {config['hidden_act']!r}; Qwen models use 'silu'")
    if config.get("quantization_config"):
        raise ConfigError(f"{where}: quantised weights are not supported; use the bf16 checkpoint")
    if kind == "qwen3_moe":
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ConfigError(f"{where}: dense layers inside a MoE model are not supported (mlp_only_layers)")
