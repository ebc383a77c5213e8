"""Policy checkpoints: saved in one layout and loaded in another, training continues with the same numbers."""

import functools
import queue

import pytest
import torch
import torch.distributed.checkpoint as dcp
from long_lists import ALL_CASES, some
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from save_policy import save_policy
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from megatron_dapo.checkpoints import policy_state
from megatron_dapo.checkpoints.policy_state import CheckpointError, load_policy
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full
from megatron_dapo.weights.formats.small_files import Stored, torch_dist_metadata


def make(rendezvous, layout, model):
    config = selfcheck_config(LayoutSpec.parse(layout))
    return Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=rendezvous))


def update(policy, seed):
    return policy.update(awkward_batch(policy.shape, seed, samples=8))


def one_more_update(policy):
    return update(policy, 2)["loss"], gather_full(policy, policy.runtime, gradient=False)


def train_and_save(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    policy.load_hf(random_hf_weights(policy.shape))
    for seed in (0, 1):
        update(policy, seed)
    save_policy(policy, folder)
    return one_more_update(policy)


def load_and_train(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder)
    assert policy.updates == 2
    return one_more_update(policy)


def run(function, layout, *args):
    return run_ranks(LayoutSpec.parse(layout).world_size, function, layout, *args)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint, made once: its folder, and the loss and the weights of the update after it."""

    @functools.cache
    def make_checkpoint(function, layout, model):
        folder = tmp_path_factory.mktemp("saved") / "c"
        return folder, *run(function, layout, model, folder)

    return make_checkpoint


LAYOUTS = {  # model, saved, loaded
    "dp2": ("dense", "dp2do", ["tp2spdo", "dp2do", "pp2vpp2do"]),
    "pieces-on-two-ranks": ("dense", "cp2dp2do", ["pp2vpp2do", "cp2dp2do", "pp2do"]),
    "tp2pp2-tied": ("tied", "tp2pp2do", ["dp2do", "do", "pp2do"]),
    "without-distributed-optimizer": ("dense", "tp2", ["pp2", "dp2"]),
    "moe": ("moe", "ep2do", ["do", "ep2do", "ep2tp2spdo"]),  # two optimizers, then one
    "moe-one-optimizer-of-two": ("moe", "tp2spdo", ["dp2do"]),
    "moe-two-optimizers-of-one": ("moe", "dp2do", ["ep2do"]),
    "moe-without-distributed-optimizer": ("moe", "dp2", ["ep2"]),
}


@pytest.mark.parametrize(
    "case",
    some(LAYOUTS, "dp2", "pieces-on-two-ranks", "tp2pp2-tied", "without-distributed-optimizer", "moe",
         "moe-two-optimizers-of-one"),
)  # fmt: skip
def test_training_continues_in_another_layout(case, checkpoint):
    model, saved, loaded = LAYOUTS[case]
    folder, loss, weights = checkpoint(train_and_save, saved, model)
    for layout in loaded if ALL_CASES else loaded[:1]:
        found_loss, found = run(load_and_train, layout, model, folder)
        assert found_loss == pytest.approx(loss, rel=1e-5), layout
        for name in weights:
            exact = layout == saved
            difference = (found[name] - weights[name]).abs().max()
            assert difference == 0 if exact else difference <= 1e-5, (layout, name)


def load_with_smaller_mini_batches(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    policy.step.updates_per_step *= 4
    load_policy(policy, folder)
    return policy.updates


def test_another_number_of_updates_keeps_the_place_in_the_schedule(checkpoint):
    """Two updates are as much of a step as eight of a quarter of the size: warm-up and decay count steps."""
    folder, *_ = checkpoint(train_and_save, "dp2do", "dense")
    assert run(load_with_smaller_mini_batches, "do", "dense", folder) == 8


def test_every_data_and_context_parallel_rank_writes_a_part(checkpoint):
    folder, *_ = checkpoint(train_and_save, "cp2dp2do", "dense")
    written = [sum(p.stat().st_size for p in folder.glob(f"__{rank}_*.distcp")) for rank in range(4)]
    assert min(written) > 0.1 * sum(written) and max(written) < 0.5 * sum(written), written


def save_with_megatron(rendezvous, layout, model, folder):
    """As versions before the background writer did: our description of the optimizer state, Megatron's own writer."""
    filesystem_async._results_queue = queue.Queue()
    policy = make(rendezvous, layout, model)
    policy.load_hf(random_hf_weights(policy.shape))
    for seed in (0, 1):
        update(policy, seed)
    state = policy_state._sharded_state(policy, is_loading=False)
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder), content_metadata=policy_state._metadata(policy))
    return one_more_update(policy)


@pytest.mark.parametrize(
    ("layout", "model"),
    some([("dp2do", "dense"), ("tp2", "tied"), ("ep2do", "moe")], ("tp2", "tied"), ("ep2do", "moe")),
)
def test_a_checkpoint_that_megatron_wrote_loads(layout, model, checkpoint):
    folder, loss, weights = checkpoint(save_with_megatron, layout, model)
    found_loss, found = run(load_and_train, layout, model, folder)
    assert found_loss == loss and all(torch.equal(found[name], weights[name]) for name in weights)


def load_and_save(rendezvous, layout, model, folder, ours):
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder)
    save_policy(policy, ours)


def read(folder):
    """All tensors of a checkpoint, with torch's own reader; and the names of all values."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(value.size, 7, dtype=value.properties.dtype)
        for key, value in described.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors, described.keys()


def test_our_writer_and_megatrons_write_the_same(checkpoint, tmp_path):
    folder, *_ = checkpoint(save_with_megatron, "ep2do", "moe")
    run(load_and_save, "ep2do", "moe", folder, tmp_path / "ours")
    (theirs, their_names), (ours, our_names) = read(folder), read(tmp_path / "ours")
    assert {name for name in their_names if not name.startswith("common_state/")} == our_names  # newer: as common.pt
    assert theirs.keys() == ours.keys() and len(ours) > 20
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key


def save_in_small_pieces(rendezvous, folder):
    policy_state.MAX_ITEM, policy_state.SMALL_FILE = 1000, 4096
    return train_and_save(rendezvous, "do", "dense", folder)


def test_large_tensors_are_split_over_several_files(tmp_path):
    loss, weights = run_ranks(1, save_in_small_pieces, tmp_path / "c")[0]
    assert len(list((tmp_path / "c").glob("__0_*.distcp"))) == 4
    found_loss, found = run(load_and_train, "do", "dense", tmp_path / "c")
    assert found_loss == loss and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored + stored[-1:], "would be written twice"),
        (lambda stored: stored[1:], "a has 6 elements, 3 would be written"),
    ],
    ids=["twice", "missing"],
)
def test_every_element_is_written_exactly_once(change, message):
    place = ("__0_0.distcp", 0, 1)
    stored = [Stored("a", *place, torch.float32, (2, 3), (row, 0), (1, 3)) for row in range(2)]
    stored.append(Stored("b/shard_0_1", *place))
    assert torch_dist_metadata(stored)
    with pytest.raises(CheckpointError, match=message):
        torch_dist_metadata(change(stored))


def forget_moments(rendezvous, layout, model, folder):
    """A bug that another framework had: weights are restored, the optimizer state is not."""
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder)
    for _, state in policy.optimizer.state.items():
        state["exp_avg"].zero_()
        state["step"] = torch.zeros_like(state["step"])
    return one_more_update(policy)


def test_a_lost_optimizer_state_would_be_noticed(checkpoint):
    """The comparison above is able to fail."""
    folder, _, weights = checkpoint(train_and_save, "do", "dense")
    _, found = run(forget_moments, "do", "dense", folder)
    assert max(float((found[name] - weights[name]).abs().max()) for name in weights) > 1e-4


def load_nothing(rendezvous, folder):
    with pytest.raises(CheckpointError, match="is not a torch_dist checkpoint"):
        load_policy(make(rendezvous, "single", "dense"), folder)


def test_a_directory_without_a_checkpoint_is_an_error(tmp_path):
    run_ranks(1, load_nothing, tmp_path)


def load_other_model(rendezvous, folder):
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_policy(make(rendezvous, "do", "moe"), folder)


def test_a_checkpoint_of_another_model_is_an_error(checkpoint):
    folder, *_ = checkpoint(train_and_save, "do", "dense")
    run_ranks(1, load_other_model, folder)
