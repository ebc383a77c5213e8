"""Layouts of models with gated DeltaNet layers: what Megatron cannot do with them is refused before a run starts."""

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
