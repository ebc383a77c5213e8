"""Reads a configuration: the YAML file, then `--set a.b=c` overrides. Every mistake is an error with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megatron_dapo.config.base import ConfigError, admits
from megatron_dapo.config.schema import Config
from megatron_dapo.config.yaml12 import YamlError, dump_yaml, parse_yaml

# Our keys by the names that other tools, or earlier versions, use (docs/migration.md): the error names ours.
KNOWN_ELSEWHERE = {
    name: ours
    for ours, names in {
        "algorithm.clip_low": "eps_clip epsilon clip_ratio_low ratio_clip_min",
        "algorithm.clip_high": "eps_clip_higher epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
        "algorithm.dual_clip": "clip_ratio_c eps_clip_c c_clip ratio_clip_c",
        "algorithm.aggregation": "loss_agg_mode loss_type token_level_loss calculate_per_token_loss",
        "algorithm.overlong.filter": "overlong_filter overlong_filtering mask_truncated_completions",
        "algorithm.overlong.cache_length": "overlong_tokens soft_cache_length overlong_buffer_length",
        "algorithm.overlong.factor": "overlong_penalty_factor penalty_factor",
        "algorithm.overlong.max_length": "soft_max_length",
        "algorithm.overlong.penalty": "overlong_reward_penalty overlong_buffer",
        "algorithm.kl.coefficient": "kl_loss_coef kl_ctl reference_policy_kl_penalty",
        "algorithm.kl.estimator": "kl_loss_type kl_estimator",
        "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
        "algorithm.off_policy.importance_weight": "use_tis rollout_is use_decoupled_loss",
        "algorithm.off_policy.weight_cap": "tis_clip rollout_is_threshold",
        "algorithm.off_policy.token_mask": "behav_imp_weight_cap behave_imp_weight_cap",
        "rollout.max_staleness": "max_head_offpolicyness",
        "rollout.dynamic_sampling": "dynamic_sample filter_groups use_dynamic_sampling",
        "rollout.group_filter": "dynamic_sampling_filter_path dynamic_filter_fn should_accept_fn",
        "rollout.sampler.fill": "dynamic_bs",
        "rollout.sampler.oversampling": "gen_batch_size over_sampling_batch_size batch_multiplier",
        "rollout.sampler.max_generation_batches": "max_num_gen_batches dynamic_sampling_max_gen_batches",
        "rollout.sampler.unfinished": "partial_rollout",
        "rollout.samples_per_prompt": "n_samples num_generations n_samples_per_prompt num_generations_per_prompt",
        "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens",
        "rollout.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len",
        "policy.tensor_parallel": "tensor_model_parallel_size",
        "policy.pipeline_parallel": "pipeline_model_parallel_size",
        "policy.context_parallel": "context_parallel_size",
        "policy.expert_parallel": "expert_model_parallel_size",
        "policy.micro_batch_tokens": "max_tokens_per_gpu max_tokens_per_mb ppo_max_token_len_per_gpu",
        "policy.model": "hf_checkpoint model_name model_path",
        "policy.optimizer.lr": "learning_rate",
        "policy.optimizer.grad_clip": "clip_grad max_grad_norm gradient_clipping",
        "policy.optimizer.warmup_steps": "lr_warmup_steps",
        "data.path": "train_files prompt_data",
        "observe.samples_responses": "samples_answers",
        "evaluate.data.path": "val_files eval_prompt_data",
        "evaluate.every": "test_freq eval_interval val_period",
        "trainer.mini_batch_prompts": "ppo_mini_batch_size global_batch_size",
        "trainer.prompts_per_step": "train_batch_size rollout_batch_size num_prompts_per_step",
        "trainer.steps": "num_rollout total_training_steps max_num_steps",
        "trainer.checkpoint.every": "save_freq save_interval save_period",
    }.items()
    for name in names.split()
}

# Keys of earlier versions whose last part is a key elsewhere, or says too little to be recognised by itself.
RENAMED = {
    "algorithm.importance_sampling": "algorithm.off_policy",
    "rollout.sampler.max_staleness": "rollout.sampler.max_carryover_staleness",
    "rollout.embedded.rows": "rollout.embedded.batch_tokens",
    "rollout.servers.request_timeout": "rollout.servers.sample_timeout",
}


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in `path` (None: all defaults) with `key.path=value` overrides applied."""
    raw: Any = {}
    where = str(path) if path else "config"
    if path is not None:
        try:
            raw = parse_yaml(Path(path).expanduser().read_text(encoding="utf-8-sig")) or {}
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise ConfigError(f"{path} is a directory; expected a YAML file") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); expected a YAML file") from None
        except YamlError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected sections at the top level, found {type(raw).__name__}")
    for item in overrides:
        apply_override(raw, item)
    return parse_config(raw, where)


def parse_config(raw: dict[str, Any], where: str = "config") -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError(f"{where}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])) from None


def apply_override(raw: dict[str, Any], item: str) -> None:
    """`a.b=c` sets raw["a"]["b"]. The value is read as YAML, unless the key takes text: then it is the text."""
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {item!r}: expected section.key=value, for example --set policy.tensor_parallel=2")
    node = raw
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {item!r}: {part!r} is a value, not a section")
        node = child
    takes_text = admits(_annotation(parts), str)
    try:
        value = parse_yaml(text)
    except YamlError as error:
        if not takes_text:
            raise ConfigError(f"--set {item!r}: the value is not valid YAML: {error}") from None
        value = text.strip()
    node[parts[-1]] = text.strip() if takes_text and not isinstance(value, str | None) else value


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every key written out."""
    return dump_yaml(config.model_dump(mode="json"))


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema."""
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")
        yield f"{prefix}{name}"


def _annotation(parts: list[str]) -> Any:
    """The type of a dotted key; None if there is no such key."""
    model: type[BaseModel] | None = Config
    for part in parts[:-1]:
        field = model.model_fields.get(part) if model else None
        model = _section_of(field.annotation) if field else None
    field = model.model_fields.get(parts[-1]) if model else None
    return field.annotation if field else None


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_suggestion(path)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{path}: {message}" if path else message
    if error["type"] == "model_type":
        return f"{path}: expected a section with keys of its own (found {error['input']!r})"
    hint = "; put it in quotes" if error["type"] == "string_type" and isinstance(error["input"], bool) else ""
    return f"{path}: {message} (found {error['input']!r}{hint})"


def _suggestion(path: str) -> str:
    path = ".".join(part for part in path.split(".") if not part.isdigit())  # positions in a list of sections
    parent, _, leaf = path.rpartition(".")
    if path in RENAMED:
        return f"; it is now called {RENAMED[path]!r}"
    if leaf in KNOWN_ELSEWHERE:
        return f"; here it is called {KNOWN_ELSEWHERE[leaf]!r}"
    keys = list(known_keys())
    siblings = [k for k in keys if k.rpartition(".")[0] == parent]
    leaves = {k.rpartition(".")[2]: k for k in reversed(keys)} | {k.rpartition(".")[2]: k for k in siblings}
    near = difflib.get_close_matches(leaf, leaves, n=1) or difflib.get_close_matches(path, keys, n=1)
    if near:
        return f"; did you mean {leaves.get(near[0], near[0])!r}?"
    return "; known here: " + ", ".join(k.rpartition(".")[2] for k in siblings) if siblings else ""
