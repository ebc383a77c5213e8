"""Rollouts of agent libraries train: a step through the whole loop, with the openai client and smolagents."""

import json

import numpy as np
from forked import run, steps_of
from tiny_run import make_model, raw_config


def test_rollouts_of_agent_libraries_train(tmp_path):
    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    raw = raw_config(
        folder, tmp_path / "run", trainer__steps=1, trainer__prompts_per_step=2, trainer__mini_batch_prompts=2,
        rollout__generate="python:agent_rollouts.generate", rollout__max_response_tokens=2000,
        policy__micro_batch_tokens=4096, data__template="chat", rollout__max_prompt_tokens=64,
    )  # fmt: skip
    assert run(raw) == 0
    (step,) = steps_of(tmp_path / "run")
    assert step["rollout/turns_mean"] >= 2 and 0 < step["rollout/appended_share"] < 1
    assert np.isfinite(step["train/grad_norm"]) and step["train/grad_norm"] > 0
    assert step["train/tokens"] < 8 * 6 * 4, "only generated tokens carry loss"
