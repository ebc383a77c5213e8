"""Counts are exact: those of transformers' own models, and those that Megatron allocates on a rank."""

import dataclasses
import math

import pytest
import torch
import transformers
from published_models import CONFIGS, published

from megatron_dapo.config import ModelShape
from megatron_dapo.config.families.tensors import Split
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.parameters import adapter_parameters, count_parameters, rank_parameters
from megatron_dapo.weights.adapters import adapter_mappings

# As the model cards state them (number of elements in the safetensors files).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name):
    assert count_parameters(published(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", [*PUBLISHED, "Qwen3-14B"])
def test_total_is_that_of_transformers(name):
    """Two layers of each real model on the meta device, and the whole 0.5B: a layer's count enters linearly."""
    layers = 24 if name == "Qwen2.5-0.5B" else 2
    raw = CONFIGS[name] | {"num_hidden_layers": layers}
    config_class = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))
    with torch.device("meta"):
        config = config_class(**{k: v for k, v in raw.items() if k != "architectures"})
        model = getattr(transformers, raw["architectures"][0])(config)
    assert count_parameters(ModelShape.from_hf(raw)).total == sum(p.numel() for p in model.parameters())


def test_active_parameters_of_the_moe():
    """30B-A3B: 48 layers × 120 idle experts × 3·2048·768."""
    parameters = count_parameters(published("Qwen3-30B-A3B"))
    assert parameters.total - parameters.active == 48 * 120 * 3 * 2048 * 768
    assert round(parameters.active / 1e9, 2) == 3.35


def test_all_parameters_of_dense_models_are_active():
    parameters = count_parameters(published("Qwen2.5-7B"))
    assert parameters.active == parameters.total


def test_rank_counts_derived_by_hand():
    """hidden 8, ffn 12, 4 heads of 2, 2 kv heads, vocabulary 11, 2 layers, TP 2, PP 2, tied, q/k norms.

    One layer: qkv (8+4+4)·8 = 128, proj 8·8 = 64, mlp 3·8·12 = 288: 480, halved 240; norms 16 and 2·2 whole: 260.
    Vocabulary padded to 12: 6 rows · 8 = 48 on the first and again on the last stage; the final norm has 8.
    """
    shape = ModelShape(
        "qwen3", layers=2, hidden=8, ffn_hidden=12, heads=4, kv_heads=2, head_dim=2, vocab=11, max_positions=64,
        rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True, qkv_bias=False, qk_norm=True,
    )  # fmt: skip
    policy = PolicyConfig(tensor_parallel=2, pipeline_parallel=2)
    assert rank_parameters(shape, policy, 0).dense == 260 + 48
    assert rank_parameters(shape, policy, 1).dense == 260 + 8 + 48
    alone = PolicyConfig()
    assert rank_parameters(shape, alone, 0).dense == count_parameters(shape).total == 2 * 500 + 8 + 88


def test_ranks_of_an_untied_model_add_up():
    """Without anything replicated (TP 1), stages and expert ranks together hold the model once."""
    for name in ("Qwen2.5-32B", "Qwen3-30B-A3B"):
        shape = published(name)
        policy = PolicyConfig(pipeline_parallel=4, expert_parallel=8 if shape.is_moe else 1)
        held = [rank_parameters(shape, policy, stage) for stage in range(4)]
        total = sum(h.dense + h.experts * policy.expert_parallel for h in held)
        assert total == count_parameters(shape).total


def test_a_stage_has_the_experts_of_its_own_layers():
    """Experts in the second half of the layers only: on the second of two stages, and in each second part of four."""
    shape = published("Qwen3-30B-A3B")
    shape = dataclasses.replace(shape, dense_layers=tuple(range(shape.layers // 2)))
    for rounds, shares in ((1, (0, 1)), (2, (0.5, 0.5))):
        policy = PolicyConfig(pipeline_parallel=2, virtual_pipeline=rounds)
        found = tuple(rank_parameters(shape, policy, stage).experts for stage in range(2))
        assert found == tuple(share * count_parameters(shape).experts for share in shares)


def test_a_tied_output_layer_counts_once():
    tied = published("Qwen2.5-0.5B")
    untied = dataclasses.replace(tied, tied_embeddings=False)
    assert count_parameters(untied).total - count_parameters(tied).total == tied.vocab * tied.hidden


@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B"])
@pytest.mark.parametrize(("tp", "ep", "targets"), [(1, 1, []), (2, 4, []), (2, 1, ["q_proj", "down_proj"])])
def test_adapters_are_those_of_the_trainer(name, tp, ep, targets):
    """The table from which the trainer makes its adapters, split over ranks by hand."""
    shape = published(name)
    ep = ep if shape.is_moe else 1
    policy = PolicyConfig(tensor_parallel=tp, expert_parallel=ep, lora={"rank": 8, "targets": targets})
    dense = experts = 0
    for mapping in adapter_mappings(shape, 8, tuple(targets)).values():
        size = math.prod(mapping.shape)
        if mapping.expert is not None:
            experts += size // ep
        else:
            dense += size // (1 if mapping.split is Split.NONE else tp)
    found = adapter_parameters(shape, policy, 0)
    assert (found.dense, found.experts) == (dense, experts) and dense > 0
