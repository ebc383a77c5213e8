"""Policy checkpoints: saved in one layout, loaded in another, training goes on with the same numbers."""

import pytest
import torch

from megatron_dapo.policy.checkpoint import CheckpointError, load_policy, save_policy
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import initialize
from megatron_dapo.selfcheck.layout_spec import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full


def make(rendezvous, layout, model):
    config = selfcheck_config(LayoutSpec.parse(layout))
    return Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=rendezvous))


def two_more_updates(policy):
    metrics = [policy.update(awkward_batch(policy.shape, seed)) for seed in (2, 3)]
    return metrics[-1]["loss"], gather_full(policy, policy.runtime, gradient=False)


def train_and_save(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    policy.load_hf(random_hf_weights(policy.shape))
    for seed in (0, 1):
        policy.update(awkward_batch(policy.shape, seed))
    save_policy(policy, folder)
    return two_more_updates(policy)


def load_and_train(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder)
    assert policy.updates == 2
    return two_more_updates(policy)


def run(function, layout, *args):
    return run_ranks(LayoutSpec.parse(layout).world_size, function, layout, *args)[0]


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("dense", "dp2do", ["dp2do", "tp2spdo", "pp2vpp2do"]),
        ("dense", "cp2dp2do", ["cp2dp2do", "pp2do"]),
        ("tied", "tp2pp2do", ["do", "pp2do", "dp2do"]),
        ("dense", "tp2", ["pp2", "dp2"]),
        ("moe", "ep2do", ["ep2do", "ep2tp2spdo"]),
    ],
    ids=["dp2", "pieces-on-two-ranks", "tp2pp2-tied", "without-distributed-optimizer", "moe"],
)
def test_training_goes_on_in_another_layout(model, saved, loaded, tmp_path):
    loss, weights = run(train_and_save, saved, model, tmp_path / "c")
    for layout in loaded:
        found_loss, found = run(load_and_train, layout, model, tmp_path / "c")
        assert found_loss == pytest.approx(loss, rel=1e-5), layout
        for name in weights:
            exact = layout == saved
            difference = (found[name] - weights[name]).abs().max()
            assert difference == 0 if exact else difference <= 1e-5, (layout, name)


def test_data_parallel_ranks_share_the_writing(tmp_path):
    run(train_and_save, "dp4do", "dense", tmp_path / "c")
    written = [sum(p.stat().st_size for p in (tmp_path / "c").glob(f"__{rank}_*.distcp")) for rank in range(4)]
    assert min(written) > 0.1 * sum(written) and max(written) < 0.5 * sum(written), written


def forget_moments(rendezvous, layout, model, folder):
    """What a peer did: weights come back, optimizer state does not."""
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder)
    for _, state in policy.optimizer.state.items():
        state["exp_avg"].zero_()
        state["step"] = torch.zeros_like(state["step"])
    return two_more_updates(policy)


def test_the_optimizer_state_matters(tmp_path):
    """The comparison above would see optimizer state that is silently reset."""
    _, weights = run(train_and_save, "do", "dense", tmp_path / "c")
    _, found = run(forget_moments, "do", "dense", tmp_path / "c")
    assert max(float((found[name] - weights[name]).abs().max()) for name in weights) > 1e-4


def load_nothing(rendezvous, folder):
    with pytest.raises(CheckpointError, match="is not a torch_dist checkpoint"):
        load_policy(make(rendezvous, "single", "dense"), folder)


def test_a_directory_without_a_checkpoint(tmp_path):
    run_ranks(1, load_nothing, tmp_path)


def load_other_model(rendezvous, folder):
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_policy(make(rendezvous, "do", "moe"), folder)


def test_another_model(tmp_path):
    run(train_and_save, "do", "dense", tmp_path / "c")
    run_ranks(1, load_other_model, tmp_path / "c")
