"""Against Megatron itself: converted checkpoints load at any layout and give transformers' numbers; what the policy
saves, with optimizer state and at any layout, exports exactly; live loading is complete or an error."""

import dataclasses
import queue

import numpy as np
import pytest
import tiny_qwen
import torch
from save_policy import save_policy

from megatron_dapo.checkpoints.policy_state import load_weights
from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.errors import RankError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.mapping import WeightsError, parameter_mappings
from megatron_dapo.weights.model_weights import (
    RankPosition,
    hf_tensors,
    live_mappings,
    load_hf_weights,
    megatron_tensor,
    shard,
)
from megatron_dapo.weights.verify import verify

LENGTHS = np.array([13, 29, 7])
SINGLE: dict = {}
TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
TP2_PP2_VPP2 = {**TP2_PP2, "virtual_pipeline": 2}
PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}
EP2 = {"expert_parallel": 2}
TP2_EP2 = {"tensor_parallel": 2, "expert_parallel": 2}


def build_policy(place, folder, options):
    settings = {"precision": "fp32", "micro_batch_tokens": 64, "timeout_seconds": 60, **options}
    config = parse_config({"policy": settings, "rollout": {"max_prompt_tokens": 20, "max_response_tokens": 40}})
    return Policy(config, ModelShape.from_dir(folder), initialize(config.policy, rendezvous=place))


def score_batch():
    rng = np.random.default_rng(5)
    prompts = np.full(3, 2)
    total = int((LENGTHS - prompts).sum())
    return TrainBatch(
        tokens=rng.integers(0, 101, int(LENGTHS.sum())).astype(np.int32),
        prompt_lengths=prompts, response_lengths=LENGTHS - prompts, advantages=np.ones(3, np.float32),
        loss_mask=np.ones(total, np.bool_), engine_logprobs=np.zeros(total, np.float32),
    )  # fmt: skip


def transformers_logprobs(kind):
    model, batch, out = tiny_qwen.build(kind), score_batch(), []
    for tokens in np.split(batch.tokens, np.cumsum(LENGTHS)[:-1]):
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0], -1)
        out.append(logp[1:-1].gather(1, ids[2:, None]).squeeze(1))
    return torch.cat(out).numpy()


def load_and_score(place, folder, checkpoint, options):
    """Random weights, replaced by Megatron's own loader, then log-probs."""
    policy = build_policy(place, folder, options)
    load_weights(policy, checkpoint)
    groups = policy.runtime.groups
    position = RankPosition(groups.tp.rank(), groups.tp.size(), groups.ep.rank(), groups.ep.size(), 0, 1)
    hf = HFReader(folder)
    for mapping, parameter in live_mappings(policy.model, policy.shape, position):
        rank, size = position.split(mapping)
        rows = parameter.shape[0] * size if mapping.vocabulary else None
        assert torch.equal(parameter, shard(mapping, megatron_tensor(mapping, hf), rank, size, rows=rows)), mapping.name
    return policy.log_probs(score_batch())[0]


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("qwen2", 1, SINGLE), ("qwen2", 4, TP2_PP2_VPP2), ("qwen2-tied", 4, TP2_PP2), ("qwen3", 1, SINGLE),
        ("qwen3", 2, PP2_VPP2), ("qwen3-moe", 1, SINGLE), ("qwen3-moe", 2, EP2), ("qwen3-moe", 2, TP2_EP2),
    ],
)  # fmt: skip
def test_megatron_loads_a_converted_checkpoint(models, tmp_path, kind, world, options):
    hf_to_megatron(models[kind], tmp_path / "megatron")
    found = run_ranks(world, load_and_score, models[kind], tmp_path / "megatron", options, timeout=120)
    expected = transformers_logprobs(kind)
    assert np.abs(expected).max() > 1
    for logprobs in found:
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def save_after_update(place, folder, checkpoint, options, metadata):
    """One optimizer update, then a save: the trainer's with optimizer state, or Megatron's with other options."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    policy = build_policy(place, folder, options)
    policy.load_hf(folder)
    policy.update(awkward_batch(policy.shape, seed=1))
    if metadata is None:
        save_policy(policy, checkpoint)
    else:
        metadata = {**metadata, "dp_cp_group": policy.runtime.groups.dp_cp}
        filesystem_async._results_queue = queue.Queue()  # Megatron would start a manager process per rank
        state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(policy.model)}
        dist_checkpointing.save(state, str(checkpoint))
    groups = policy.runtime.groups
    position = RankPosition(groups.tp.rank(), groups.tp.size(), groups.ep.rank(), groups.ep.size(), 0, 1)
    rows = live_mappings(policy.model, policy.shape, position)
    return groups.tp.rank(), {mapping.name: parameter.detach().clone() for mapping, parameter in rows}


@pytest.mark.parametrize(
    ("kind", "world", "options", "metadata"),
    [
        ("qwen2", 4, TP2_PP2, None),
        ("qwen2-tied", 4, TP2_PP2, None),
        ("qwen3", 2, PP2_VPP2, None),
        ("qwen3-moe", 2, TP2_EP2, None),
        ("qwen3-moe", 2, EP2, {"singleton_local_shards": True}),
        ("qwen3", 2, PP2_VPP2, {"non_homogeneous_layers": True}),
    ],
)
def test_a_checkpoint_of_the_policy_exports(models, tmp_path, kind, world, options, metadata):
    checkpoint = tmp_path / "step_1" / "policy"
    checkpoint.mkdir(parents=True)
    ranks = run_ranks(world, save_after_update, models[kind], checkpoint, options, metadata, timeout=120)
    (checkpoint / "common.pt").write_bytes(b"must not be opened")
    megatron_to_hf(checkpoint.parent, tmp_path / "hf", reference=models[kind])
    shape, exported, original = ModelShape.from_dir(models[kind]), HFReader(tmp_path / "hf"), HFReader(models[kind])
    compared, changed = set(), 0
    for mapping in parameter_mappings(shape).values():
        parts = {tp: held[mapping.name] for tp, held in ranks if mapping.name in held}
        if not parts:
            continue
        shards = [parts[min(parts)]] if mapping.expert is not None else [parts[tp] for tp in sorted(parts)]
        for name, tensor in hf_tensors(mapping, shards).items():
            assert torch.equal(tensor, exported[name]), name
            compared.add(name)
            changed += not torch.equal(tensor, original[name])
    assert compared == set(exported)
    assert changed > len(compared) // 2  # the update moved the weights: this is not the model we started from
    assert not verify(models[kind], checkpoint).same


def load_wrong(place, folder, source, change):
    policy = build_policy(place, folder, {})
    weights = {name: tensor.clone() for name, tensor in HFReader(source).items()}
    change(weights)
    load_hf_weights(policy.model, policy.shape, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.2.mlp.up_proj.weight"),
            r"missing tensor model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (lambda w: w.update({"model.layers.9.x": torch.ones(1)}), r"unexpected tensor model\.layers\.9\.x"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight.*\(63,\).*\(64,\)"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_live_loading_is_exact_or_an_error(models, change, message):
    with pytest.raises(RankError, match=message):
        run_ranks(1, load_wrong, models["qwen2"], models["qwen2"], change)


def load_other_model(place, folder, changes):
    policy = build_policy(place, folder, {})
    other = dataclasses.replace(policy.shape, **changes)
    before = [parameter.detach().clone() for parameter in policy.model[0].parameters()]
    try:
        load_hf_weights(policy.model, other, random_hf_weights(other))
    except WeightsError:
        for old, parameter in zip(before, policy.model[0].parameters(), strict=True):
            assert torch.equal(old, parameter), "the model was touched"
        raise


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": False}, r"linear_qkv\.bias.*no mapping"),
        ({"qk_norm": True}, r"no parameter for tensors decoder\.layers\.0\.self_attention\.k_layernorm"),
        ({"layers": 5}, r"the model has 4 layers, the weights have 5"),
        ({"ffn_hidden": 98}, r"linear_fc1\.weight.*\(196, 64\).*\(192, 64\)"),
        ({"vocab": 104}, r"101 rows for a vocabulary of 104"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_of_another_shape_is_an_error(models, changes, message):
    """Live parameters without a mapping, mappings without a live parameter, other sizes; no parameter is changed."""
    with pytest.raises(RankError, match=message):
        run_ranks(1, load_other_model, models["qwen2"], changes)


def test_ranks_that_cannot_share_a_tensor_are_named(models):
    shape = ModelShape.from_dir(models["qwen3-moe"])
    with pytest.raises(WeightsError, match="4 experts cannot be split over 3"):
        RankPosition(ep_size=3).experts(shape)
