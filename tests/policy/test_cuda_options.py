"""Megatron options that need a GPU: they train, and stay near the defaults. On one GPU, with small models."""

import importlib.util
from dataclasses import replace

import pytest

from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.processes.fork_ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(gpu_count() == 0, reason="needs an NVIDIA GPU; this machine has none"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine, which is not installed",
    ),
]

OPTIONS = {
    "no fusion": {"gradient_accumulation_fusion": False},
    "bf16 reduction": {"gradient_reduction": "bf16"},
    "flash": {"attention_backend": "flash"},  # needs the package flash-attn
    "fp8 tensorwise": {"fp8": {"recipe": "tensorwise"}},
    "fp8 blockwise": {"fp8": {"recipe": "blockwise"}},
    "fp8 delayed": {"fp8": {"recipe": "delayed"}},
    "offload": {"optimizer": {"cpu_offload": 1.0}},
    "half offload": {"optimizer": {"cpu_offload": 0.5}},
    "precision-aware": {"optimizer": {"precision_aware": True}},
    "small state": {"optimizer": {"precision_aware": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}},
    "recompute": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "deterministic": {"deterministic": True},
}
MOE_OPTIONS = {
    "no permute fusion": {"moe": {"permute_fusion": False}},
    "no grouped GEMM": {"moe": {"grouped_gemm": False}},
    "router fusion": {"moe": {"router_fusion": True}},
    "recompute": {"recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    "fp8 blockwise": {"fp8": {"recipe": "blockwise"}},
}
FP8 = {"fp8 tensorwise", "fp8 blockwise", "fp8 delayed"}


def make(rendezvous, model, options):
    from megatron_dapo.config import parse_config
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.policy.policy import Policy
    from megatron_dapo.selfcheck.synthetic import random_hf_weights, synthetic_shape

    shape = replace(synthetic_shape(model), hidden=256, ffn_hidden=512, heads=4, kv_heads=2, head_dim=64)
    shape = replace(shape, expert_ffn_hidden=256) if shape.is_moe else shape
    optimizer = {"lr": 1e-4, "warmup_steps": 0, **options.get("optimizer", {})}
    config = parse_config(
        {
            "policy": {"micro_batch_tokens": 512, **options, "optimizer": optimizer},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 32},
        }
    )
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(shape, scale=0.03))
    return policy


def trained(rendezvous, model, options):
    """Losses and gradient norms of three updates, and the sizes of the weights' changes."""
    from megatron_dapo.selfcheck.synthetic import awkward_batch

    policy = make(rendezvous, model, options)
    before = [parameter.detach().float().clone() for parameter in policy.model[0].parameters()]
    metrics = [policy.update(awkward_batch(policy.shape, seed)) for seed in range(3)]
    after = [parameter.detach().float() for parameter in policy.model[0].parameters()]
    changed = sum(float((a - b).abs().sum()) for a, b in zip(after, before, strict=True))
    return [m["loss"] for m in metrics], [m["grad_norm"] for m in metrics], changed


def check(model, name, options):
    losses, norms, changed = run_ranks(1, trained, model, options)[0]
    expected_losses, expected_norms, expected = run_ranks(1, trained, model, {})[0]
    near = 0.15 if name in FP8 else 0.03
    assert losses == pytest.approx(expected_losses, rel=near, abs=near)
    assert norms == pytest.approx(expected_norms, rel=near)
    assert changed == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_dense_model_train_like_the_defaults(name):
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("Transformer Engine's flash backend needs flash-attn, which is not installed")
    check("dense", name, OPTIONS[name])


@pytest.mark.parametrize("name", MOE_OPTIONS)
def test_options_of_a_moe_model_train_like_the_defaults(name):
    check("moe", name, MOE_OPTIONS[name])


def save_and_continue(rendezvous, options, folder):
    from save_policy import save_policy

    from megatron_dapo.selfcheck.synthetic import awkward_batch

    policy = make(rendezvous, "dense", options)
    for seed in range(2):
        policy.update(awkward_batch(policy.shape, seed))
    save_policy(policy, folder)
    return [policy.update(awkward_batch(policy.shape, seed))["loss"] for seed in (3, 4)]


def load_and_continue(rendezvous, options, folder):
    from megatron_dapo.checkpoints.policy_state import load_policy
    from megatron_dapo.selfcheck.synthetic import awkward_batch

    policy = make(rendezvous, "dense", options)
    load_policy(policy, folder)
    return [policy.update(awkward_batch(policy.shape, seed))["loss"] for seed in (3, 4)]


@pytest.mark.parametrize("name", ["offload", "half offload", "precision-aware", "small state", "fp8 blockwise"])
def test_a_loaded_policy_continues(name, tmp_path):
    """Smaller types round once more when they are saved as fp32 and scaled again."""
    expected = run_ranks(1, save_and_continue, OPTIONS[name], tmp_path / "c")[0]
    found = run_ranks(1, load_and_continue, OPTIONS[name], tmp_path / "c")[0]
    assert found == pytest.approx(expected, rel=1e-2 if name == "small state" else 1e-6)
