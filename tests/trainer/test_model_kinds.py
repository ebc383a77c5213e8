"""Small whole runs with models that are more than a dense transformer: the engine's log-probs are the trainer's before
and after weight sync, and a run resumes from its checkpoint."""

import pytest
from forked import run, steps_of
from tiny_model import tiny_model
from tiny_run import raw_config

from megatron_dapo.data import save_arithmetic_tokenizer

LARGE_ADAPTERS = {
    "policy__lora": {"rank": 4, "alpha": 8.0},
    "policy__optimizer": {"lr": 0.1},
}  # engines cannot miss them


@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen2_moe", {}), ("qwen3_next", {}), pytest.param("qwen2_moe", LARGE_ADAPTERS, id="qwen2_moe-merged-adapters")],
)
def test_training_and_resuming(kind, more, tmp_path):
    folder = tmp_path / "model"
    tiny_model(kind).save_pretrained(folder)
    save_arithmetic_tokenizer(folder)
    settings = {"reward__grader": "python:tiny_reward.even_characters", "rollout__dynamic_sampling": False} | more
    for steps in (2, 3):
        assert run(raw_config(folder, tmp_path / "run", trainer__steps=steps, **settings)) == 0
    found = steps_of(tmp_path / "run")
    assert len(found) == 3
    for metrics in found:
        assert metrics["train/mismatch_mean"] < 1e-4
    assert any(metrics["train/grad_norm"] > 0 for metrics in found)


def test_a_run_that_starts_from_an_adapter(tmp_path):
    """The engine has loaded the base alone, so it must get the merged weights before the first batch."""
    settings = {"trainer__steps": 2, "rollout__dynamic_sampling": False}
    assert run(raw_config(tmp_path / "model", tmp_path / "first", **LARGE_ADAPTERS, **settings)) == 0
    adapter = tmp_path / "first" / "checkpoints" / "step_2" / "policy" / "adapter"
    lora = LARGE_ADAPTERS["policy__lora"] | {"start": str(adapter)}
    again = raw_config(tmp_path / "model", tmp_path / "second", policy__lora=lora, **settings)
    assert run(again) == 0
    found = steps_of(tmp_path / "second")
    assert len(found) == 2
    assert all(metrics["train/mismatch_mean"] < 1e-4 for metrics in found)
