"""The export of a run's checkpoint can be published: its card has the run's facts and no folder of the machine."""

import json

import pytest

from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.verify import verify

CONFIG = """
policy: {model: %s, optimizer: {lr: 1.0e-06}}
algorithm: {objective: dapo, aggregation: token-mean}
data: {path: /secret/folder/math.jsonl, sources: null}
trainer: {prompts_per_step: 512}
rollout: {samples_per_prompt: 16}
"""
EVALUATIONS = [
    {"step": step, "kind": "eval", "metrics": {"eval/avg@2": score, "eval/seconds": 1.0}}
    for step, score in ((0, 0.25), (4, 0.5), (6, 0.75))
]
START = {"commit": "abc123", "hardware": "8 × H200", "versions": {"torch": "2.13"}}


@pytest.fixture
def run(models, tmp_path):
    """A run whose checkpoint of step 5 is a converted model."""
    hf_to_megatron(models["qwen2"], tmp_path / "megatron")
    policy = tmp_path / "run/checkpoints/step_5/policy"
    policy.parent.mkdir(parents=True)
    (tmp_path / "megatron/release").rename(policy)
    (policy.parent / "manifest.json").write_text("{}")
    (policy / "hf/README.md").write_text("the base")
    (policy / "hf/chat_template.jinja").write_text("{{ messages }}")
    (policy / "hf/generation_config.json").unlink(missing_ok=True)
    run = tmp_path / "run"
    (run / "config.yaml").write_text(CONFIG % "/cache/models--Qwen--Qwen3-4B/snapshots/1")
    (run / "environment.json").write_text(json.dumps([START]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in EVALUATIONS) + '{"torn}\n{"torn')
    return run


def test_the_card_has_the_facts_of_the_run(run, tmp_path):
    report = megatron_to_hf(run, tmp_path / "out", max_shard=100_000)
    card = (tmp_path / "out/README.md").read_text()
    for fact in ("base_model: Qwen/Qwen3-4B", "| steps | 5 |", "| data | math.jsonl |", "| commit | abc123 |",
                 "8 × H200", "| evaluation | step 0 | step 4 |", "| eval/avg@2 | 0.250 | 0.500 |",
                 "dapo, token-mean"):  # fmt: skip
        assert fact in card, fact
    assert "secret" not in card and "cache" not in card
    assert (tmp_path / "out/README.base.md").read_text() == "the base"
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["_from_model_config"]
    assert not any("generation_config" in note for note in report.notes)
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert [*index] == sorted(index) and len({*index.values()}) > 1


def test_other_exports_keep_the_card_of_their_source(run, tmp_path):
    (run / "config.yaml").unlink()
    megatron_to_hf(run, tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text() == "the base"


@pytest.mark.parametrize("content", [b"policy: [", b"", b"policy: {}", b"\xff", CONFIG.replace("%s", "1").encode()])
def test_a_damaged_configuration_costs_only_the_card(run, tmp_path, models, content):
    (run / "config.yaml").write_bytes(content)
    (run / "environment.json").write_text("5")
    report = megatron_to_hf(run, tmp_path / "out")
    (note,) = [note for note in report.notes if "model card" in note]
    assert str(run / "config.yaml") in note
    assert (tmp_path / "out/README.md").read_text() == "the base" and verify(models["qwen2"], tmp_path / "out").same
    assert (tmp_path / "out/generation_config.json").exists()


def test_paths_may_be_relative(run, tmp_path, monkeypatch):
    """Of a step in its folder, and of a model that no run has written."""
    monkeypatch.chdir(run / "checkpoints")
    megatron_to_hf("step_5", tmp_path / "out")
    assert "| steps | 5 |" in (tmp_path / "out/README.md").read_text()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    megatron_to_hf(run / "checkpoints/step_5", tmp_path / "linked")
    assert "| steps | 5 |" in (tmp_path / "linked/README.md").read_text()
    (run / "checkpoints/step_5/policy").rename(tmp_path / "converted")
    monkeypatch.chdir(tmp_path)
    megatron_to_hf("converted", "other")
    assert (tmp_path / "other/README.md").read_text() == "the base"
