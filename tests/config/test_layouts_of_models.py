"""Layouts that Megatron cannot build for certain layers are refused before a run starts."""

from dataclasses import replace

import pytest

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.schema import check_model
from megatron_dapo.selfcheck.synthetic import synthetic_shape


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"context_parallel": 16, "precision": "fp32"}, "8 key heads, which both split: choose a product among 1, 2,"),
        ({"tensor_parallel": 4, "precision": "fp32"}, "2 key/value heads, and Megatron cannot give one head of gated"),
        ({"distributed_optimizer": False}, "gated DeltaNet layers have parameters in fp32 among those in bf16"),
    ],
)
def test_what_gated_delta_net_layers_cannot_do_is_refused(policy, said):
    hybrid = synthetic_shape("hybrid")
    with pytest.raises(ConfigError) as error:
        check_model(parse_config({"policy": policy}).policy, hybrid)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (replace(synthetic_shape("dense"), ffn_hidden=90), "the MLP has 90 hidden units: choose one of 1, 2"),
        (replace(synthetic_shape("moe-shared"), shared_ffn_hidden=90), "the shared expert has 90 hidden units"),
        (replace(synthetic_shape("moe"), ffn_hidden=90), ""),  # no layer has it
    ],
)
def test_tensor_parallel_ranks_have_equal_parts_of_an_mlp(shape, said):
    shape = replace(shape, heads=4, kv_heads=4)
    policy = parse_config({"policy": {"tensor_parallel": 4}}).policy
    if not said:
        check_model(policy, shape)
        return
    with pytest.raises(ConfigError) as error:
        check_model(policy, shape)
    assert f"policy.tensor_parallel is 4, but {said}" in str(error.value)
