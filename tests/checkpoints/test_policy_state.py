"""Policy checkpoints: saved in one layout and loaded in another, training continues with the same numbers."""

import queue

import pytest
import torch
import torch.distributed.checkpoint as dcp
from long_lists import ALL_CASES, some
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from megatron_dapo.checkpoints import policy_state
from megatron_dapo.checkpoints.policy_state import CheckpointError, load_policy, save_policy
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


def two_more_updates(policy):
    metrics = [update(policy, seed) for seed in (2, 3)]
    return metrics[-1]["loss"], gather_full(policy, policy.runtime, gradient=False)


def train_and_save(rendezvous, layout, model, folder):
    policy = make(rendezvous, layout, model)
    policy.load_hf(random_hf_weights(policy.shape))
    for seed in (0, 1):
        update(policy, seed)
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
        ("dense", "dp2do", ["tp2spdo", "dp2do", "pp2vpp2do"]),
        ("dense", "cp2dp2do", ["pp2vpp2do", "cp2dp2do", "pp2do"]),
        ("tied", "tp2pp2do", ["dp2do", "do", "pp2do"]),
        ("dense", "tp2", ["pp2", "dp2"]),
        ("moe", "ep2do", ["do", "ep2do", "ep2tp2spdo"]),
        ("moe", "tp2spdo", ["dp2do"]),
        ("moe", "dp2do", ["ep2do"]),
        ("moe", "dp2", ["ep2"]),
    ],
    ids=[
        "dp2", "pieces-on-two-ranks", "tp2pp2-tied", "without-distributed-optimizer", "moe", "moe-one-optimizer-of-two",
        "moe-two-optimizers-of-one", "moe-without-distributed-optimizer",
    ],
)  # fmt: skip
def test_training_continues_in_another_layout(model, saved, loaded, tmp_path):
    loss, weights = run(train_and_save, saved, model, tmp_path / "c")
    for layout in loaded if ALL_CASES else loaded[:1]:
        found_loss, found = run(load_and_train, layout, model, tmp_path / "c")
        assert found_loss == pytest.approx(loss, rel=1e-5), layout
        for name in weights:
            exact = layout == saved
            difference = (found[name] - weights[name]).abs().max()
            assert difference == 0 if exact else difference <= 1e-5, (layout, name)


def test_every_data_parallel_rank_writes_a_part(tmp_path):
    run(train_and_save, "dp4do", "dense", tmp_path / "c")
    written = [sum(p.stat().st_size for p in (tmp_path / "c").glob(f"__{rank}_*.distcp")) for rank in range(4)]
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
    return two_more_updates(policy)


@pytest.mark.parametrize(
    ("layout", "model"),
    some([("dp2do", "dense"), ("tp2", "tied"), ("ep2do", "moe")], ("tp2", "tied"), ("ep2do", "moe")),
)
def test_a_checkpoint_that_megatron_wrote_loads(layout, model, tmp_path):
    loss, weights = run(save_with_megatron, layout, model, tmp_path / "c")
    found_loss, found = run(load_and_train, layout, model, tmp_path / "c")
    assert found_loss == loss and all(torch.equal(found[name], weights[name]) for name in weights)


def same_contents(rendezvous, layout, model, folder):
    """Reads both checkpoints with torch's own reader, tensor by tensor."""
    policy = make(rendezvous, layout, model)
    load_policy(policy, folder / "megatron")
    save_policy(policy, folder / "ours")
    described = [FileSystemReader(folder / name).read_metadata() for name in ("megatron", "ours")]
    theirs, ours = (metadata.state_dict_metadata for metadata in described)
    assert theirs.keys() - {"common_state/shard_0_1"} == ours.keys()  # newer versions keep common.pt there
    for key, value in theirs.items():
        if isinstance(value, TensorStorageMetadata):
            assert (ours[key].size, ours[key].properties.dtype) == (value.size, value.properties.dtype), key
            tensors = [torch.empty(value.size, dtype=value.properties.dtype) for _ in range(2)]
            for name, tensor in zip(("megatron", "ours"), tensors, strict=True):
                dcp.load({key: tensor}, checkpoint_id=folder / name)
            assert torch.equal(*tensors), key


def test_our_writer_and_megatrons_write_the_same(tmp_path):
    run(save_with_megatron, "do", "moe", tmp_path / "megatron")
    run_ranks(1, same_contents, "do", "moe", tmp_path)


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
    return two_more_updates(policy)


def test_a_lost_optimizer_state_would_be_noticed(tmp_path):
    """The comparison above is able to fail."""
    _, weights = run(train_and_save, "do", "dense", tmp_path / "c")
    _, found = run(forget_moments, "do", "dense", tmp_path / "c")
    assert max(float((found[name] - weights[name]).abs().max()) for name in weights) > 1e-4


def load_nothing(rendezvous, folder):
    with pytest.raises(CheckpointError, match="is not a torch_dist checkpoint"):
        load_policy(make(rendezvous, "single", "dense"), folder)


def test_a_directory_without_a_checkpoint_is_an_error(tmp_path):
    run_ranks(1, load_nothing, tmp_path)


def load_other_model(rendezvous, folder):
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_policy(make(rendezvous, "do", "moe"), folder)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    run(train_and_save, "do", "dense", tmp_path / "c")
    run_ranks(1, load_other_model, tmp_path / "c")
