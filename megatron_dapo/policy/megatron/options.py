"""Megatron-Core's configuration objects, made from section `policy`, and what `train --dry-run` says about them.

`passed_on` checks the fields of `policy.megatron`: each exists in the installed version and has a value of its type.
`check_hardware` refuses options that this machine cannot run, with the reason. An error that Megatron raises while it
builds an object is a ConfigError that says so.

`check_options` builds every object that the run will give to Megatron, so that Megatron's own checks run too. On a
machine without CUDA, such as a login node, options that need it are left out and listed as not checked.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import importlib.metadata
import importlib.util
import math
import typing
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.config.policy import MoEConfig, PolicyConfig
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


_use_torch_layers = False


@contextlib.contextmanager
def torch_layers() -> Iterator[None]:
    """Models that are built meanwhile have our layers, even where Transformer Engine is installed."""
    global _use_torch_layers
    before, _use_torch_layers = _use_torch_layers, True
    try:
        yield
    finally:
        _use_torch_layers = before


def layers_for(policy: PolicyConfig) -> contextlib.AbstractContextManager[None]:
    """Transformer Engine's linear layers contain the norm, so an adapter could not see its input: LoRA uses ours. So
    does a forward pass with the kernels of SGLang's servers."""
    return torch_layers() if policy.lora.rank or policy.uses_exact_kernels else contextlib.nullcontext()


def has_transformer_engine() -> bool:
    """Transformer Engine is used on CUDA where it is installed. A broken installation is an error, not a fallback."""
    if _use_torch_layers or cpu.needed() or importlib.util.find_spec("transformer_engine") is None:
        return False
    import transformer_engine.pytorch  # noqa: F401

    return True


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
    if policy.true_on_policy and policy.uses_exact_kernels == cpu.needed():
        missing = "fp32 on a machine without CUDA" if cpu.needed() else "bf16 on a machine with CUDA"
        raise ConfigError(f"policy.true_on_policy needs policy.precision {missing}")
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


def transformer_config(shape: ModelShape, policy: PolicyConfig) -> TransformerConfig:
    dtype = DTYPES[policy.precision]
    on_cpu, te = cpu.needed(), has_transformer_engine()
    options: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_output_gate": shape.attention_gate,
        "layernorm_zero_centered_gamma": shape.zero_centred_norms,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": policy.precision == "bf16",
        # Sums per rank, divided once by the global count: the exact normaliser (see step.py).
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": policy.tensor_parallel,
        "pipeline_model_parallel_size": policy.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": policy.virtual_pipeline if policy.virtual_pipeline > 1 else None,
        "context_parallel_size": policy.context_parallel,
        "expert_model_parallel_size": policy.expert_parallel,
        "expert_tensor_parallel_size": policy.expert_tensor_parallel,
        "sequence_parallel": policy.uses_sequence_parallel,
        # Packed micro-batches differ in length. Only pipeline stages need to know.
        "variable_seq_lengths": policy.pipeline_parallel > 1,
        "moe_token_dispatcher_type": policy.moe.dispatcher,
        "use_cpu_initialization": on_cpu,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": uses_gradient_fusion(policy, te),
        "apply_rope_fusion": te,
        "bias_activation_fusion": not on_cpu and not policy.uses_exact_kernels,
        "bias_dropout_fusion": False,
        "tp_comm_overlap": policy.tp_comm_overlap,
        "cp_comm_type": policy.cp_comm_type,
        "deterministic_mode": policy.is_deterministic,
        "attention_backend": AttnBackend[policy.attention_backend],
        **_pipeline_options(policy, on_cpu),
        **_recompute_options(policy),
        **_fp8_options(policy),
    }
    if te and shape.rope_scaling:
        options["softmax_scale"] = _scaled_softmax(shape, shape.rope_scaling.attention_factor)
    if shape.is_moe:
        options |= _moe_options(shape, policy, te)
    if shape.linear:  # checkpoints then have one tensor per layer
        options["linear_attention_freq"] = [int(layer in shape.linear.layers) for layer in range(shape.layers)]
    with megatron_refuses("TransformerConfig"):
        return TransformerConfig(**(options | passed_on("model", policy)))


def _scaled_softmax(shape: ModelShape, factor: float) -> float:
    """Transformer Engine's rotation cannot scale, so the scores are scaled: the same if every channel is rotated."""
    if shape.rotated < shape.head_dim and factor != 1:
        raise ConfigError(
            f"YaRN with an attention factor of {factor:.3g} on {shape.rotated} of "
            f"{shape.head_dim} channels of a head is not supported with Transformer Engine; remove rope_scaling from "
            "config.json, or set attention_factor to 1 in it (also for the engine)"
        )
    return factor**2 / math.sqrt(shape.head_dim)


def uses_gradient_fusion(policy: PolicyConfig, te: bool) -> bool:
    wanted = policy.gradient_accumulation_fusion
    return bool(fusion_provider(te)) if wanted is None else wanted


def _pipeline_options(policy: PolicyConfig, on_cpu: bool) -> dict[str, Any]:
    stages = {
        "num_layers_in_first_pipeline_stage": policy.first_stage_layers,
        "num_layers_in_last_pipeline_stage": policy.last_stage_layers,
    }
    if policy.virtual_pipeline > 1:
        # Batched p2p gives wrong results for interleaved stages on two ranks, without an error. On gloo, a send may
        # read an output after it was deallocated.
        p2p = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": not on_cpu}
    else:
        p2p = {"overlap_p2p_comm": False, "batch_p2p_comm": True, "deallocate_pipeline_outputs": True}
    return stages | p2p


def _recompute_options(policy: PolicyConfig) -> dict[str, Any]:
    if policy.recompute == "none":
        return {}
    if policy.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(policy.recompute_modules)}
    method, layers = ("uniform", 1) if policy.recompute_layers is None else ("block", policy.recompute_layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def _fp8_options(policy: PolicyConfig) -> dict[str, Any]:
    fp8 = policy.fp8
    if fp8.recipe == "none":
        return {}
    return {"fp8": fp8.format, "fp8_recipe": fp8.recipe, "first_last_layers_bf16": fp8.first_last_layers_bf16}


def _moe_options(shape: ModelShape, policy: PolicyConfig, te: bool) -> dict[str, Any]:
    moe = policy.moe
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        "moe_layer_freq": shape.moe_pattern,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_hidden or None,
        "moe_shared_expert_gate": shape.has_shared_expert,
        # Softmax over the selected experts equals normalising their probabilities afterwards.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        # Ours is exact for every layout and micro-batch split (see router.py).
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": te if moe.grouped_gemm is None else moe.grouped_gemm,
        "moe_permute_fusion": te if moe.permute_fusion is None else moe.permute_fusion,
        "moe_router_fusion": moe.router_fusion,
        "moe_flex_dispatcher_backend": moe.flex_backend,
    }


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


# ---- the report ----


def check_options(policy: PolicyConfig, shape: ModelShape) -> list[str]:
    """Raises ConfigError for an option that the installed Megatron does not take; else returns the lines to print."""
    with layers_for(policy):
        return _checked_options(policy, shape)


def _checked_options(policy: PolicyConfig, shape: ModelShape) -> list[str]:
    te, on_cuda = has_transformer_engine(), not cpu.needed()
    unchecked = [] if on_cuda else list(hardware_needs(policy))
    if on_cuda:
        check_hardware(policy, te)
    portable = _without_hardware(policy) if unchecked else policy
    transformer_config(shape, portable)
    ddp_config(portable, on_cuda=on_cuda, replicas=1)
    optimizer_config(portable)
    lines = [f"megatron-core {megatron_version()}: {', '.join(_machine(policy, te))}"]
    for kind in CLASSES:
        options = passed_on(kind, policy)
        if options:
            shown = ", ".join(f"{field}={value}" for field, value in options.items())
            lines.append(f"policy.megatron.{kind} ({CLASSES[kind].__name__}): {shown}")
    if unchecked:
        lines.append(f"not checked here, because this machine has no CUDA: policy.{', policy.'.join(unchecked)}")
    return lines


def _machine(policy: PolicyConfig, te: bool) -> list[str]:
    fused = uses_gradient_fusion(policy, te)
    return [
        f"layers of {'Transformer Engine' if te else 'torch'}",
        f"Adam of {adam_provider()}",
        f"gradient accumulation fusion {'by ' + fusion_provider(te) if fused else 'off'}",
    ]


def _without_hardware(policy: PolicyConfig) -> PolicyConfig:
    """With the defaults of everything in `hardware_needs`."""
    defaults = PolicyConfig()
    modules = [module for module in policy.recompute_modules if module != "moe_act"]
    dispatcher = "alltoall" if policy.moe.dispatcher == "flex" else policy.moe.dispatcher
    state = ("cpu_offload", "precision_aware", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    plain = {name: getattr(defaults.optimizer, name) for name in state}
    of_cuda = ("fp8", "attention_backend", "cp_comm_type", "tp_comm_overlap", "gradient_accumulation_fusion")
    return policy.model_copy(
        update={name: getattr(defaults, name) for name in of_cuda}
        | {"recompute_modules": modules or ["core_attn"], "moe": MoEConfig(dispatcher=dispatcher)}
        | {"optimizer": policy.optimizer.model_copy(update=plain)}
    )
