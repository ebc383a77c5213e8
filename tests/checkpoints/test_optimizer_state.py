"""Every Adam that Megatron may pick saves and loads its moments and its step count exactly."""

import functools
from types import SimpleNamespace

import fused_adam
import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from long_lists import some
from megatron.core import dist_checkpointing
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from save_policy import save_policy

from megatron_dapo.checkpoints import policy_state
from megatron_dapo.checkpoints.policy_state import CheckpointError, load_policy
from megatron_dapo.config import parse_config
from megatron_dapo.policy.megatron.optimizer_state import (
    _joined,
    initialize_state,
    inner_optimizers,
    saved_step,
    set_state,
)
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model import gpt
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full

KINDS = ["torch", "transformer_engine", "apex"]
SHAPE = synthetic_shape("dense")
UPDATES = 2  # before the checkpoint


def make(rendezvous, layout, kind):
    fused_adam.use(kind)
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    expected = torch.optim.AdamW if kind == "torch" else fused_adam.FusedAdam
    assert all(type(inner) is expected for inner in inner_optimizers(policy.optimizer))
    return policy


def steps(policy):
    """Every step count that the next update will read, as the kind of optimizer keeps it."""
    for inner in inner_optimizers(policy.optimizer):
        for part in inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]:
            for group in part.param_groups:
                if isinstance(part, fused_adam.FusedAdam):
                    yield group.get("step", 0)
                else:
                    yield from (part.state[parameter]["step"].item() for parameter in group["params"])


def update_once(policy, seed):
    return policy.update(awkward_batch(SHAPE, seed, samples=8))["loss"]


def update(policy, seeds):
    losses = [update_once(policy, seed) for seed in seeds]
    return losses, gather_full(policy, policy.runtime, gradient=False), set(steps(policy))


def make_policy(rendezvous, layout, kind):
    """`kind`: an Adam, or the share of the optimizer that is offloaded."""
    return (make if isinstance(kind, str) else offloading_policy)(rendezvous, layout, kind)


def save_after(rendezvous, layout, kind, folder, updates):
    policy = make_policy(rendezvous, layout, kind)
    policy.load_hf(random_hf_weights(SHAPE))
    for seed in range(updates):
        update_once(policy, seed)
    save_policy(policy, folder)
    return update(policy, (7,))


def load_and_update(rendezvous, layout, kind, folder, updates):
    policy = make_policy(rendezvous, layout, kind)
    policy.load_hf(random_hf_weights(SHAPE, seed=5))
    update_once(policy, seed=9)  # state that loading must replace
    load_policy(policy, folder)
    assert policy.updates == updates and set(steps(policy)) == {updates}
    return update(policy, (7,))


def run(function, layout, *args):
    return run_ranks(LayoutSpec.parse(layout).world_size, function, layout, *args)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, made once: its folder, and what an update after it gives."""

    @functools.cache
    def make_checkpoint(layout, kind, updates):
        folder = tmp_path_factory.mktemp("saved") / "c"
        return folder, run(save_after, layout, kind, folder, updates)

    return make_checkpoint


def assert_same(found, expected):
    assert found[0] == expected[0] and found[2] == expected[2]
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.parametrize(
    ("kind", "layout"),
    some([(kind, layout) for kind in KINDS for layout in ("do", "single", "dp2do")],
         ("transformer_engine", "do"), ("apex", "single"), ("torch", "dp2do")),
)  # fmt: skip
def test_training_continues_bit_for_bit(kind, layout, saved):
    folder, expected = saved(layout, kind, UPDATES)
    assert expected[2] == {UPDATES + 1}
    assert_same(run(load_and_update, layout, kind, folder, UPDATES), expected)


def load_with_other_options(rendezvous, layout, kind, folder):
    fused_adam.use(kind)
    config = selfcheck_config(LayoutSpec.parse(layout))
    optimizer = config.policy.optimizer.model_copy(update={"beta1": 0.5, "beta2": 0.6, "eps": 1e-3})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"optimizer": optimizer})})
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    load_policy(policy, folder)
    groups = [group for inner in inner_optimizers(policy.optimizer) for group in inner.param_groups]
    return {(*group["betas"], group["eps"]) for group in groups}


@pytest.mark.parametrize(("kind", "layout"), [("torch", "do"), ("apex", "single")])
def test_changed_options_of_adam_are_used(kind, layout, saved):
    folder, _ = saved(layout, kind, UPDATES)
    assert run(load_with_other_options, layout, kind, folder) == {(0.5, 0.6, 1e-3)}


@pytest.mark.parametrize(
    ("kind", "layout"),
    some([(kind, layout) for kind in KINDS for layout in ("do", "single")],
         ("torch", "do"), ("apex", "do")),
)  # fmt: skip
def test_a_checkpoint_from_before_the_first_update(kind, layout, saved):
    """A run that is stopped while it samples its first batch saves this."""
    folder, expected = saved(layout, kind, 0)
    assert expected[2] == {1}
    assert_same(run(load_and_update, layout, kind, folder, 0), expected)


CHANGES = [("torch", "transformer_engine"), ("apex", "torch")]


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    some([(*kinds, layout) for kinds in CHANGES for layout in ("do", "single")],
         ("torch", "transformer_engine", "do"), ("apex", "torch", "single")),
)  # fmt: skip
def test_another_optimizer_continues_with_the_step_count(before, after, layout, saved):
    """Transformer Engine was installed or removed between two runs. The kernels round differently."""
    folder, (losses, weights, counts) = saved(layout, before, UPDATES)
    found_losses, found, found_counts = run(load_and_update, layout, after, folder, UPDATES)
    assert found_losses == pytest.approx(losses, rel=1e-5) and found_counts == counts
    assert all((found[name] - weight).abs().max() <= 1e-5 for name, weight in weights.items())


def without_steps(state):
    if isinstance(state, dict):
        return {key: without_steps(value) for key, value in state.items() if key not in ("step", "common_step")}
    return [without_steps(value) for value in state] if isinstance(state, list) else state


def load_without_step(rendezvous, layout, kind, folder, updates):
    load = dist_checkpointing.load
    policy_state.dist_checkpointing.load = lambda *args, **kwargs: without_steps(load(*args, **kwargs))
    return load_and_update(rendezvous, layout, kind, folder, updates)


@pytest.mark.parametrize(
    ("kind", "layout"),
    some(
        [(kind, layout) for kind in ("torch", "apex") for layout in ("do", "single")],
        ("torch", "do"),
        ("apex", "single"),
    ),
)
def test_a_checkpoint_without_a_step_count_has_one_step_per_update(kind, layout, saved):
    folder, expected = saved(layout, kind, UPDATES)
    assert_same(run(load_without_step, layout, kind, folder, UPDATES), expected)


def load_with_two_steps(rendezvous, layout, kind, folder):
    load = dist_checkpointing.load

    def altered(*args, **kwargs):
        state = load(*args, **kwargs)
        state["optimizer"]["optimizer"]["param_groups"][0]["step"] = 99
        return state

    policy_state.dist_checkpointing.load = altered
    with pytest.raises(CheckpointError, match=r"c cannot be loaded: .* different step counts .*: \[2, 99\]"):
        load_policy(make(rendezvous, layout, kind), folder)


def test_different_step_counts_are_an_error(saved):
    folder, _ = saved("do", "torch", UPDATES)
    run(load_with_two_steps, "do", "torch", folder)


def test_the_step_count_is_found_wherever_megatron_keeps_it():
    assert saved_step({"optimizer": {"param_groups": [{"step": 4.0}, {"step": 4}]}, "param_state": {0: {}}}) == 4
    assert saved_step({"state": {"common_step": torch.tensor(6.0)}, "param_groups": [{"lr": 1e-3}]}) == 6
    assert saved_step({"param_groups": [{"lr": 1e-3}]}) is None


# ---- Megatron's optimizer with CPU offload ----


class FusedAdam(fused_adam.FusedAdam):
    """Built from parameter groups alone, as Transformer Engine's may be."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, betas, eps, weight_decay)

    def _update(self, group, parameter):
        others = {
            key: self.state[parameter].pop(key) for key in ("master_param", "step") if key in self.state[parameter]
        }
        super()._update(group, parameter)
        self.state[parameter].update(others)  # the hybrid optimizer keeps them there


HYBRID = synthetic_shape("hybrid")


def hybrid_policy(rendezvous, layout, seed):
    config = selfcheck_config(LayoutSpec.parse(layout), policy={"precision": "bf16"})
    policy = Policy(config, HYBRID, initialize(config.policy, rendezvous=rendezvous))
    kinds = {parameter.dtype for chunk in policy.model for parameter in chunk.parameters()}
    assert kinds == {torch.float32, torch.bfloat16}
    policy.load_hf(random_hf_weights(HYBRID, seed=seed))
    return policy


def update_hybrid(policy, seeds):
    losses = [policy.update(awkward_batch(HYBRID, seed, samples=8))["loss"] for seed in seeds]
    return losses, gather_full(policy, policy.runtime, gradient=False), None


def save_hybrid(rendezvous, layout, folder):
    policy = hybrid_policy(rendezvous, layout, seed=0)
    update_hybrid(policy, (0, 1))
    save_policy(policy, folder)
    return update_hybrid(policy, (7,))


def load_hybrid(rendezvous, layout, folder):
    policy = hybrid_policy(rendezvous, layout, seed=5)
    update_hybrid(policy, (9,))
    load_policy(policy, folder)
    return update_hybrid(policy, (7,))


@pytest.mark.parametrize("layout", some(["do", "dp2do"], "do"))
def test_a_model_with_parameters_of_two_types_continues_bit_for_bit(layout, tmp_path):
    """Megatron looks up the state of a parameter by its place in its group, and then moves fp32 parameters to the
    front of the group."""
    expected = run(save_hybrid, layout, tmp_path / "c")
    assert_same(run(load_hybrid, layout, tmp_path / "c"), expected)


def split_by_fraction(self, fraction):
    """As Megatron does on CUDA: the first parameters, up to this share, have copies on the host; the others stay. Here
    both are in host memory."""
    total = sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
    on_host, on_device, copies, back, in_fp32, seen = [], [], {}, {}, {}, 0
    for group in self.param_groups:
        host, device = {**group, "params": []}, {**group, "params": []}
        for parameter in group["params"]:
            in_fp32[parameter] = copy = parameter.detach().clone().float()
            if seen < fraction * total:
                copies[parameter], back[copy] = copy, parameter
                host["params"].append(copy)
            else:
                device["params"].append(copy)
            seen += parameter.numel()
        on_host += [host] if host["params"] else []
        on_device += [device] if device["params"] else []
    return on_host, on_device, copies, back, in_fp32


def share_state(self):
    """As Megatron does after loading, without moving a tensor to CUDA."""
    for optimizer in self.sub_optimizers:
        for parameter, state in optimizer.state.items():
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            self.state[self.inner_param_to_orig_param.get(parameter, parameter)].update(tensors)


def offloading_policy(rendezvous, layout, fraction):
    fused_adam.use("transformer_engine")
    megatron_optimizer.Adam = FusedAdam
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split_by_fraction
    HybridDeviceOptimizer._move_new_state_to_right_device = share_state
    optimizer_config.is_te_min_version = lambda version: True
    gpt.check_hardware = lambda policy, te: None
    raw = selfcheck_config(LayoutSpec.parse(layout)).model_dump()
    raw["policy"] |= {"precision": "bf16"}
    raw["policy"]["optimizer"] |= {"cpu_offload": fraction}
    config = parse_config(raw)
    policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
    assert all(type(inner) is HybridDeviceOptimizer for inner in inner_optimizers(policy.optimizer))
    return policy


@pytest.mark.parametrize(
    ("layout", "fraction", "updates"),
    some([("do", 0.5, 3), ("do", 1.0, 0), ("dp2do", 0.5, 2)], ("do", 1.0, 0), ("dp2do", 0.5, 2)),
)
def test_an_offloaded_optimizer_continues_bit_for_bit(layout, fraction, updates, saved):
    folder, expected = saved(layout, fraction, updates)
    assert expected[2] == {updates + 1}
    assert_same(run(load_and_update, layout, fraction, folder, updates), expected)


# ---- state in narrow types ----


class NarrowAdam(torch.optim.Optimizer):
    """Transformer Engine's Adam with a mean in fp16: a value is its number times a scale."""

    scale = 4.0

    def __init__(self, params):
        super().__init__(params, {})
        others = dict.fromkeys(("exp_avg_sq", "master_param"), torch.float32)
        self.name_to_dtype_map = {"exp_avg": torch.float16, **others}

    def initialize_state(self, parameter, store_param_remainders):
        assert not store_param_remainders
        self.state[parameter] = {
            key: torch.zeros_like(parameter, dtype=dtype)
            for key, dtype in self.name_to_dtype_map.items() if key != "master_param"
        }  # fmt: skip

    def get_unscaled_state(self, parameter, key):
        return self.state[parameter][key].float() * self.scale

    def set_scaled_state(self, parameter, key, value):
        self.state[parameter][key].copy_(value / self.scale)


class WithoutScales(SimpleNamespace):
    """Megatron's optimizer around it, with an fp8 recipe for which it keeps the main weights."""

    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    data_parallel_group = SimpleNamespace(rank=lambda: 0)
    _get_main_param_and_optimizer_states = DistributedOptimizer._get_main_param_and_optimizer_states


def narrow_optimizer():
    main, parameter = torch.arange(4.0), torch.empty(4, device="meta")  # stands for one on a GPU
    made = WithoutScales(optimizer=NarrowAdam([main]), model_param_group_index_map={parameter: (0, 0)})
    initialize_state(made)
    return made, parameter, main


def test_scaled_state_is_saved_and_loaded_as_numbers():
    made, parameter, main = narrow_optimizer()
    numbers = {"param": torch.arange(4.0, 8.0), "exp_avg": torch.tensor([1.0, 2, 4, 8]), "exp_avg_sq": torch.ones(4)}
    set_state(made, parameter, dict(numbers))
    state = made.optimizer.state[main]
    assert state["exp_avg"].dtype == torch.float16 and state["exp_avg"].tolist() == [0.25, 0.5, 1, 2]
    assert torch.equal(main, numbers["param"]) and torch.equal(state["exp_avg_sq"], numbers["exp_avg_sq"])
    found = _joined(made, parameter, {0: slice(0, 4)}, 0, torch.clone)
    assert found.keys() == numbers.keys()
    assert all(found[key].dtype == torch.float32 and torch.equal(found[key], numbers[key]) for key in numbers)


def test_whole_state_stays_where_it_is_but_for_copies():
    """Offloaded state has no room on the device, and host memory may have none for that of the device. Only copies that
    reading narrow state makes leave the device at once."""
    made, parameter, _ = narrow_optimizer()
    copied = []
    _joined(made, parameter, {0: slice(0, 4)}, 0, lambda tensor: copied.append(tensor) or tensor)
    assert len(copied) == 1
