"""The memory model against real Megatron ranks on the CPU: weights, gradients, optimizer state, activations."""

import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from installed_megatron import is_megatron_since
from joined_ranks import RankJobs
from long_lists import some

from megatron_dapo.config import parse_config
from megatron_dapo.planner.memory import Sizes, layer_saved, stage_memory
from megatron_dapo.planner.parameters import rank_parameters
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.selfcheck.synthetic import awkward_batch, synthetic_shape

LAYOUTS = {
    "tp2": ("dense", {"tensor_parallel": 2}),
    "pp2-tied": ("tied", {"pipeline_parallel": 2}),
    "dp2": ("dense", {}),
    "dp2-replicated": ("tied", {"distributed_optimizer": False}),
    "cp2": ("dense", {"context_parallel": 2}),
    "ep2": ("moe", {"expert_parallel": 2}),
    "pp2-uneven": ("dense", {"pipeline_parallel": 2, "last_stage_layers": 1}),
    "etp2": ("moe", {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "shared-expert": ("moe-shared", {"tensor_parallel": 2, "expert_parallel": 2}),
    "gated-delta-net": ("hybrid", {"tensor_parallel": 2}),
    "bf16-reduction": ("dense", {"gradient_reduction": "bf16"}),
}


def make_config(precision, **policy):
    return parse_config(
        {
            "policy": {"precision": precision, "micro_batch_tokens": 4096, **policy},
            "rollout": {"max_prompt_tokens": 100, "max_response_tokens": 100},
        }
    )


def wide(kind):
    """Large enough that Megatron's padding of buffers to 128 elements is small."""
    return dataclasses.replace(synthetic_shape(kind), hidden=64, ffn_hidden=160)


def held_by_rank(place: Rendezvous, kind: str, options: dict) -> tuple[int, int, float, float]:
    """(stage, parameters, gradient bytes, optimizer bytes) of this rank after one update."""
    warnings.filterwarnings("ignore")
    config, shape = make_config("bf16", **options), wide(kind)
    runtime = initialize(config.policy, rendezvous=place)
    policy = Policy(config, shape, runtime)
    policy.update(awkward_batch(shape, 0, samples=8))
    parameters = sum(p.numel() for chunk in policy.model for p in chunk.parameters())
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = sum(b.grad_data.nbytes for b in buffers)
    state = 0
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = optimizer.optimizer
        state += sum(p.nbytes for group in inner.param_groups for p in group["params"])  # the fp32 copies
        for values in inner.state.values():
            state += sum(v.nbytes for key, v in values.items() if key in ("exp_avg", "exp_avg_sq"))
    return runtime.groups.pp.rank(), parameters, gradients, state


jobs = RankJobs()
LAYOUTS = some(LAYOUTS, "tp2", "pp2-tied", "dp2-replicated", "cp2", "ep2", "shared-expert", "bf16-reduction")
held = {name: jobs.add(2, held_by_rank, *layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_gradients_and_optimizer_state(name):
    kind, options = LAYOUTS[name]
    config, shape = make_config("bf16", **options), wide(kind)
    for stage, parameters, gradients, state in held[name].results():
        expected = stage_memory(shape, config.policy, 2, 1, stage, layers="local")
        assert rank_parameters(shape, config.policy, stage).total == parameters
        assert expected.weights == 2 * parameters
        assert expected.gradients == pytest.approx(gradients, rel=0.02)
        assert expected.optimizer == pytest.approx(state, rel=0.02)


@functools.cache
def saved_by_second_layer(kind, recomputed=None):
    """(bytes, tokens): every tensor that autograd keeps of the second layer, each storage once."""
    config, shape = make_config("bf16", **recomputing(recomputed)), wide(kind)
    runtime = initialize(config.policy, rendezvous=Rendezvous(url=""))
    policy = Policy(config, shape, runtime)
    batch = awkward_batch(shape, 0, samples=30)
    micro_batches = policy.step.pack(batch)
    measured = _saved_by(policy.model[0].decoder.layers[1], lambda: policy.step.gradients(batch, micro_batches))
    shutdown()
    return measured, micro_batches[0].tokens


def recomputing(module):
    return {"recompute": "selective", "recompute_modules": [module]} if module else {}


@pytest.mark.parametrize(("kind", "module"), some((("dense", "mlp"), ("moe", "moe")), ("moe", "moe")))
def test_activations_that_recomputing_a_module_does_not_save(kind, module):
    shape = wide(kind)
    (all_of_it, tokens), (less, _) = saved_by_second_layer(kind), saved_by_second_layer(kind, module)
    layouts = [make_config("bf16", **recomputing(given)).policy.model_copy(update={"micro_batch_tokens": tokens})
               for given in (None, module)]  # fmt: skip
    expected = np.subtract(*(sum(layer_saved(shape, layout, "local").values()) for layout in layouts))
    if shape.is_moe:  # the CPU's router is perfectly spread on average, and SwiGLU is not fused
        routed = tokens * shape.experts_per_token
        expected -= 0.25 * routed * (shape.hidden + 3 * shape.expert_ffn_hidden) * 2
        expected += routed * 3 * shape.expert_ffn_hidden * 2
    else:
        expected += 2 * tokens * shape.ffn_hidden * 2
    expected += 12 * tokens if shape.is_moe and is_megatron_since("0.19") else 0  # measured
    assert all_of_it - less == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("kind", some(["dense", "tied", "moe"], "moe"))  # tied: the same layers as dense
def test_saved_activations_of_one_layer(kind):
    """Every tensor that autograd keeps of the second layer, each storage once, against `layer_saved`."""
    config, shape = make_config("bf16"), wide(kind)
    measured, tokens = saved_by_second_layer(kind)
    layout = config.policy.model_copy(update={"micro_batch_tokens": tokens})
    expected = sum(layer_saved(shape, layout, "local").values())
    sizes = Sizes.of(shape, layout)
    expected += tokens * sizes.head_dim * 4  # RoPE's table, which all layers share
    # What only the CPU saves: norms and SwiGLU are not fused there. A norm keeps its input and what it normalised in
    # fp32. A MoE's router is perfectly spread on average.
    expected += 2 * tokens * shape.hidden * (4 + 4 - 2)
    if shape.qk_norm:
        expected += tokens * ((sizes.q + sizes.kv) * (4 + 4) - sizes.q * 2)
    if shape.is_moe:
        routed = tokens * shape.experts_per_token
        expected += routed * 3 * shape.expert_ffn_hidden * 2
        expected -= 0.25 * routed * (shape.hidden + 3 * shape.expert_ffn_hidden) * 2
    else:
        expected += 2 * tokens * sizes.ffn * 2
    assert expected == pytest.approx(measured, rel=0.03)


def _saved_by(layer, run) -> int:
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        where = tensor.untyped_storage().data_ptr()
        if tensor.numel() and where not in own:
            kept.setdefault(where, tensor)
        return tensor

    forward = layer.forward

    def watched(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = watched
    run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
