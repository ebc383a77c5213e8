"""Every supported Qwen: live models at TP 2, PP 2 and EP 2 from the converted checkpoint, sync to an engine, and the
update of a layout.

Conversion there and back is in test_round_trip.py, agreement with transformers in fp64 in
tests/policy/test_model_parity.py, other layouts in test_layouts.py.
"""

import asyncio
import shutil
from dataclasses import dataclass

import pytest
import tiny_qwen
import torch
import transformers
from joined_ranks import Job, RankJobs
from long_lists import some
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.policy_state import load_weights
from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.config.rollout import EmbeddedConfig
from megatron_dapo.engines.embedded.batch_invariant_model import checkpoint_tensors
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.trace import compare, trace_config
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.verify import verify

LAYOUTS = {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}, "ep2": {"expert_parallel": 2}}
NOT_IN_TEST_LAYOUTS = ("qwen3.5", "qwen3.5-moe")


def has_experts(kind):
    return kind in ("qwen3-moe", "qwen2-moe", "qwen3-next", "mixed-moe")


PAIRS = [(kind, layout) for kind in tiny_qwen.KINDS for layout in LAYOUTS if layout != "ep2" or has_experts(kind)]


def live_weights(rendezvous, folder, converted, options):
    """What a live model that loaded the converted checkpoint sends to engines, in float32."""
    config = parse_config({"policy": {"precision": "fp32", "model": str(folder), "timeout_seconds": 60, **options}})
    policy = Policy(config, ModelShape.from_dir(folder), initialize(config.policy, rendezvous=rendezvous))
    load_weights(policy, converted)
    return {name: tensor.clone() for bucket in policy.weight_buckets().buckets() for name, tensor in bucket}


def traced(rendezvous, folder, layout):
    return trace_config(rendezvous, selfcheck_config(LayoutSpec.parse(layout)), ModelShape.from_dir(folder), 1)


@dataclass
class Converted:
    folder: object
    megatron: object
    live: dict[str, Job]


@pytest.fixture(scope="module")
def matrix(models, tmp_path_factory):
    found, jobs = {}, RankJobs()
    for kind in tiny_qwen.KINDS:
        megatron = tmp_path_factory.mktemp("converted") / kind
        hf_to_megatron(models[kind], megatron)
        layouts = [layout for pair, layout in PAIRS if pair == kind]
        live = {name: jobs.add(2, live_weights, models[kind], megatron, LAYOUTS[name]) for name in layouts}
        found[kind] = Converted(models[kind], megatron, live)
    updates = {
        (kind, layout): jobs.add(LayoutSpec.parse(layout).world_size, traced, models[kind], layout)
        for kind in some(tiny_qwen.KINDS, *NOT_IN_TEST_LAYOUTS)
        for layout in ("single", "tp2sp")
    }
    return found, updates


def trained(kind, folder):
    """The tensors in the files that a live model has."""
    shape = ModelShape.from_dir(folder)
    return {name: t for name, t in HFReader(folder).items() if not name.startswith(shape.carried)}


def test_packed_experts_come_back_packed(models, tmp_path):
    """All experts of a layer in one tensor: the same weights are read, and written as they were, to 1 or more files."""
    single, folder = load_file(models["qwen3.5-moe"] / "model.safetensors"), tmp_path / "packed"
    shutil.copytree(models["qwen3.5-moe"], folder)
    tensors = {name: t for name, t in single.items() if ".mlp.experts." not in name}
    for layer in range(4):
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([single[f"{stem}.{e}.{part}_proj.weight"] for e in range(4)]) for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}
    save_file(tensors, folder / "model.safetensors")
    hf_to_megatron(folder, tmp_path / "megatron")
    assert verify(models["qwen3.5-moe"], tmp_path / "megatron").same
    for size in (50_000, 10**9):
        again = tmp_path / f"again-{size}"
        megatron_to_hf(tmp_path / "megatron", again, max_shard=size)
        after = {name: t for file in again.glob("*.safetensors") for name, t in load_file(file).items()}
        assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in after)
        assert verify(folder, again).same


@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_a_live_model_has_and_sends_the_weights_of_the_files(kind, layout, matrix):
    converted = matrix[0][kind]
    sent, *others = converted.live[layout].results()
    expected = trained(kind, converted.folder)
    assert sent.keys() == expected.keys() and not any(others)
    assert all(torch.equal(sent[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_an_engine_loads_what_is_sent(kind, matrix):
    converted = matrix[0][kind]
    sent = converted.live["tp2"].results()[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(converted.folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    async def update():
        engine = EmbeddedEngine(model, config=EmbeddedConfig(batch_tokens=32, prompt_cache=0))
        report = await engine.update_weights(1, [[pair] for pair in sent.items()])
        await engine.close()
        return report

    report = asyncio.run(update())
    assert report.tensors == len(sent)
    prefix = ModelShape.from_dir(converted.folder).prefix
    held = {name.replace("model.", prefix, 1): t for name, t in checkpoint_tensors(model)}
    held.pop("lm_head.weight") if "lm_head.weight" not in sent else None
    assert held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)


@pytest.mark.parametrize("kind", some(tiny_qwen.KINDS, *NOT_IN_TEST_LAYOUTS))
def test_a_layout_gives_the_update_of_one_process(kind, matrix):
    single, split = (matrix[1][kind, layout].results()[0] for layout in ("single", "tp2sp"))
    found = compare(split, single)
    assert found.ok, found
