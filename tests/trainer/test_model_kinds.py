"""Small whole runs with models that are more than a dense transformer: the engine's log-probs are the trainer's before
and after weight sync, and a run resumes from its checkpoint."""

import pytest
from forked import records, run
from tiny_model import tiny_model
from tiny_run import raw_config

from megatron_dapo.data import save_arithmetic_tokenizer


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_next"])
def test_training_and_resuming(kind, tmp_path):
    folder = tmp_path / "model"
    tiny_model(kind).save_pretrained(folder)
    save_arithmetic_tokenizer(folder)
    settings = {"reward__grader": "python:tiny_reward.even_characters", "rollout__dynamic_sampling": False}
    for steps in (2, 3):
        assert run(raw_config(folder, tmp_path / "run", trainer__steps=steps, **settings)) == 0
    found = [metrics for _, kind, metrics in records(tmp_path / "run") if kind == "step"]
    assert len(found) == 3
    for metrics in found:
        assert metrics["train/mismatch_mean"] < 1e-4
    assert any(metrics["train/grad_norm"] > 0 for metrics in found)
