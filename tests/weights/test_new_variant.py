"""What a new Qwen variant needs (docs/conversion.md): one line in config/model.py if it combines known features, and
templates in weights/mapping.py for tensors of its own. No other file knows the names of architectures or tensors."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.config import model as config_model
from megatron_dapo.config.model import Architecture
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.weights import mapping
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.locate import check_model_directory
from megatron_dapo.weights.mapping import hf_shapes
from megatron_dapo.weights.verify import verify

CONFIG = {
    "architectures": ["QwenNewForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def variant(monkeypatch, tmp_path):
    """A Qwen3 with Qwen2's QKV bias: the line that config/model.py would get."""
    architecture = Architecture("qwen_new", qkv_bias=True, qk_norm=True)
    monkeypatch.setitem(config_model.ARCHITECTURES, "QwenNewForCausalLM", architecture)
    return tmp_path / "model"


def write_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(ModelShape.from_dir(folder))
    save_file(
        {name: torch.randn(size, generator=generator) for name, size in shapes.items()}, folder / "model.safetensors"
    )
    return shapes


def loaded_equals_file(rendezvous, folder):
    config = parse_config({"policy": {"precision": "fp32", "model": str(folder), "tensor_parallel": 2}})
    policy = Policy(config, ModelShape.from_dir(folder), initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    sent = {name: tensor for bucket in policy.weight_buckets().buckets() for name, tensor in bucket}
    return {name: bool(torch.equal(tensor, HFReader(folder)[name])) for name, tensor in sent.items()}


def test_a_variant_of_known_features_needs_one_line(variant, tmp_path):
    """It converts, verifies, loads into Megatron under tensor parallelism, and comes back through weight sync."""
    shapes = write_model(variant)
    assert "model.layers.1.self_attn.q_proj.bias" in shapes and "model.layers.1.self_attn.q_norm.weight" in shapes
    assert check_model_directory(variant).architecture == "qwen_new"
    hf_to_megatron(variant, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    assert verify(variant, tmp_path / "again").same and verify(variant, tmp_path / "megatron").same
    equal = run_ranks(2, loaded_equals_file, variant)[0]
    assert equal.keys() == shapes.keys() and all(equal.values())


def test_a_tensor_of_its_own_needs_one_template(variant, tmp_path, monkeypatch):
    bias = mapping._Template("self_attention.linear_proj.bias", "hidden", (("self_attn.o_proj.bias", "hidden"),))
    monkeypatch.setattr(mapping, "_LAYER", (*mapping._LAYER, bias))
    mapping.parameter_mappings.cache_clear()
    try:
        assert "model.layers.0.self_attn.o_proj.bias" in write_model(variant)
        hf_to_megatron(variant, tmp_path / "megatron")
        megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
        assert verify(variant, tmp_path / "again").same
        assert "model.layers.0.self_attn.o_proj.bias" in HFReader(tmp_path / "again")
    finally:
        mapping.parameter_mappings.cache_clear()
