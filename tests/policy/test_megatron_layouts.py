"""Megatron options that change how a layout computes: the update must stay the update of one process.

As test_layouts.py, with options that the layout names of `selfcheck` do not have. The weights that leave the
layout (`gather_full` and weight sync) are compared too.
"""

from dataclasses import replace

import pytest
import torch
from joined_ranks import RankJobs
from long_lists import some
from save_policy import save_policy

from megatron_dapo.checkpoints.policy_state import load_policy
from megatron_dapo.config import check_model, check_world, parse_config
from megatron_dapo.policy import step as step_module
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import compare, gather_full, trace_config

UPDATES = 2
jobs = RankJobs()
six = replace(synthetic_shape("tied"), layers=6)
SHAPES = {kind: synthetic_shape(kind) for kind in ("dense", "tied", "moe")} | {
    "six": six, "one-kv-head": replace(synthetic_shape("dense"), kv_heads=1),
}  # fmt: skip


def config_with(world=1, **policy):
    raw = selfcheck_config(LayoutSpec.parse("single")).model_dump()
    budget = 512 if world == 1 else 96  # other packs than those of one process
    optimizer = raw["policy"]["optimizer"] | policy.get("optimizer", {})
    raw["policy"] |= {"micro_batch_tokens": budget, "sequence_parallel": None, **policy, "optimizer": optimizer}
    config = parse_config(raw)
    check_world(config.policy, world)
    return config


def traced(world, model, **policy):
    config = config_with(world, **policy)
    check_model(config.policy, SHAPES[model])
    return jobs.add(world, trace_config, config, SHAPES[model], UPDATES)


# name: (ranks, model, options)
CASES = {
    "uneven-pp3": (3, "tied", {"pipeline_parallel": 3, "first_stage_layers": 1, "last_stage_layers": 1}),
    "uneven-first-only": (2, "dense", {"pipeline_parallel": 2, "first_stage_layers": 3}),
    "uneven-last-only": (3, "six", {"pipeline_parallel": 3, "last_stage_layers": 2}),
    "uneven-vpp": (2, "six", {"pipeline_parallel": 2, "virtual_pipeline": 2, "first_stage_layers": 4}),
    "tp-above-kv-heads": (2, "one-kv-head", {"tensor_parallel": 2}),
    "tp4-above-kv-heads": (4, "dense", {"tensor_parallel": 4}),
    "tp-above-kv-heads-qk-norm": (4, "tied", {"tensor_parallel": 4, "sequence_parallel": False}),
    "etp2": (2, "moe", {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "etp2-ep2": (4, "moe", {"tensor_parallel": 2, "expert_tensor_parallel": 2, "expert_parallel": 2}),
    "etp2-without-tp": (2, "moe", {"expert_tensor_parallel": 2}),
    "allgather-cp": (2, "moe", {"context_parallel": 2, "expert_parallel": 2, "moe": {"dispatcher": "allgather"}}),
    "allgather-tp": (4, "moe", {"tensor_parallel": 2, "expert_parallel": 2, "moe": {"dispatcher": "allgather"}}),
    "recompute-dense": (2, "tied", {"tensor_parallel": 2, "recompute": "selective",
                                    "recompute_modules": ["core_attn", "layernorm", "mlp"]}),
    "recompute-moe": (2, "moe", {"expert_parallel": 2, "recompute": "selective", "recompute_modules": ["moe"]}),
    "recompute-some-layers": (2, "dense", {"pipeline_parallel": 2, "recompute": "full", "recompute_layers": 1}),
    "param-gather": (2, "tied", {"distributed_optimizer": True, "overlap_param_gather": True}),
    "param-gather-tp2dp2": (4, "dense", {"tensor_parallel": 2, "distributed_optimizer": True,
                                         "overlap_param_gather": True}),
    "param-gather-moe": (2, "moe", {"expert_parallel": 2, "distributed_optimizer": True,
                                    "overlap_param_gather": True}),
    "fused-adam": (2, "dense", {"distributed_optimizer": True, "optimizer": {"fused": True}}),
    "deterministic": (2, "dense", {"context_parallel": 2, "deterministic": True}),
}  # fmt: skip
CASES = some(
    CASES, "uneven-vpp", "tp-above-kv-heads", "etp2-without-tp", "allgather-cp", "recompute-dense", "recompute-moe",
    "param-gather-moe", "fused-adam",
)  # fmt: skip

single = {model: traced(1, model) for model in SHAPES}
found = {name: traced(world, model, **policy) for name, (world, model, policy) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_options_do_not_change_the_update(name):
    ours, one = found[name].results()[0], single[CASES[name][1]].results()[0]
    difference = compare(ours, one)
    assert ours.losses == pytest.approx(one.losses, rel=1e-5, abs=1e-6)
    assert difference.grad_norm <= 1e-5
    assert difference.gradients <= 1e-5, difference.gradients_at
    assert difference.later_gradients <= 1e-5, difference.later_gradients_at
    assert difference.weights <= 1e-4, difference.weights_at


# ---- weights that enter and leave such a layout ----


def moved(rendezvous, config, shape, folder):
    """HF weights in, an update, out again by sync; saved, loaded into a fresh policy, and out again."""
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(shape))
    loaded = {name: tensor.clone() for bucket in policy.weight_buckets(4000).buckets() for name, tensor in bucket}
    policy.update(awkward_batch(shape, 0, samples=8))
    save_policy(policy, folder)
    updated = {name: tensor.clone() for bucket in policy.weight_buckets(4000).buckets() for name, tensor in bucket}
    other = Policy(config, shape, policy.runtime)
    load_policy(other, folder)
    restored = {name: tensor.clone() for bucket in other.weight_buckets(4000).buckets() for name, tensor in bucket}
    batch = awkward_batch(shape, 1, samples=8)
    policy.update(batch)
    other.update(batch)
    same = all(
        torch.equal(a, b) for a, b in zip(
            gather_full(policy, policy.runtime, gradient=False).values(),
            gather_full(other, policy.runtime, gradient=False).values(), strict=True,
        )
    )  # fmt: skip
    return loaded, updated, restored, same


MOVED = some(
    ["uneven-pp3", "uneven-vpp", "tp-above-kv-heads", "etp2-without-tp", "etp2-ep2", "param-gather-tp2dp2",
     "fused-adam"],
    "uneven-vpp", "tp-above-kv-heads", "etp2-without-tp", "fused-adam",
)  # fmt: skip


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    more = RankJobs()
    return {
        name: more.add(CASES[name][0], moved, config_with(CASES[name][0], **CASES[name][2]), SHAPES[CASES[name][1]],
                       tmp_path_factory.mktemp(name))
        for name in MOVED
    }  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_weights_are_the_same_bits_after_loading_sync_and_checkpoint(name, moves):
    loaded, updated, restored, same = moves[name].results()[0]
    expected = random_hf_weights(SHAPES[CASES[name][1]])
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert any(not torch.equal(updated[key], expected[key]) for key in expected)
    assert all(torch.equal(restored[key], updated[key]) for key in expected)
    assert same  # the optimizer's state too: the next update of both is the same


# ---- bf16 gradient reduction ----

bf16 = {
    reduction: jobs.add(
        2, trace_config, config_with(2, precision="bf16", gradient_reduction=reduction), SHAPES["dense"], 1
    )
    for reduction in ("fp32", "bf16")
}


def test_bf16_reduction_rounds_gradients_and_no_more():
    exact, rounded = (bf16[reduction].results()[0].gradients[0] for reduction in ("fp32", "bf16"))
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    for name, tensor in exact.items():
        error = (rounded[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert error <= 2e-2, name


# ---- one gradient norm per update ----


def counted_update(rendezvous):
    """How often an update computes the norm, and how often it copies gradients for the optimizer."""
    from megatron.core.optimizer import optimizer as megatron_optimizer

    config = config_with(1, distributed_optimizer=True)
    policy = Policy(config, SHAPES["dense"], initialize(config.policy, rendezvous=rendezvous))
    counts = {"norms": 0, "prepared": 0}
    real_norm, real_prepare = megatron_optimizer.get_grad_norm_fp32, policy.optimizer.prepare_grads

    def norm(*args, **kwargs):
        counts["norms"] += 1
        return real_norm(*args, **kwargs)

    def prepare():
        counts["prepared"] += 1
        return real_prepare()

    megatron_optimizer.get_grad_norm_fp32, policy.optimizer.prepare_grads = norm, prepare
    try:
        metrics = policy.update(awkward_batch(SHAPES["dense"], 0))
    finally:
        megatron_optimizer.get_grad_norm_fp32 = real_norm
    return counts, metrics["grad_norm"]


counted = jobs.add(1, counted_update)


def test_an_update_computes_the_gradient_norm_once():
    counts, norm = counted.results()[0]
    assert counts == {"norms": 1, "prepared": 1}
    assert norm > 0


def spoiled_update(rendezvous):
    """A gradient that is not finite: the error, and whether any weight changed."""
    config = config_with(1, distributed_optimizer=True)
    policy = Policy(config, SHAPES["dense"], initialize(config.policy, rendezvous=rendezvous))
    policy.gradients(awkward_batch(SHAPES["dense"], 0))
    before = gather_full(policy, policy.runtime, gradient=False)
    policy.chunks[0].buffers[0].grad_data[5] = float("nan")
    try:
        policy.step.step_optimizer()
    except step_module.NonFiniteError as error:
        after = gather_full(policy, policy.runtime, gradient=False)
        return str(error), all(torch.equal(before[name], after[name]) for name in before), policy.updates


spoiled = jobs.add(1, spoiled_update)


def test_a_norm_that_is_not_finite_changes_no_weight():
    message, unchanged, updates = spoiled.results()[0]
    assert "the gradient norm is nan in update 0; no weight has changed" in message
    assert unchanged
    assert updates == 0
