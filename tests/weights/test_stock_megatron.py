"""Megatron-LM's own code loads what we write, and we read what it saves; every tensor is compared.

    MEGATRON_LM=checkout SLIME=checkout pytest tests/weights/test_stock_megatron.py

Without the checkouts most tests are skipped; `test_model_weights.py` loads with megatron-core's dist_checkpointing, and
one case of `tools/interop.py` loads into its own `GPTModel`.
"""

import os
import pickle
import queue
import subprocess
import sys
from pathlib import Path

import fused_adam
import pytest
import stock_megatron
import torch
from save_policy import save_policy
from test_model_weights import build_policy

from megatron_dapo.config import ModelShape
from megatron_dapo.policy.megatron.optimizer_state import inner_optimizers
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.synthetic import awkward_batch
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.model_weights import live_mappings, megatron_tensor, shard
from megatron_dapo.weights.verify import verify

needs_megatron_lm = pytest.mark.skipif(
    stock_megatron.unavailable() is not None, reason=str(stock_megatron.unavailable())
)
SLIME = os.environ.get("SLIME", "")

if stock_megatron.unavailable() is None:
    stock_megatron.checkpointing()  # imported once, before ranks are forked
TP2_PP2_VPP2 = {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}
TP2_EP2 = {"tensor_parallel": 2, "expert_parallel": 2}
CASES = [("qwen2", 4, TP2_PP2_VPP2), ("qwen3-moe", 2, TP2_EP2)]


def stock_args(policy, **more):
    shape, options = policy.shape, policy.config.policy
    args = stock_megatron.set_args(
        ["--num-layers", str(shape.layers), "--hidden-size", str(shape.hidden), "--ckpt-format", "torch_dist",
         "--num-attention-heads", str(shape.heads), "--tensor-model-parallel-size", str(options.tensor_parallel),
         "--pipeline-model-parallel-size", str(options.pipeline_parallel), "--use-distributed-optimizer",
         "--expert-model-parallel-size", str(options.expert_parallel), "--override-opt_param-scheduler"],
        world_size=policy.runtime.world_size, data_parallel_size=policy.runtime.groups.dp.size(), **more,
    )  # fmt: skip
    from megatron.core import num_microbatches_calculator as calculator

    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator.ConstantNumMicroBatchesCalculator(1, 1, 1, False, 0)
    return args


def weights_of(policy):
    return {m.name: p.detach().clone() for m, p in live_mappings(policy.model, policy.shape, policy.position)}


def load_in_stock(rendezvous, folder, checkpoint, options):
    """Random weights, replaced by Megatron-LM's load_checkpoint; returns its iteration and the weights."""
    policy = build_policy(rendezvous, folder, options)
    stock_args(policy, load=str(checkpoint), no_load_optim=True)
    module = stock_megatron.checkpointing()
    iteration, _ = module.load_checkpoint(policy.model, None, None)
    assert module.get_checkpoint_version() == 3.0
    return iteration, policy.position, weights_of(policy)


@needs_megatron_lm
@pytest.mark.parametrize(("kind", "world", "options"), CASES, ids=["tp2pp2vpp2", "moe-tp2ep2"])
def test_megatron_lm_loads_a_converted_model(models, tmp_path, kind, world, options):
    hf_to_megatron(models[kind], tmp_path / "megatron")
    ranks = run_ranks(world, load_in_stock, models[kind], tmp_path / "megatron", options, timeout=120)
    hf, compared = HFReader(models[kind]), set()
    from megatron_dapo.weights.mapping import parameter_mappings

    mappings = parameter_mappings(ModelShape.from_dir(models[kind]))
    for iteration, position, held in ranks:
        assert iteration == 0
        for name, parameter in held.items():
            mapping = mappings[name]
            rank, size = position.split(mapping)
            rows = parameter.shape[0] * size if mapping.vocabulary else None
            assert torch.equal(parameter, shard(mapping, megatron_tensor(mapping, hf), rank, size, rows=rows)), name
            compared.add(name)
    assert compared == set(mappings)


def save_with_stock(rendezvous, folder, root, options, **more):
    """One update, then Megatron-LM's save_checkpoint with optimizer and random states."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    policy = build_policy(rendezvous, folder, options)
    policy.load_hf(folder)
    policy.update(awkward_batch(policy.shape, seed=1))
    stock_args(policy, save=str(root), **more)
    filesystem_async._results_queue = queue.Queue()  # Megatron would start a manager process per rank
    stock_megatron.checkpointing().save_checkpoint(7, policy.model, policy.optimizer, None, 0)
    return policy.position, weights_of(policy)


@needs_megatron_lm
@pytest.mark.parametrize(("kind", "world", "options"), CASES, ids=["tp2pp2vpp2", "moe-tp2ep2"])
def test_we_read_what_megatron_lm_saves(models, tmp_path, kind, world, options):
    """The optimizer's dp_reshardable layout, random states and arguments beside the weights do not disturb."""
    run_ranks(world, save_with_stock, models[kind], tmp_path / "run", options, timeout=120)
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "7"
    megatron_to_hf(tmp_path / "run", tmp_path / "hf", reference=models[kind])
    assert verify(tmp_path / "hf", tmp_path / "run").same
    assert not verify(tmp_path / "hf", models[kind]).same
    ranks = run_ranks(world, load_in_stock, tmp_path / "hf", tmp_path / "run", options, timeout=120)
    assert all(iteration == 7 for iteration, _, _ in ranks)
    exported = run_ranks(1, load_exported, models[kind], tmp_path / "hf")[0]
    from megatron_dapo.weights.mapping import parameter_mappings

    mappings = parameter_mappings(ModelShape.from_dir(models[kind]))
    for _, position, held in ranks:
        for name, parameter in held.items():
            rank, size = position.split(mappings[name])
            rows = parameter.shape[0] * size if mappings[name].vocabulary else None
            full = exported[name][: mappings[name].shape[0]]
            assert torch.equal(parameter, shard(mappings[name], full, rank, size, rows=rows)), name


def load_exported(rendezvous, folder, exported):
    policy = build_policy(rendezvous, folder, {})
    policy.load_hf(exported)
    return weights_of(policy)


def optimizer_state(policy):
    """The fp32 parameters, Adam's moments and the step counts of this rank."""
    groups = [(adam, group) for adam in inner_optimizers(policy.optimizer) for group in adam.param_groups]
    states = [
        {"param": parameter.detach().clone()} | {key: value.clone() for key, value in adam.state[parameter].items()}
        for adam, group in groups
        for parameter in group["params"]
    ]
    return states, [group["step"] for _, group in groups]


def save_a_step(rendezvous, folder, path, options):
    """Returns weights and optimizer as saved, and the weights after one more update."""
    fused_adam.use("transformer_engine")  # on the CPU Megatron itself cannot load the state of torch's Adam
    policy = build_policy(rendezvous, folder, options)
    policy.load_hf(folder)
    policy.update(awkward_batch(policy.shape, seed=1))
    save_policy(policy, path)
    saved = weights_of(policy), optimizer_state(policy)
    policy.update(awkward_batch(policy.shape, seed=2))
    return *saved, weights_of(policy)


def continue_in_stock(rendezvous, folder, checkpoint, options):
    """The same after Megatron-LM's load_checkpoint, and its iteration."""
    fused_adam.use("transformer_engine")
    policy = build_policy(rendezvous, folder, options)
    stock_args(policy, load=str(checkpoint), no_load_rng=True)
    iteration, _ = stock_megatron.checkpointing().load_checkpoint(policy.model, policy.optimizer, None)
    loaded = weights_of(policy), optimizer_state(policy)
    policy.updates = 1  # the learning rate is ours; Megatron-LM has a scheduler of its own
    policy.update(awkward_batch(policy.shape, seed=2))
    return *loaded, weights_of(policy), iteration


@needs_megatron_lm
@pytest.mark.parametrize(
    ("kind", "world", "options"), [*CASES, ("qwen2", 2, {})], ids=["tp2pp2vpp2", "moe-tp2ep2", "dp2"]
)
def test_megatron_lm_continues_from_a_checkpoint_of_a_run(models, tmp_path, kind, world, options):
    """Weights, fp32 parameters, moments, step count and iteration are ours, and so is the next update."""
    (tmp_path / "iter_0000000").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    saved = run_ranks(world, save_a_step, models[kind], tmp_path / "iter_0000000", options, timeout=120)
    loaded = run_ranks(world, continue_in_stock, models[kind], tmp_path, options, timeout=120)
    for before, (*after, iteration) in zip(saved, loaded, strict=True):
        assert iteration == 0
        for ours, theirs in ((before[0], after[0]), (before[2], after[2])):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        (ours, steps), (theirs, their_steps) = before[1], after[1]
        assert set(steps) == {1} and steps == their_steps
        for state, other in zip(ours, theirs, strict=True):
            assert set(state) == {"param", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(state[key], other[key]) for key in state)


def test_megatrons_own_model_loads_ours_and_we_export_what_it_saves(models, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import interop

    case = "mixed-moe pp2, dense and MoE layers"
    assert interop.check_case(case, models["mixed-moe"], tmp_path) == {"in": "ok", "out": "ok"}


def test_metadata_has_what_slimes_exporter_reads(models, tmp_path):
    """Where it is missing, slime makes it under a name that torch does not have."""
    hf_to_megatron(models["qwen2"], tmp_path / "megatron")
    assert pickle.loads((tmp_path / "megatron/release/.metadata").read_bytes()).storage_meta.modules == []


@pytest.mark.skipif(not SLIME, reason="SLIME does not name a checkout of slime")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_slimes_exporter_reads_a_converted_model(models, tmp_path, kind):
    hf_to_megatron(models[kind], tmp_path / "megatron")
    tool = Path(__file__).parents[1] / "support" / "slime_export.py"
    paths = ["--input-dir", tmp_path / "megatron/release", "--output-dir", tmp_path / "hf"]
    subprocess.run([sys.executable, tool, *paths, "--origin-hf-dir", models[kind]], check=True, capture_output=True)
    assert verify(tmp_path / "hf", models[kind]).same
