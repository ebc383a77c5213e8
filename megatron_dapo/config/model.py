"""The shape of a Qwen model, read from its HF config.json, with its rotary embedding: the default one, or YaRN for
contexts that are longer than those of pre-training. Imports no torch, so planners and checks can use it.

YaRN (arXiv 2309.00071) divides the frequencies of slow channels by `factor`, keeps those of fast channels, and goes
linearly from one to the other between two channels. It also scales queries and keys. The numbers are transformers'.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.config.base import ConfigError


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float
    original_positions: int  # the context of pre-training
    attention_factor: float  # scales rotated queries and rotated keys
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def ramp(self, dim: int, base: float) -> tuple[float, float]:
        """Channel pairs below the first number keep their frequency; from the second on it is divided by `factor`."""

        def channel(rotations: float) -> float:
            return dim * math.log(self.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high if high != low else high + 0.001


def rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: 'rope_parameters' and 'rope_scaling' must be objects (found {rope!r})")
    return rope


def rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def read_yarn(rope: dict[str, Any], max_positions: int, where: str) -> Yarn:
    """The YaRN settings in `rope`. Without `original_max_position_embeddings` it is the model's length."""

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key) if rope.get(key) is not None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{where}: {key!r} of YaRN must be a positive number (found {value!r})")
        return float(value)

    original = int(number("original_max_position_embeddings", max_positions))
    factor = number("factor", max_positions / original if rope.get("original_max_position_embeddings") else None)
    attention = rope.get("attention_factor")
    if attention is not None:
        attention = number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = _scale(factor, number("mscale")) / _scale(factor, number("mscale_all_dim"))
    else:
        attention = _scale(factor)
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    return Yarn(factor, original, attention, fast, slow, rope.get("truncate", True) is not False)


def _scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture's name says about the model, beyond the numbers in its config.json."""

    kind: str
    qkv_bias: bool = False  # always; else where config.json has attention_bias
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


_HYBRID: dict[str, Any] = {"qk_norm": True, "attention_gate": True, "zero_centred_norms": True}
_EXPERTS: dict[str, Any] = {"moe": True, "shared_expert": True, "normalised_experts": True}
# A variant that combines these features is one more line here. New tensors need templates in `weights/mapping.py`.
ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", qkv_bias=True, moe=True, shared_expert=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", qk_norm=True, moe=True),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", moe=True, shared_expert=True, linear_projections="fused", carried=("mtp.",), **_HYBRID
    ),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", linear_projections="separate", carried=("mtp.",), **_HYBRID),
    "Qwen3_5ForConditionalGeneration": Architecture(
        "qwen3_5", linear_projections="separate", text_config=True, carried=("mtp.", "model.visual."), **_HYBRID
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text", linear_projections="separate", carried=("mtp.",), **_HYBRID, **_EXPERTS
    ),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        "qwen3_5_moe",
        linear_projections="separate",
        text_config=True,
        carried=("mtp.", "model.visual."),
        **_HYBRID,
        **_EXPERTS,
    ),
}
SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """The gated DeltaNet layers of a model. A key head serves `value_heads / key_heads` value heads."""

    layers: tuple[int, ...]  # their numbers, from 0
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    fused: bool  # HF stores the rows of each key head together (qkvz, ba)

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of the input projection: q, k, v, z, b, a. The convolution has those of q, k and v."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return keys, keys, values, values, self.value_heads, self.value_heads


_VISION = ": it would need a vision tower, image tokens in prompts and three-dimensional rotary positions in training"
_AUDIO = ": it would need an audio tower and audio tokens in prompts"
# Why, and what it would take; by architecture.
NOT_SUPPORTED = {
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
         "Qwen3VLMoeForConditionalGeneration"),
        _VISION,
    ),
    **dict.fromkeys(
        ("Qwen2AudioForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel",
         "Qwen3OmniMoeForConditionalGeneration"),
        _AUDIO,
    ),
    "QWenLMHeadModel": ": the first Qwen has other names and its own modeling code; use Qwen1.5 or newer",
    "Qwen4ExpForCausalLM": ": it would need hyper-connections, sparse attention and n-gram embeddings in the model",
    "Qwen4ExpForConditionalGeneration": ": it would need hyper-connections, sparse attention and n-gram embeddings",
}  # fmt: skip


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
    rotary_dim: int = 0  # channels of a head that are rotated; 0: all
    yarn: Yarn | None = None
    linear: LinearAttention | None = None
    attention_gate: bool = False
    zero_centred_norms: bool = False
    prefix: str = "model."  # of the HF names of the text model
    carried: tuple[str, ...] = ()  # prefixes of HF tensors that are neither trained nor synced
    # What follows from the fields above.
    linear_layers: tuple[int, ...] = field(init=False, repr=False)
    attention_layers: int = field(init=False, repr=False)  # the number of layers with softmax attention
    rotated: int = field(init=False, repr=False)  # channels of a head
    is_moe: bool = field(init=False, repr=False)
    has_shared_expert: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        linear = self.linear.layers if self.linear else ()
        derived = {
            "linear_layers": linear, "attention_layers": self.layers - len(linear),
            "rotated": self.rotary_dim or self.head_dim, "is_moe": self.experts > 0,
            "has_shared_expert": self.shared_ffn_hidden > 0,
        }  # fmt: skip
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dir(cls, path: str | Path, *, weights_only: bool = False) -> ModelShape:
        """`weights_only`: for conversion, accept features that change the computation but not the weights."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except FileNotFoundError:
            megatron = (file.parent / "latest_checkpointed_iteration.txt").exists()
            hint = "; a Megatron checkpoint belongs into policy.megatron_checkpoint" if megatron else ""
            raise ConfigError(f"{file} not found: {path} is not a HF model directory{hint}") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return cls.from_hf(config, str(file), weights_only=weights_only)

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config", *, weights_only: bool = False) -> ModelShape:
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(config).__name__}")
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None:
            needed = NOT_SUPPORTED.get(name, "") if isinstance(name, str) else ""
            raise ConfigError(
                f"{where}: architecture {name!r} is not supported{needed}; supported are {', '.join(ARCHITECTURES)}"
            )
        if architecture.text_config:
            config = _text_config(config, where)
        _refuse_unsupported(config, where, architecture)
        if not weights_only:
            _refuse_untrained(config, where)
        read = _Reader(config, where, str(name))
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        shape = cls(
            architecture=architecture.kind,
            layers=read.integer("num_hidden_layers"),
            hidden=hidden,
            ffn_hidden=read.integer("intermediate_size", default=read.optional("moe_intermediate_size")),
            heads=heads,
            kv_heads=read.integer("num_key_value_heads", default=heads),
            head_dim=read.integer("head_dim", default=hidden // heads),
            vocab=read.integer("vocab_size"),
            max_positions=read.integer("max_position_embeddings", default=32768),
            rope_theta=read.rope_theta(),
            yarn=read.yarn(),
            norm_eps=read.number("rms_norm_eps", default=1e-6),
            tied_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=architecture.qkv_bias or read.flag("attention_bias"),
            qk_norm=architecture.qk_norm,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            **(read.experts(architecture.normalised_experts) if architecture.moe else {}),
            shared_ffn_hidden=read.integer(SHARED) if architecture.shared_expert else 0,
            **(read.linear_attention(architecture.linear_projections) if architecture.linear_projections else {}),
            attention_gate=architecture.attention_gate,
            zero_centred_norms=architecture.zero_centred_norms,
            prefix="model.language_model." if architecture.text_config else "model.",
            carried=architecture.carried,
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
        self._config = config
        self._where = where
        self._name = name
        self._rope = rope_parameters(config, where)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{self._where}: {key!r} is missing; a {self._name} config must have it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}: {key!r} must be a positive integer (found {value!r})")
        return value

    def optional(self, key: str) -> int | None:
        return self.integer(key) if self._config.get(key) is not None else None

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
        return self.number("rope_theta", self.number("rope_theta", 10000.0, self._rope))

    def yarn(self) -> Yarn | None:
        if rope_type(self._rope) != "yarn":
            return None
        return read_yarn(self._rope, self.integer("max_position_embeddings", default=32768), self._where)

    def linear_attention(self, projections: str) -> dict[str, Any]:
        layers = self.integer("num_hidden_layers")
        every = self.integer("full_attention_interval", default=4)
        types = self._config.get("layer_types") or [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        if len(types) != layers or not set(types) <= {"linear_attention", "full_attention"}:
            raise ConfigError(
                f"{self._where}: 'layer_types' must name linear_attention or full_attention for each of {layers} layers"
            )
        linear = LinearAttention(
            layers=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
            key_heads=self.integer("linear_num_key_heads"),
            value_heads=self.integer("linear_num_value_heads"),
            key_dim=self.integer("linear_key_head_dim"),
            value_dim=self.integer("linear_value_head_dim"),
            conv_width=self.integer("linear_conv_kernel_dim", default=4),
            fused=projections == "fused",
        )
        if linear.value_heads % linear.key_heads:
            raise ConfigError(
                f"{self._where}: linear_num_value_heads ({linear.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({linear.key_heads})"
            )
        share = self.number("partial_rotary_factor", self.number("partial_rotary_factor", 0.25, self._rope))
        return {"linear": linear, "rotary_dim": int(self.integer("head_dim") * share)}

    def experts(self, normalised: bool) -> dict[str, Any]:
        newer = "num_experts" if self._config.get("num_experts") is not None else "num_local_experts"
        return {
            "experts": self.integer(newer),
            "experts_per_token": self.integer("num_experts_per_tok"),
            "expert_ffn_hidden": self.integer("moe_intermediate_size"),
            "norm_topk_prob": normalised or self.flag("norm_topk_prob"),
        }


def _text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The text model of a model with a vision tower; some keys may be at either level."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: 'text_config' is missing; a model with a vision tower must have it")
    shared = {
        key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if config.get(key) is not None
    }
    return shared | text


def _refuse_untrained(config: dict[str, Any], where: str) -> None:
    """Features that the converters carry through but that training would compute differently."""
    kind = rope_type(rope_parameters(config, where))
    if kind not in ("default", "yarn"):
        raise ConfigError(
            f"{where}: rope type {kind!r} is not supported in training; 'default' and 'yarn' are. The model can "
            "be converted; to train it at its original length, remove rope_scaling"
        )
    if config.get("use_sliding_window"):
        raise ConfigError(
            f"{where}: sliding-window attention is not supported in training; set use_sliding_window to false"
        )


def _refuse_unsupported(config: dict[str, Any], where: str, architecture: Architecture) -> None:
    """A feature that would change the model's results if it were ignored is an error."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {config['hidden_act']!r}; Qwen models use 'silu'")
    if config.get("quantization_config"):
        raise ConfigError(f"{where}: quantised weights are not supported; use the bf16 checkpoint")
    if config.get("qkv_bias") is False and architecture.qkv_bias:
        raise ConfigError(f"{where}: qkv_bias is false; {architecture.kind} is supported with the bias only")
    if architecture.moe:
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ConfigError(f"{where}: dense layers inside a MoE model are not supported (mlp_only_layers)")
