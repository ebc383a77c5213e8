"""What `train --dry-run` says about Megatron's options, after it has checked them against the installed version.

Every object that the run will give to Megatron is built, so that Megatron's own checks run too. On a machine without
CUDA, such as a login node, options that need it are left out of these objects and listed as not checked.
"""

from __future__ import annotations

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import Fp8Config, MoEConfig, PolicyConfig
from megatron_dapo.policy.megatron import cpu
from megatron_dapo.policy.megatron.options import (
    CLASSES,
    adam_provider,
    check_hardware,
    ddp_config,
    fusion_provider,
    hardware_needs,
    megatron_version,
    optimizer_config,
    passed_on,
)
from megatron_dapo.policy.model.gpt import has_transformer_engine, transformer_config, uses_gradient_fusion


def check_options(policy: PolicyConfig, shape: ModelShape) -> list[str]:
    """Raises ConfigError for an option that the installed Megatron does not take; else returns the lines to print."""
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
    modules = [module for module in policy.recompute_modules if module != "moe_act"]
    return policy.model_copy(
        update={
            "fp8": Fp8Config(),
            "attention_backend": "auto",
            "cp_comm_type": None,
            "tp_comm_overlap": False,
            "gradient_accumulation_fusion": None,
            "recompute_modules": modules or ["core_attn"],
            "moe": MoEConfig(dispatcher="alltoall" if policy.moe.dispatcher == "flex" else policy.moe.dispatcher),
            "optimizer": policy.optimizer.model_copy(
                update={
                    "cpu_offload": 0.0,
                    "precision_aware": False,
                    "main_params_dtype": "fp32",
                    "exp_avg_dtype": "fp32",
                    "exp_avg_sq_dtype": "fp32",
                }
            ),
        }
    )
