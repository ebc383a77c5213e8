"""The shape of a model, read from its HF config.json as transformers reads it, with the same defaults. A value that
changes transformers' results and that we do not compute is an error, and so are two keys that contradict each other.
Imports no torch, so planners and checks can use it.

`config/families` has what differs between families. tests/config/test_hf_fields.py changes every field of every family
and compares the logits with transformers'.

Rotary embeddings may be scaled for contexts longer than those of pre-training. YaRN (arXiv 2309.00071) divides the
frequencies of slow channels by `factor`, keeps those of fast channels, and goes linearly from one to the other between
two channels. It also scales queries and keys. Llama 3 interpolates between wavelengths instead.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.config.families import FAMILIES, Family, architecture_of, find_family
from megatron_dapo.errors import ConfigError


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


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Wavelengths above original_positions / low grow by `factor`; those below original_positions / high stay."""

    factor: float
    original_positions: int
    low: float
    high: float
    attention_factor: float = 1.0


RopeScaling = Yarn | Llama3Rope


def _scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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

_INTEGER, _NUMBER, _FLAG, _NULL = (int,), (int, float), (bool,), type(None)
# Types of keys that do not change the results. transformers does not load a model with another one.
_TYPES: dict[str, tuple[type, ...]] = {
    "architectures": (list, _NULL), "attention_dropout": _NUMBER, "bos_token_id": (int, _NULL),
    "chunk_size_feed_forward": _INTEGER, "dtype": (str, _NULL), "eos_token_id": (int, list, _NULL),
    "id2label": (dict, _NULL), "image_token_id": _INTEGER, "initializer_range": (float,), "is_encoder_decoder": _FLAG,
    "label2id": (dict, _NULL), "mlp_only_layers": (list, _NULL),
    "max_window_layers": _INTEGER, "output_hidden_states": (bool, _NULL), "output_router_logits": _FLAG,
    "pad_token_id": (int, _NULL), "pretraining_tp": (int, _NULL), "problem_type": (str, _NULL),
    "router_aux_loss_coef": (float,), "sliding_window": (int, _NULL),
    "torch_dtype": (str, _NULL), "use_cache": _FLAG, "use_sliding_window": _FLAG,
    "video_token_id": _INTEGER,
}  # fmt: skip
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Keys with only one supported value in every family; without them it is the value.
_FIXED = {"hidden_act": "silu", "is_causal": True, "return_dict": True}
_ABSENT = ("attention_chunk_size", "mlp_layer_types", "per_layer_config")  # would change layers one by one
_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}  # older names


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model that the trainer, the converters and the planner need."""

    architecture: str  # `Family.model_type`
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
    dense_layers: tuple[int, ...] = ()  # numbers, from 0, of the layers without experts in a model that has them
    rotary_dim: int = 0  # channels of a head that are rotated; 0: all
    rope_scaling: RopeScaling | None = None
    linear: LinearAttention | None = None
    attention_gate: bool = False
    zero_centred_norms: bool = False
    prefix: str = "model."  # of the HF names of the text model
    carried: tuple[str, ...] = ()  # prefixes of HF tensors that are neither trained nor synced
    head: Literal["value"] | None = None  # value: one number per token instead of logits
    # What follows from the fields above.
    linear_layers: tuple[int, ...] = field(init=False, repr=False)
    attention_layers: int = field(init=False, repr=False)  # the number of layers with softmax attention
    rotated: int = field(init=False, repr=False)  # channels of a head
    is_moe: bool = field(init=False, repr=False)
    moe_layers: int = field(init=False, repr=False)  # the number of layers with experts
    layers_differ: bool = field(init=False, repr=False)  # checkpoints then have one tensor per layer
    has_shared_expert: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        linear = self.linear.layers if self.linear else ()
        derived = {
            "linear_layers": linear, "attention_layers": self.layers - len(linear),
            "rotated": self.rotary_dim or self.head_dim, "is_moe": self.experts > 0,
            "has_shared_expert": self.shared_ffn_hidden > 0, "layers_differ": bool(linear or self.dense_layers),
            "moe_layers": self.layers - len(self.dense_layers) if self.experts else 0,
        }  # fmt: skip
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def has_experts(self, layer: int) -> bool:
        """`layer`: its number, from 0."""
        return self.is_moe and layer not in self.dense_layers

    @property
    def moe_pattern(self) -> int | list[int]:
        """Megatron's `moe_layer_freq`: 1 if all layers have experts, else which of them do."""
        return [int(self.has_experts(layer)) for layer in range(self.layers)] if self.dense_layers else 1

    @classmethod
    def from_dir(cls, path: str | Path, *, weights_only: bool = False) -> ModelShape:
        """`weights_only`: for conversion, accept features that change the computation but not the weights."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except FileNotFoundError:
            megatron = (file.parent / "latest_checkpointed_iteration.txt").exists()
            hint = "; a Megatron checkpoint belongs into policy.megatron_checkpoint" if megatron else ""
            hint = "; first megatron-dapo convert megatron-to-hf" if (file.parent / "checkpoints").exists() else hint
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
        family = _family(config, where)
        if family.text_config:
            config = _text_config(config, where)
        read = _Reader(config, where, family)
        read.check_fields()
        if not weights_only:
            read.check_trained()
        heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
        layers, head_dim = read.integer("num_hidden_layers"), read.integer("head_dim", derived=hidden // heads)
        read.check_layer_types(layers)
        read.check_heads(hidden, heads, head_dim)
        experts = read.experts(layers) if family.moe else {}
        found = cls(
            architecture=family.model_type,
            layers=layers,
            hidden=hidden,
            ffn_hidden=read.feed_forward(experts),
            heads=heads,
            kv_heads=read.kv_heads(heads),
            head_dim=head_dim,
            vocab=read.integer("vocab_size"),
            max_positions=read.integer("max_position_embeddings"),
            rope_theta=read.rope_theta(),
            rope_scaling=None if weights_only else read.rope_scaling(),
            norm_eps=read.norm_eps(),
            tied_embeddings=read.flag("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            dtype=read.dtype(),
            **experts,
            **(read.linear_attention(layers, head_dim) if family.linear_projections else {}),
            attention_gate=family.attention_gate,
            zero_centred_norms=family.zero_centred_norms,
            prefix=family.prefix,
            carried=family.carried,
        )
        return found.as_value_model() if str(architecture_of(config)).endswith(VALUE_CLASSES) else found

    def as_value_model(self) -> ModelShape:
        """The same layers with a value head."""
        return replace(self, head="value", tied_embeddings=False)


def _family(config: dict[str, Any], where: str) -> Family:
    name, family = architecture_of(config), find_family(config)
    classes = {family.architecture, *value_classes(family)} if family else set()
    if family is None or (name is not None and name not in classes):
        needed = NOT_SUPPORTED.get(name, "") if isinstance(name, str) else ""
        kind = f" of model_type {config['model_type']!r}" if "model_type" in config else ""
        known = ", ".join(known.architecture for known in FAMILIES.values())
        raise ConfigError(f"{where}: architecture {name!r}{kind} is not supported{needed}; supported are {known}")
    return family


VALUE_CLASSES = ("ForTokenClassification", "ForSequenceClassification")  # critics and reward models, of one label


def value_classes(family: Family) -> list[str]:
    """transformers' classes of this family that have a value head, its exported critics first."""
    return [family.architecture.replace("ForCausalLM", ending) for ending in VALUE_CLASSES]


class _Reader:
    """Reads values of a config.json with the type that the key must have."""

    def __init__(self, config: dict[str, Any], where: str, family: Family) -> None:
        self._config = config
        self._where = where
        self._family = family
        for other, key in family.aliases.items():
            self._same(key, other)
            if other in config:
                self._config = {key: config[other]} | config
        self._rope = self._rope_parameters()

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self._where}: {text}")

    def _same(self, key: str, other: str) -> None:
        config = self._config
        if key in config and other in config and config[key] != config[other]:
            raise self.fail(f"{key!r} is {config[key]!r}, but {other!r} is {config[other]!r}; remove one of them")

    def integer(self, key: str, *, derived: int | None = None) -> int:
        """`derived`: the value if the key is missing and the family has no default, or if it is null."""
        defaults, nullable = self._family.defaults, key in self._family.nullable
        value = self._config.get(key, defaults.get(key))
        if value is None and derived is not None and (nullable or key not in self._config):
            value = derived
        if value is None and key not in defaults:
            name = self._family.architecture
            raise self.fail(f"{key!r} is missing; a {name} config must have it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key!r} must be a positive integer (found {value!r})")
        return value

    def kv_heads(self, heads: int) -> int:
        found = self.integer("num_key_value_heads", derived=heads)
        if heads % found:
            raise self.fail(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({found})")
        return found

    def check_heads(self, hidden: int, heads: int, head_dim: int) -> None:
        if head_dim % 2:
            raise self.fail(f"heads have {head_dim} channels; rotary positions need an even number")
        if self._family.hidden_by_heads and hidden % heads:
            raise self.fail(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")

    def number(self, source: dict[str, Any], key: str, default: float | None = None, what: str = "") -> float:
        value = source.get(key) if source.get(key) is not None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(f"{key!r}{what} must be a positive number (found {value!r})")
        return float(value)

    def norm_eps(self) -> float:
        value = self._config.get("rms_norm_eps", 1e-6)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self.fail(f"'rms_norm_eps' must be a positive float (found {value!r})")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, self._family.defaults.get(key, default))
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} must be true or false (found {value!r})")
        return value

    def dtype(self) -> str:
        self._same("dtype", "torch_dtype")
        found = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        if found not in _DTYPES:
            raise self.fail(f"'dtype' is {found!r}; expected one of {', '.join(_DTYPES)}")
        return str(found)

    def feed_forward(self, experts: dict[str, Any]) -> int:
        """A model without dense layers may not have it."""
        derived = None if experts.get("dense_layers") else experts.get("expert_ffn_hidden")
        return self.integer("intermediate_size", derived=derived)

    # ---- what is refused ----

    def check_fields(self) -> None:
        """A value that would change the model's results, or that transformers does not accept, is an error."""
        config = self._config
        for key, value in (_FIXED | dict(self._family.fixed)).items():
            if config.get(key, value) is not value and config[key] != value:
                raise self.fail(f"{key} is {config[key]!r}; {self._family.model_type} is supported with {value!r} only")
        for key in _ABSENT:
            if config.get(key) is not None:
                raise self.fail(f"{key} is not supported; all layers must follow from the other keys")
        _check_types(config, self._where)
        rotated = self._family.defaults.get("partial_rotary_factor", 1.0)
        if rotated == 1.0 and self._rope_value("partial_rotary_factor", 1.0) != 1.0:
            raise self.fail(f"partial_rotary_factor is not supported; {self._family.model_type} rotates all channels")
        if (quantisation := config.get("quantization_config")) and (
            not isinstance(quantisation, dict)
            or quantisation.get("quant_method") != "fp8"
            or quantisation.get("weight_block_size") != [128, 128]
        ):
            raise self.fail("quantised weights are not supported, except fp8 in blocks of 128; use the bf16 checkpoint")

    def check_trained(self) -> None:
        """Features that the converters carry through but that training would compute differently."""
        if self._config.get("quantization_config"):
            raise self.fail("quantised weights are not trained; convert them to Megatron and back: they become bf16")
        kind = self._rope_type()
        if kind not in ("default", "yarn", "llama3"):
            raise self.fail(
                f"rope type {kind!r} is not supported in training; 'default', 'yarn' and 'llama3' are. The model can "
                "be converted; to train it at its original length, remove rope_scaling"
            )
        key = self._family.window_key
        window = self._config.get(key, self._family.defaults.get(key))
        if window is not None and window is not False:
            other = "null" if key == "sliding_window" else "false"
            raise self.fail(
                f"{key} is {window!r}: sliding-window attention is not supported in training; set it to {other}"
            )

    def check_layer_types(self, layers: int) -> tuple[str, ...]:
        types = self._config.get("layer_types")
        if types is None:
            return ()
        known = ("full_attention", "linear_attention") if self._family.linear_projections else ("full_attention",)
        found = tuple(_LAYERS.get(str(kind), str(kind)) for kind in types) if isinstance(types, list) else ()
        if len(found) != layers or not set(found) <= set(known):
            raise self.fail(f"'layer_types' must name {' or '.join(known)} for each of {layers} layers")
        return found

    # ---- rotary positions ----

    def _rope_parameters(self) -> dict[str, Any]:
        """Older files have `rope_scaling`, newer ones `rope_parameters`; transformers prefers the older."""
        keys = ("rope_scaling", "rope_parameters")
        for rope in (self._config[key] for key in keys if self._config.get(key) is not None):
            if not isinstance(rope, dict):
                raise self.fail(f"'rope_parameters' and 'rope_scaling' must be objects (found {rope!r})")
            if any(isinstance(value, dict) for value in rope.values()):
                raise self.fail("'rope_parameters' differ between layers, which is not supported")
            if "type" in rope and "rope_type" in rope and rope["type"] != rope["rope_type"]:
                raise self.fail(f"rope type {rope['type']!r} ('type') and {rope['rope_type']!r} ('rope_type') differ")
        found = [self._config[key] for key in keys if self._config.get(key)]
        if len(found) == 2 and found[0] != found[1]:
            raise self.fail(f"'rope_scaling' is {found[0]}, but 'rope_parameters' is {found[1]}; remove one of them")
        return found[0] if found else {}

    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type", self._rope.get("type", "default")))

    def _rope_value(self, key: str, default: float) -> float:
        """Both levels may have it; transformers prefers `rope_parameters`."""
        levels = [source for source in (self._rope, self._config) if source.get(key) is not None]
        values = [self.number(source, key) for source in levels]
        if len(set(values)) > 1:
            raise self.fail(f"{key!r} is {values[1]}, but {values[0]} in 'rope_parameters'; remove one of them")
        return values[0] if values else default

    def rope_theta(self) -> float:
        return self._rope_value("rope_theta", 10000.0)

    def rope_scaling(self) -> RopeScaling | None:
        kind = self._rope_type()
        if kind == "default":
            return None
        what, length = f" of rope type {kind!r}", self.integer("max_position_embeddings")
        original = int(self._rope_value("original_max_position_embeddings", length))
        rope = self._rope

        def number(key: str, default: float | None = None) -> float:
            return self.number(rope, key, default, what)

        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise self.fail(f"'high_freq_factor' ({high}) must be greater than 'low_freq_factor' ({low})")
            return Llama3Rope(number("factor"), original, low, high)
        implied = length / original if "factor" in rope and rope.get("original_max_position_embeddings") else None
        factor = number("factor", implied)
        if rope.get("attention_factor") is not None:
            attention = number("attention_factor")
        elif rope.get("mscale") and rope.get("mscale_all_dim"):
            attention = _scale(factor, number("mscale")) / _scale(factor, number("mscale_all_dim"))
        else:
            attention = _scale(factor)
        fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
        return Yarn(factor, original, attention, fast, slow, rope.get("truncate", True) is not False)

    # ---- layers of some families ----

    def linear_attention(self, layers: int, head_dim: int) -> dict[str, Any]:
        every = self.integer("full_attention_interval")
        types = self.check_layer_types(layers) or [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        linear = LinearAttention(
            layers=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
            key_heads=self.integer("linear_num_key_heads"),
            value_heads=self.integer("linear_num_value_heads"),
            key_dim=self.integer("linear_key_head_dim"),
            value_dim=self.integer("linear_value_head_dim"),
            conv_width=self.integer("linear_conv_kernel_dim"),
            fused=self._family.linear_projections == "fused",
        )
        if linear.value_heads % linear.key_heads:
            raise self.fail(
                f"linear_num_value_heads ({linear.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({linear.key_heads})"
            )
        share = self._rope_value("partial_rotary_factor", self._family.defaults["partial_rotary_factor"])
        return {"linear": linear, "rotary_dim": int(head_dim * share)}

    def experts(self, layers: int) -> dict[str, Any]:
        dense = self._dense_layers(layers)
        if len(dense) == layers:
            return {}
        shared = "shared_expert_intermediate_size"
        return {
            "experts": self.integer("num_experts"),
            "experts_per_token": self.integer("num_experts_per_tok"),
            "expert_ffn_hidden": self.integer("moe_intermediate_size"),
            "norm_topk_prob": self._family.normalised_experts or self.flag("norm_topk_prob", False),
            "shared_ffn_hidden": self.integer(shared) if self._family.shared_expert else 0,
            "dense_layers": dense,
        }

    def _dense_layers(self, layers: int) -> tuple[int, ...]:
        if "decoder_sparse_step" not in self._family.defaults:
            return ()
        step, named = self.integer("decoder_sparse_step"), self._config.get("mlp_only_layers") or ()
        return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def _check_types(config: dict[str, Any], where: str) -> None:
    for key, types in _TYPES.items():
        value = config.get(key, None if _NULL in types else types[0]())
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            words = " or ".join("null" if kind is _NULL else kind.__name__ for kind in types)
            raise ConfigError(f"{where}: {key!r} must be of type {words} (found {value!r})")
    if not all(str(key).isdigit() for key in config.get("id2label") or ()):
        raise ConfigError(f"{where}: the keys of 'id2label' must be numbers")
    for key in config:
        number = config[key] if key.endswith(("_dropout", "initializer_range")) else 0
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise ConfigError(f"{where}: {key!r} must be a number between 0 and 1 (found {number!r})")


def _text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The text model of a model with a vision tower; some keys may be at either level."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: 'text_config' is missing; a model with a vision tower must have it")
    _check_types(config, where)
    for key in ("layer_types", "rope_parameters"):
        if config.get(key) is not None:
            raise ConfigError(f"{where}: {key!r} belongs into 'text_config'")
    if config.get("return_dict", True) is not True:
        raise ConfigError(f"{where}: return_dict must be true")
    tied = "tie_word_embeddings"
    if config.get(tied, False) != text.get(tied, config.get(tied, False)):
        raise ConfigError(
            f"{where}: {tied!r} is {config.get(tied, False)!r}, but {text[tied]!r} in 'text_config'; they must agree"
        )
    keys = (tied, "dtype", "torch_dtype", "quantization_config")
    shared = {key: config[key] for key in keys if config.get(key) is not None}
    return shared | text
