"""`policy.megatron` against the installed Megatron-Core, and the options that need CUDA or Transformer Engine.

`passed_on` checks the fields that the user names: each exists in this version and has a value of its type.
`check_hardware` refuses options that this machine cannot run, with the reason. `ddp_config` and `optimizer_config`
build Megatron's objects; `policy/model/gpt.py` builds its TransformerConfig. An error that Megatron raises while it
builds one is a ConfigError that says so.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import importlib.metadata
import importlib.util
import typing
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dapo.config import ConfigError
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.megatron import cpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
CLASSES: dict[str, type] = {
    "model": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": MegatronOptimizerConfig,
}


def megatron_version() -> str:
    return importlib.metadata.version("megatron-core")


def passed_on(kind: str, policy: PolicyConfig) -> dict[str, Any]:
    """The fields of `policy.megatron.<kind>`, converted to the types of the installed version."""
    given: dict[str, Any] = getattr(policy.megatron, kind)
    if not given:
        return {}
    hints = typing.get_type_hints(CLASSES[kind])
    return {field: _value(f"policy.megatron.{kind}.{field}", field, value, hints) for field, value in given.items()}


def _value(key: str, field: str, value: Any, hints: dict[str, Any]) -> Any:
    if field not in hints or field.startswith("_"):
        near = difflib.get_close_matches(field, hints, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}: megatron-core {megatron_version()} has no such field{advice}")
    value, hint = _plain(value), hints[field]
    members = typing.get_args(hint) or (hint,)
    if torch.dtype in members and value in DTYPES:
        return DTYPES[value]
    for member in members:
        if isinstance(member, type) and issubclass(member, enum.Enum) and value in member.__members__:
            return member[value]
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        wanted = str(getattr(hint, "__name__", hint) if typing.get_origin(hint) is None else hint)
        raise ConfigError(
            f"{key}: expected {wanted.replace('typing.', '')}, found {value!r} ({error.errors()[0]['msg']})"
        ) from None


def _plain(value: Any) -> Any:
    """Without the subclasses with which our YAML reader remembers how numbers were written."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, int) else float(value)


@contextlib.contextmanager
def megatron_refuses(what: str) -> Iterator[None]:
    """Turns the errors of Megatron's own checks into ConfigErrors."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"megatron-core {megatron_version()} refuses the {what} of section policy: {reason}"
        ) from error


# ---- what this machine can run ----


def fusion_provider(te: bool) -> str:
    """The library that adds weight gradients to their buffers inside matrix products; empty when there is none."""
    if cpu.needed():
        return ""
    if te:
        return "Transformer Engine"
    return "apex" if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None else ""


def adam_provider() -> str:
    """The library whose Adam Megatron picks."""
    from megatron.core import optimizer

    return {"transformer_engine": "Transformer Engine", "apex": "apex"}.get(
        optimizer.Adam.__module__.split(".")[0], "torch"
    )


def hardware_needs(policy: PolicyConfig) -> dict[str, str]:
    """Options in use that need CUDA: the key and its value, and what else they need."""
    needs: dict[str, str] = {}
    if policy.fp8.recipe != "none":
        needs[f"fp8.recipe: {policy.fp8.recipe}"] = "te"
    if policy.attention_backend != "auto":
        needs[f"attention_backend: {policy.attention_backend}"] = "te"
    if policy.cp_comm_type:
        needs[f"cp_comm_type: {policy.cp_comm_type}"] = "te"
    if policy.tp_comm_overlap:
        needs["tp_comm_overlap"] = "te"
    if policy.moe.dispatcher == "flex":
        needs[f"moe.dispatcher: flex ({policy.moe.flex_backend})"] = "deep_ep"
    for name in ("permute_fusion", "router_fusion", "grouped_gemm"):
        if getattr(policy.moe, name):
            needs[f"moe.{name}"] = "te"
    if policy.gradient_accumulation_fusion:
        needs["gradient_accumulation_fusion"] = "fusion"
    if policy.optimizer.cpu_offload:
        needs["optimizer.cpu_offload"] = "te"
    elif policy.optimizer.precision_aware:
        needs["optimizer.precision_aware"] = "te"
    if policy.overlap_grad_reduce:
        needs["overlap_grad_reduce"] = "cuda"
    if "moe_act" in policy.recompute_modules:
        needs["recompute_modules: moe_act"] = "te"
    if "layernorm" in policy.recompute_modules and not cpu.needed():  # Megatron reads names of Transformer Engine
        needs["recompute_modules: layernorm"] = "te"
    return needs


def check_hardware(policy: PolicyConfig, te: bool) -> None:
    """Raises ConfigError for an option that this machine cannot run."""
    for option, need in hardware_needs(policy).items():
        missing = _missing(need, te)
        if missing:
            raise ConfigError(f"policy.{option} needs {missing}: remove it, or run where that exists")


def _missing(need: str, te: bool) -> str:
    if cpu.needed():
        return {"cuda": "CUDA", "te": "CUDA and Transformer Engine", "deep_ep": "CUDA and DeepEP"}.get(
            need, "CUDA and Transformer Engine or NVIDIA's apex"
        )
    if need == "te" and not te:
        return "Transformer Engine"
    if need == "fusion" and not fusion_provider(te):
        return "Transformer Engine or NVIDIA's apex"
    if need == "deep_ep" and importlib.util.find_spec("deep_ep") is None:
        return "the package deep_ep (DeepEP)"
    return ""


# ---- Megatron's objects ----


def ddp_config(policy: PolicyConfig, *, on_cuda: bool, replicas: int) -> DistributedDataParallelConfig:
    """`replicas`: data × context ranks, over which gradients are summed and the distributed optimizer is sharded."""
    overlap = on_cuda if policy.overlap_grad_reduce is None else policy.overlap_grad_reduce
    gather = policy.overlap_param_gather
    if gather is None:
        gather = overlap and policy.distributed_optimizer and replicas > 1
    with megatron_refuses("DistributedDataParallelConfig"):
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=policy.gradient_reduction == "fp32",
            overlap_grad_reduce=overlap,
            overlap_param_gather=gather,
            use_distributed_optimizer=policy.distributed_optimizer,
            average_in_collective=False,
            **passed_on("ddp", policy),
        )


def optimizer_config(policy: PolicyConfig) -> MegatronOptimizerConfig:
    ours, fp8 = policy.optimizer, policy.fp8.recipe
    options: dict[str, Any] = {}
    if ours.cpu_offload:
        options |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": ours.cpu_offload}
    if ours.precision_aware or ours.cpu_offload:  # offloading is part of Megatron's precision-aware optimizer
        options |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": DTYPES[policy.gradient_reduction],
            "main_params_dtype": DTYPES[ours.main_params_dtype],
            "exp_avg_dtype": DTYPES[ours.exp_avg_dtype],
            "exp_avg_sq_dtype": DTYPES[ours.exp_avg_sq_dtype],
            "store_param_remainders": False,  # checkpoints hold whole main weights
        }
    with megatron_refuses("OptimizerConfig"):
        return MegatronOptimizerConfig(
            optimizer="adam",
            lr=ours.lr,
            min_lr=ours.min_lr,
            weight_decay=ours.weight_decay,
            adam_beta1=ours.beta1,
            adam_beta2=ours.beta2,
            adam_eps=ours.eps,
            clip_grad=ours.grad_clip,
            bf16=policy.precision == "bf16",
            params_dtype=DTYPES[policy.precision],
            fp8_recipe=None if fp8 == "none" else fp8,
            use_distributed_optimizer=policy.distributed_optimizer,
            **options,
            **passed_on("optimizer", policy),
        )


# What `train --dry-run` says about Megatron's options, after it has checked them against the installed version.
