"""The table: every name and shape transformers writes, transforms derived by hand, spellings, shards."""

import pytest
import tiny_qwen
import torch

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.mapping import WeightsError, hf_shapes, padded_vocab, parameter_mappings, stored_mappings
from megatron_dapo.weights.model_weights import hf_tensors, megatron_tensor, shard
from megatron_dapo.weights.names import disk_locations, to_canonical, to_te
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size, flat_starts, in_flat_order

QWEN3 = ModelShape(
    "qwen3", layers=2, hidden=4, ffn_hidden=6, heads=4, kv_heads=2, head_dim=2, vocab=5, max_positions=8,
    rope_theta=1e4, norm_eps=1e-6, tied_embeddings=False, qkv_bias=True, qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_the_table_is_exactly_what_transformers_saves(models, kind):
    shape, found = ModelShape.from_dir(models[kind]), HFReader(models[kind])
    trained = {n: stored.shape for n, stored in found.stored.items() if not n.startswith(("mtp.", "model.visual."))}
    assert hf_shapes(shape) == trained


def test_large_elements_come_first_in_a_block():
    """So every tensor starts at a multiple of its element size."""
    kinds = {"a": torch.bfloat16, "b": torch.float32, "c": torch.uint8, "d": torch.float32}
    specs = in_flat_order(TensorSpec(name, dtype, (3,)) for name, dtype in kinds.items())
    assert [spec.name for spec in specs] == ["b", "d", "a", "c"]
    assert flat_starts(specs) == [0, 12, 24, 30, 33] and flat_size(specs) == 33


def test_gate_comes_before_up():
    mapping = parameter_mappings(QWEN3)["decoder.layers.1.mlp.linear_fc1.weight"]
    hf = {f"model.layers.1.mlp.{x}_proj.weight": torch.full((6, 4), n) for n, x in enumerate(("gate", "up"))}
    assert megatron_tensor(mapping, hf)[:, 0].tolist() == [0] * 6 + [1] * 6


def test_qkv_is_interleaved_by_query_group():
    """Two groups of two query heads, head size 2. Values say where a row comes from: 100 q, 200 k, 300 v."""
    mapping = parameter_mappings(QWEN3)["decoder.layers.1.self_attention.linear_qkv.bias"]
    hf = {
        "model.layers.1.self_attn.q_proj.bias": torch.arange(100, 108),
        "model.layers.1.self_attn.k_proj.bias": torch.arange(200, 204),
        "model.layers.1.self_attn.v_proj.bias": torch.arange(300, 304),
    }
    first = [100, 101, 102, 103, 200, 201, 300, 301]
    second = [104, 105, 106, 107, 202, 203, 302, 303]
    full = megatron_tensor(mapping, hf)
    assert full.tolist() == first + second
    assert shard(mapping, full, 0, 2).tolist() == first and shard(mapping, full, 1, 2).tolist() == second
    assert all(torch.equal(tensor, hf[name]) for name, tensor in hf_tensors(mapping, [full]).items())


def test_gate_is_above_up_and_every_rank_gets_part_of_both():
    mapping = parameter_mappings(QWEN3)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = torch.arange(24).view(6, 4), torch.arange(24, 48).view(6, 4)
    full = megatron_tensor(mapping, {mapping.hf[0]: gate, mapping.hf[1]: up})
    assert torch.equal(full, torch.cat([gate, up]))
    assert torch.equal(shard(mapping, full, 1, 3), torch.cat([gate[2:4], up[2:4]]))
    with pytest.raises(WeightsError, match=r"linear_fc1.*4 ranks"):
        shard(mapping, full, 0, 4)


def test_vocabulary_is_padded_with_zeros_and_padding_is_dropped():
    mapping = parameter_mappings(QWEN3)["output_layer.weight"]
    head = torch.ones(5, 4)
    assert padded_vocab(5, 2) == 6 and padded_vocab(6, 2) == 6
    last = shard(mapping, head, 1, 2, rows=6)
    assert last.sum(1).tolist() == [4, 4, 0]
    shards = [shard(mapping, head, 0, 2, rows=6), last]
    assert torch.equal(hf_tensors(mapping, shards)["lm_head.weight"], head)


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_assembled_shards_are_the_hf_tensors(models, kind, size):
    shape, hf = ModelShape.from_dir(models[kind]), HFReader(models[kind])
    for mapping in parameter_mappings(shape).values():
        full = megatron_tensor(mapping, hf)
        assert tuple(full.shape) == mapping.shape
        rows = padded_vocab(shape.vocab, size) if mapping.vocabulary else None
        shards = [shard(mapping, full, rank, size, rows=rows) for rank in range(size)]
        for name, tensor in hf_tensors(mapping, shards).items():
            assert torch.equal(tensor, hf[name]), name


def test_a_wrong_shape_is_named():
    mapping = parameter_mappings(QWEN3)["decoder.final_layernorm.weight"]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight.*\(3,\).*\(4,\)"):
        megatron_tensor(mapping, {"model.norm.weight": torch.ones(3)})


@pytest.mark.parametrize(
    ("te", "local"),
    [
        ("decoder.layers.7.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.7.input_layernorm.weight"),
        ("decoder.layers.7.mlp.linear_fc1.layer_norm_weight", "decoder.layers.7.pre_mlp_layernorm.weight"),
        ("decoder.layers.7.self_attention.linear_qkv.bias", "decoder.layers.7.self_attention.linear_qkv.bias"),
        (
            "decoder.layers.7.mlp.experts.linear_fc2.weight11",
            "decoder.layers.7.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_names_translate_between_transformer_engine_and_local_modules(te, local):
    assert to_canonical(te) == local == to_canonical(local) == to_canonical(f"module.module.{te}")
    assert to_te(local) == te


def test_te_keeps_the_second_norm_of_moe_layers_separate():
    assert to_te("decoder.layers.0.pre_mlp_layernorm.weight", moe=True) == "decoder.layers.0.pre_mlp_layernorm.weight"


def test_live_names_become_global():
    name = to_canonical("decoder.layers.1.mlp.experts.linear_fc1.weight2", layer_offset=10, expert_offset=32)
    assert name == "decoder.layers.11.mlp.experts.local_experts.34.linear_fc1.weight"


@pytest.mark.parametrize("dense", [(), (1,)])
def test_disk_keys_are_unique(dense):
    """No two parameters have the same location in a checkpoint, whatever options saved it."""
    shape = ModelShape(
        "qwen3_moe", layers=3, hidden=4, ffn_hidden=6, heads=4, kv_heads=2, head_dim=2, vocab=5, max_positions=8,
        rope_theta=1e4, norm_eps=1e-6, tied_embeddings=False, qkv_bias=False, qk_norm=True, experts=2,
        experts_per_token=1, expert_ffn_hidden=3, dense_layers=dense,
    )  # fmt: skip
    seen = {}
    for mapping in stored_mappings(shape):
        for place in set(disk_locations(mapping.name, shape)):
            assert seen.setdefault(place, mapping.name) == mapping.name
