"""Weights in fp8: what the sender sends is what the format says, from every layout, and what the servers start with."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, ModelShape, parse_config
from megatron_dapo.engines.sglang.transports import WeightManifest
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import random_hf_weights, synthetic_shape
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.fp8 import SCALE, dequantise, is_quantised, quantise
from megatron_dapo.weights.fp8_checkpoint import check_fp8_directory, hf_to_fp8
from megatron_dapo.weights.tensor_spec import flat_size
from megatron_dapo.weights.verify import verify


def by_hand(weight):
    """Block by block, in fp64 until the last step."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            block = weight[i : i + 128, j : j + 128].double()
            scales[i // 128, j // 128] = block.abs().max() / 448
            scaled = block.float() / scales[i // 128, j // 128]
            values[i : i + 128, j : j + 128] = scaled.to(torch.float8_e4m3fn)
    return values, scales


def quantised(weight):
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(by_hand(weight)[1])
    quantise(weight, values, scales)
    return values, scales


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (5, 700), (8300, 130)])
def test_blocks_are_scaled_to_the_largest_fp8_number(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight *= torch.linspace(0.01, 3, shape[0])[:, None].bfloat16()  # blocks differ in size
    values, scales = quantised(weight)
    expected, expected_scales = by_hand(weight)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales, expected_scales)
    assert values.float().abs().max() == 448
    whole = dequantise(values, scales)
    assert torch.equal(dequantise(values[3:290], scales, 3), whole[3:290])
    if not (shape[0] % 128 or shape[1] % 128):
        assert torch.equal(Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32), whole)
    # Three bits of mantissa; the smallest numbers are multiples of 2^-9.
    limit = torch.maximum(weight.float().abs() / 16, dequantise(torch.ones(shape), scales) * 2**-10) * 1.001
    assert ((dequantise(values, scales) - weight.float()).abs() <= limit).all()


LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"{LAYER}self_attn.{x}_proj.weight", True) for x in "qkvo"),
        *((f"{LAYER}mlp.{where}{x}_proj.weight", True) for where in ("", "experts.17.", "shared_expert.")
          for x in ("gate", "up", "down")),
        *((name, False) for name in (
            "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", f"{LAYER}input_layernorm.weight",
            f"{LAYER}self_attn.q_proj.bias", f"{LAYER}self_attn.q_norm.weight", f"{LAYER}mlp.gate.weight",
            f"{LAYER}mlp.shared_expert_gate.weight", f"{LAYER}linear_attn.in_proj_qkvz.weight",
            f"{LAYER}linear_attn.out_proj.weight",
        )),
    ],
)  # fmt: skip
def test_matrices_of_attention_and_mlp_are_quantised(name, expected):
    assert is_quantised(name) == expected


def test_a_block_of_zeros_stays_zero():
    values, scales = torch.empty(4, 4, dtype=torch.float8_e4m3fn), torch.empty(1, 1)
    quantise(torch.zeros(4, 4), values, scales)
    assert not values.view(torch.uint8).any() and scales.isfinite().all() and scales > 0


def bits(tensor):
    """fp8 tensors as bytes: pickle cannot return them from a rank."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def sent(rendezvous, layout, model, senders):
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=rendezvous))
    weights = policy.weight_buckets(20_000, quantization="fp8", senders=senders)
    found = []
    for seed in range(2):
        policy.load_hf(random_hf_weights(policy.shape, seed))
        buckets = [[(name, bits(tensor).clone()) for name, tensor in bucket] for bucket in weights.buckets()]
        found.append({name: tensor for bucket in buckets for name, tensor in bucket})
    return found, [flat_size(plan.specs) for plan in weights.plans]


@pytest.mark.parametrize(
    ("layout", "model", "senders"),
    [("tp2pp2", "dense", "stage"), ("ep2", "moe-shared", "expert_group"), ("tp2sp", "hybrid", "one")],
)
def test_the_senders_send_the_recomputed_quantisation(layout, model, senders):
    """Values and scales bit for bit; what is not quantised is sent as it is."""
    ranks = run_ranks(LayoutSpec.parse(layout).world_size, sent, layout, model, senders)
    for seed in range(2):
        found = {name: tensor for rounds, *_ in ranks for name, tensor in rounds[seed].items()}
        for name, weight in random_hf_weights(synthetic_shape(model), seed).items():
            if not is_quantised(name):
                assert torch.equal(found.pop(name), weight), name
                continue
            values, scales = by_hand(weight)
            assert torch.equal(found.pop(name), bits(values)), name
            assert torch.equal(found.pop(name + SCALE), scales), name
        assert not found
    assert sum(len(rounds[0]) > 0 for rounds, *_ in ranks) > (senders != "one")


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    """By model: the checkpoint for the servers."""
    folder = tmp_path_factory.mktemp("fp8")
    for name in ("qwen2", "qwen3-moe"):
        hf_to_fp8(models[name], folder / name)
    return folder


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_the_checkpoint_for_servers_has_the_same_values(name, models, served):
    found, source = {}, HFReader(models[name])
    for file in (served / name).glob("*.safetensors"):
        found |= load_file(file)
    for key in source:
        if is_quantised(key):
            values, scales = by_hand(source[key])
            assert torch.equal(found.pop(key).view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(found.pop(key + SCALE), scales)
        else:
            assert torch.equal(found.pop(key), source[key])
    assert not found
    config = json.loads((served / name / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert "lm_head" in config["modules_to_not_convert"]
    assert ("model.layers.0.mlp.gate" in config["modules_to_not_convert"]) == (name == "qwen3-moe")
    check_fp8_directory(served / name)


def test_an_update_in_fp8_is_whole_and_can_be_a_snapshot(served, tmp_path):
    """The manifest of the servers' model wants exactly these tensors, and a snapshot keeps their bits."""
    tensors = load_file(served / "qwen2/model.safetensors")
    manifest, snapshot = WeightManifest(served / "qwen2"), Snapshot(tmp_path, served / "qwen2")
    snapshot.begin(1)
    for pair in tensors.items():
        assert manifest.check([pair]) == ""
        snapshot.add([pair])
    assert manifest.missing() == ""
    path = snapshot.commit()
    kept = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(
        torch.equal(kept[n].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8)) for n, t in tensors.items()
    )
    assert json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    snapshot.close()
    manifest.begin()
    manifest.check([pair for pair in tensors.items() if not pair[0].endswith(SCALE)])
    assert "_scale_inv" in manifest.missing()


def test_the_command_refuses_what_it_cannot_serve(models, served, tmp_path, capsys):
    assert main(["convert", "hf-to-fp8", str(models["qwen3"]), str(tmp_path / "out")]) == 0
    assert main(["convert", "hf-to-fp8", str(served / "qwen2"), str(tmp_path / "again")]) == 2
    assert "qwen2 is in fp8 already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"is not in fp8 .* create it with megatron-dapo convert hf-to-fp8"):
        check_fp8_directory(models["qwen2"])
    for rollout in (
        {"weights": {"quantization": "fp8"}},
        {"weights": {"quantization": "fp8"}, "servers": {"model": "x"}, "engine": "embedded"},
    ):
        with pytest.raises(ConfigError, match=r"it needs engine sglang and servers\.model"):
            parse_config({"rollout": rollout})


def test_weights_that_are_not_finite_are_named(models, tmp_path, capsys):
    shutil.copytree(models["qwen2"], tmp_path / "nan")
    tensors = load_file(tmp_path / "nan/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, tmp_path / "nan/model.safetensors", metadata={"format": "pt"})
    assert main(["convert", "hf-to-fp8", str(tmp_path / "nan"), str(tmp_path / "out")]) == 3
    assert "tensor model.layers.1.mlp.up_proj.weight has values that are NaN" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_a_published_checkpoint_in_fp8_becomes_what_transformers_makes_of_it(name, models, served, tmp_path):
    """Bit for bit, through Megatron and back, read whole or row by row."""
    assert main(["convert", "hf-to-megatron", str(served / name), str(tmp_path / "megatron")]) == 0
    assert main(["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "bf16")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    stored, found = HFReader(served / name), HFReader(tmp_path / "bf16")
    files = {k: v for file in (served / name).glob("*.safetensors") for k, v in load_file(file).items()}
    theirs, changed = Fp8Dequantize(None), 0
    for key, tensor in files.items():
        if not key.endswith(SCALE):
            blocks = files.get(key + SCALE)
            if blocks is not None:
                if any(size % grid for size, grid in zip(tensor.shape, blocks.shape, strict=True)):
                    continue  # transformers refuses matrices that are no multiple of the grid
                changed += 1
                tensor = theirs._dequantize_one(tensor, blocks, torch.bfloat16)
            assert torch.equal(found[key].view(torch.uint8), tensor.to(found[key].dtype).view(torch.uint8)), key
            assert torch.equal(stored.rows(key, 1, 3), stored[key][1:4])
    assert changed > 10
    assert verify(served / name, tmp_path / "megatron").same and verify(served / name, tmp_path / "bf16").same
    with pytest.raises(ConfigError, match="quantised weights are not trained"):
        ModelShape.from_dir(served / name)
