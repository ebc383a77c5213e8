"""Every field of config.json follows transformers or is refused, in every family (`config_sweep`)."""

import pytest
from config_sweep import sweep
from long_lists import ALL_CASES

from megatron_dapo.config.families import FAMILIES, find_family
from megatron_dapo.processes.fork_ranks import run_ranks


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_is_silently_different(model_type, tmp_path):
    ((counts, wrong),) = run_ranks(1, sweep, model_type, tmp_path / "model", 1 if ALL_CASES else 40)
    print(f"{model_type:18}" + "  ".join(f"{name} {count}" for name, count in counts.items()))
    assert wrong == {} and counts["equal"] and counts["refused"]


@pytest.mark.parametrize(
    ("described", "family"),
    [
        ({"model_type": "qwen3"}, "qwen3"), ({"architectures": ["Qwen3ForCausalLM"]}, "qwen3"),
        ({"model_type": "qwen9", "architectures": ["Qwen3ForCausalLM"]}, None), ({"model_type": None}, None),
        ({"model_type": "qwen2", "architectures": ["Qwen3ForCausalLM"]}, "qwen2"),
    ],
)  # fmt: skip
def test_the_type_of_a_model_counts_before_its_architecture(described, family):
    found = find_family(described)
    assert (found and found.model_type) == family
