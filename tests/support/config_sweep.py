"""Changes every field of a HF config.json, one at a time, and compares our model with transformers'.

The fields are those of transformers' config class, and the attributes that its modeling code reads: a new field of
either is swept without a change here. Each mutated directory is opened by both: by `from_pretrained`, and by
`ModelShape.from_dir` with `load_hf_weights`. Either the logits are equal, or we refuse."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.config.families import FAMILIES
from megatron_dapo.errors import UserError
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model.gpt import build_model
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.weights.model_weights import load_hf_weights

TOKENS = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "initializer_range": 0.08,
    "sliding_window": None, "pad_token_id": 3, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
          "num_position_embeddings": 16}  # fmt: skip
# transformers sets these itself, or they are no settings of a model.
NOT_SWEPT = {"vision_config", "text_config", "transformers_version", "quantization_config"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 100.0}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}


def without(rope: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key not in keys}


# Several keys at a time, where one of them is another's older spelling.
TOGETHER: dict[str, dict[str, Any]] = {
    "default beside yarn": {"rope_parameters": DEFAULT, "rope_scaling": YARN},
    "yarn beside default": {"rope_parameters": YARN, "rope_scaling": DEFAULT},
    "two yarns": {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 8.0}},
    "empty beside yarn": {"rope_parameters": YARN, "rope_scaling": {}},
    "yarn, old style": {"rope_parameters": None, "rope_scaling": without(YARN, "rope_theta"), "rope_theta": 100.0},
    "yarn by type": {"rope_parameters": None, "rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}},
    "types differ": {"rope_parameters": YARN | {"type": "linear"}},
    "theta twice": {"rope_parameters": DEFAULT, "rope_theta": 50.0},
    "theta at the top": {"rope_parameters": without(DEFAULT, "rope_theta"), "rope_theta": 50.0},
    "theta alone": {"rope_parameters": None, "rope_theta": 50.0},
    "share twice": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
    "share at the top": {"rope_parameters": DEFAULT, "partial_rotary_factor": 0.5},
    "share below": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
    "share of yarn": {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    "original length at the top": {"rope_parameters": YARN, "original_max_position_embeddings": 32},
    "original length below": {"rope_parameters": YARN | {"original_max_position_embeddings": 32}},
    "no original length": {"rope_parameters": without(YARN, "original_max_position_embeddings")},
    "no factor": {"rope_parameters": without(YARN, "factor")},
    "scaled attention": {"rope_parameters": YARN | {"attention_factor": 1.3}},
    "mscale": {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7}},
    "betas": {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}},
    "not truncated": {"rope_parameters": YARN | {"truncate": False}},
    "nested": {"rope_parameters": {"full_attention": YARN}},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3, old style": {"rope_parameters": None, "rope_scaling": without(LLAMA3, "rope_theta"), "rope_theta": 100.0},
    "llama3 without its length": {"rope_parameters": without(LLAMA3, "original_max_position_embeddings")},
    "llama3, other frequencies": {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0}},
    "linear": {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 2.0}},
    "proportional": {"rope_parameters": DEFAULT | {"rope_type": "proportional"}},
    "window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "window of late layers": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28},
    "window of no use": {"use_sliding_window": False, "sliding_window": 4},
    "window alone": {"sliding_window": 4},
    "all layers slide": {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": 4},
    "a linear layer": {"layer_types": ["linear_attention"] + ["full_attention"] * 3},
    "full layers": {"layer_types": ["full_attention"] * 4},
    "old names of layers": {"layer_types": ["attention"] * 4},
    "every third layer": {"layer_types": None, "full_attention_interval": 3},
    "dense layers": {"mlp_only_layers": [1]},
    "sparse layers": {"decoder_sparse_step": 2},
    "both": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "mlp layer types": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "local experts": {"num_experts": 4, "num_local_experts": 2},
    "other name of experts": {"num_experts": None, "num_local_experts": 4},
    "per layer": {"per_layer_config": {"1": {"intermediate_size": 24}}},
    "dtypes": {"dtype": "float32", "torch_dtype": "bfloat16"},
    "tied": {"tie_word_embeddings": True},
}  # fmt: skip
# What was once different without a word.
ALWAYS = ("default beside yarn", "theta twice", "share twice", "tied", "tied at the top only", "norm_topk_prob=absent",
          "is_causal=False", "hidden_size=1", "head_dim=absent")  # fmt: skip
GENERIC: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 0.5, -0.5, "abc", [], [1], {}, {"a": 1})


class Absent:
    def __repr__(self) -> str:
        return "absent"


def base_config(model_type: str) -> dict[str, Any]:
    """A tiny model of the family, with every field of its config class."""
    cls = CONFIG_MAPPING[model_type]
    family = FAMILIES[model_type]

    def chosen(of: Any) -> dict[str, Any]:
        return {f.name: SIZES[f.name] for f in dataclasses.fields(of) if f.name in SIZES}

    torch.manual_seed(0)
    if family.text_config:
        text = cls.sub_configs["text_config"]
        config = cls(text_config=chosen(text), vision_config=VISION)
    else:
        config = cls(**chosen(cls))
    found = json.loads(config.to_json_string(use_diff=False))
    return found | {"architectures": [family.architecture], "dtype": "float32"}


def level_of(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    return config["text_config"] if FAMILIES[model_type].text_config else config


def swept_fields(model_type: str) -> list[str]:
    """Fields of the config classes, and attributes that the code of the model and of its masks reads."""
    cls = CONFIG_MAPPING[model_type]
    family = FAMILIES[model_type]
    text = cls.sub_configs["text_config"] if family.text_config else cls
    names = {f.name for f in dataclasses.fields(text)} | set(text.attribute_map) | set(text.attribute_map.values())
    module = inspect.getsource(inspect.getmodule(getattr(transformers, family.architecture)))
    fields = set(names)
    for code in (module, inspect.getsource(masking_utils), inspect.getsource(text)):
        for pattern in (r"\bconfig, \"([a-z]\w+)\"", r"\bconfig\.([a-z]\w+)\b(?!\()", r"kwargs\.\w+\(\"(\w+)\""):
            names |= set(re.findall(pattern, code))
    names -= set(re.findall(r"vision_config\.(\w+)", module)) - fields
    return sorted(names - NOT_SWEPT)


def mutations(model_type: str, base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The mutated configs, by a name that says what was changed."""
    found: dict[str, dict[str, Any]] = {}
    composite = FAMILIES[model_type].text_config

    def add(name: str, change: dict[str, Any], *, top: bool = False) -> None:
        config = copy.deepcopy(base)
        level = config if top else level_of(config, model_type)
        for key, value in change.items():
            level.pop(key, None)
            if not isinstance(value, Absent):
                level[key] = copy.deepcopy(value)
        if config != base:
            found[name] = config

    for field in swept_fields(model_type):
        value = level_of(base, model_type).get(field)
        values: list[Any] = [Absent(), *GENERIC]
        if isinstance(value, bool):
            values = [Absent(), None, not value, 1, "true"]
        elif isinstance(value, int | float):
            values += [value + 1, value * 2, 4096.0]
        for other in values:
            add(f"{field}={other!r}", {field: other})
        if composite:
            for other in (Absent(), None, True, 7):
                add(f"top level: {field}={other!r}", {field: other}, top=True)
    for name, change in TOGETHER.items():
        add(name, change)
    if composite:
        add("tied at the top only", {"tie_word_embeddings": True}, top=True)
        add("theta at the top level", {"rope_theta": 5.0}, top=True)
    return found


class Sweep:
    """The base model of a family on disk, and what both make of a mutated copy."""

    def __init__(self, model_type: str, folder: Path, rendezvous: Rendezvous) -> None:
        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        self.family = FAMILIES[model_type]
        self.folder = folder
        self.base = base_config(model_type)
        folder.mkdir(parents=True)
        model = getattr(transformers, self.family.architecture)(
            CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(self.base))
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
                elif not name.endswith("A_log"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.float().save_pretrained(folder)
        self.policy = parse_config({"policy": {"precision": "fp32"}}).policy
        self.runtime = initialize(self.policy, rendezvous=rendezvous)
        (folder / "config.json").write_text(json.dumps(self.base))
        self.shape = ModelShape.from_dir(folder)
        self.ours = self._our_logits(self.shape)
        self._known = {self.shape: self.ours}

    def _our_logits(self, shape: ModelShape) -> torch.Tensor:
        chunks = build_model(shape, self.policy, self.runtime)
        load_hf_weights(chunks, shape, self.folder)
        positions = torch.arange(TOKENS.shape[1])[None]
        with torch.no_grad():
            return chunks[0](TOKENS, positions, None)[..., : shape.vocab]

    def theirs(self) -> torch.Tensor | Exception:
        try:
            cls = getattr(transformers, self.family.architecture)
            model = cls.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                return model(TOKENS, return_dict=True).logits
        except Exception as error:
            return error

    def outcome(self, config: dict[str, Any]) -> str:
        """'refused', 'equal', 'rejected by transformers only', 'silently different' or a traceback of ours."""
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            shape = ModelShape.from_dir(self.folder)
            if shape not in self._known:
                self._known[shape] = self._our_logits(shape)
            ours = self._known[shape]
        except UserError as error:
            assert "\n" not in str(error), error
            return "refused"
        except Exception as error:
            return f"traceback: {type(error).__name__}: {error}"
        theirs = self.theirs()
        if isinstance(theirs, Exception):
            return f"rejected by transformers only: {type(theirs).__name__}: {str(theirs)[:100]}"
        if theirs.shape != ours.shape:
            return f"silently different: {theirs.shape}, not {ours.shape}"
        gap = float((theirs - ours).abs().max())
        return "equal" if gap < 1e-3 else f"silently different: by {gap:.3g}"


def sweep(rendezvous: Rendezvous, model_type: str, folder: Path, every: int) -> tuple[Counter[str], dict[str, str]]:
    """Counts by outcome, and the mutations whose outcome is wrong. `every`: of so many mutations one is tried."""
    with_base = Sweep(model_type, folder, rendezvous)
    cases = mutations(model_type, with_base.base)
    chosen = [name for i, name in enumerate(cases) if i % every == 0 or name in ALWAYS]
    counts: Counter[str] = Counter(mutated=len(chosen))
    assert with_base.outcome(with_base.base) == "equal"
    wrong = {}
    for name in chosen:
        found = with_base.outcome(cases[name])
        counts[found.split(":")[0]] += 1
        if found not in ("equal", "refused"):
            wrong[name] = found
    return counts, wrong
