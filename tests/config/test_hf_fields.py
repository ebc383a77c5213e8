"""Every field of config.json follows transformers or is refused, in every family (`config_sweep`)."""

import pytest
from config_sweep import sweep
from long_lists import ALL_CASES

from megatron_dapo.config.families import FAMILIES
from megatron_dapo.processes.fork_ranks import run_ranks


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_is_silently_different(model_type, tmp_path):
    ((counts, wrong),) = run_ranks(1, sweep, model_type, tmp_path / "model", 1 if ALL_CASES else 40)
    print(f"{model_type:18}" + "  ".join(f"{name} {count}" for name, count in counts.items()))
    assert wrong == {} and counts["equal"] and counts["refused"]
