"""`megatron-dapo init`: configurations that need no hand-set key, and `config diff`."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_dapo.cli import main
from megatron_dapo.config import load_config
from megatron_dapo.planner.models import _configs

PLANNING = Path(__file__).resolve().parents[2] / "docs/planning.md"


@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        (
            "Qwen2.5-1.5B",
            1,
            {"rollout.servers.count": 1, "slurm.gpus_per_node": 1, "algorithm.overlong.penalty": "soft"},
        ),
        ("Qwen2.5-7B", 8, {"slurm.nodes": 1, "slurm.gpus_per_node": 8, "rollout.servers.share_gpus": True}),
        ("Qwen2.5-7B", 16, {"slurm.nodes": 2, "trainer.prompts_per_step": 512, "algorithm.overlong.penalty": "soft"}),
        ("Qwen2.5-0.5B", 0, {"rollout.engine": "embedded", "policy.precision": "fp32"}),
    ],
)
def test_a_planned_configuration_is_valid_and_fits(model, gpus, expected, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    words = ["init", "--model", f"Qwen/{model}", "--data", "prompts.jsonl", "--gpus", str(gpus), "--output", str(file)]
    assert main(words) == 0
    config = load_config(file).model_dump()
    for key, value in expected.items():
        section = config
        for part in key.split("."):
            section = section[part]
        assert section == value, key
    if gpus:
        assert main(["plan", str(file), "--gpus", str(gpus)]) == 0 and "Predicted" in file.read_text()
    assert main(words) == 2 and "name a new file" in capsys.readouterr().err
    words[-1] = str(tmp_path / "none" / "run.yaml")
    assert main(words) == 2 and "No such file or directory" in capsys.readouterr().err


def test_the_sizes_in_the_docs_are_those_of_init(capsys):
    rows = re.findall(r"^\| (Qwen[^|]*) \| (\d+) × (\S+) \| .* \| (\d+) \| (\d+) s \|$", PLANNING.read_text(), re.M)
    assert len(rows) >= 7
    for model, gpus, gpu, memory, seconds in rows:
        assert main(["init", "--model", model, "--data", "p.jsonl", "--gpus", gpus, "--gpu", gpu]) == 0
        assert f"Predicted: {seconds} s a step, {memory} GiB a GPU" in capsys.readouterr().out, (model, gpus, gpu)


def test_a_model_that_does_not_fit_is_refused(capsys):
    words = ["init", "--model", "Qwen/Qwen2.5-72B", "--data", "prompts.jsonl", "--gpus", "1"]
    assert main(words) == 2
    assert "does not fit on 1 × h100" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_sequences_are_not_longer_than_the_model_has_positions(gpus, tmp_path, capsys):
    """Responses are shortened as far as prompts of 1024 tokens leave room; a model without room is refused."""
    shape = _configs()["Qwen2.5-0.5B"]
    words = ["init", "--model", str(tmp_path), "--data", "p.jsonl", "--gpus", gpus]
    for positions, longest in ((32768, 2048), (2048, 1024), (1536, 512)):
        (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": positions}))
        assert main(words) == 0
        assert yaml.safe_load(capsys.readouterr().out)["rollout"]["max_response_tokens"] == longest
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 1535}))
    assert main(words) == 2
    assert "max_response_tokens is 1536, but the model has 1535 positions" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["0", "1", "128"])
def test_the_length_penalty_follows_the_responses(gpus, capsys):
    for longest in (8, 400, 3000):
        given = ["rollout.max_prompt_tokens=500", f"rollout.max_response_tokens={longest}"]
        assert main(["init", "--model", "Qwen2.5-0.5B", "--data", "p.jsonl", "--gpus", gpus, *given]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["overlong"]["cache_length"] == longest // 4
    assert (
        main(["init", "--model", "Qwen2.5-0.5B", "--data", "p.jsonl", *given, "algorithm.overlong.cache_length=9"]) == 0
    )
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["overlong"]["cache_length"] == 9


def test_settings_are_part_of_the_file(capsys):
    words = ["init", "--model", "Qwen/Qwen2.5-0.5B", "--data", "p.jsonl", "--slurm", "trainer.steps=7"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["trainer"]["steps"] == 7 and "megatron-dapo slurm run.yaml" in text


def test_a_layout_that_is_given_is_planned_or_refused(tmp_path, capsys):
    words = ["init", "--model", "Qwen/Qwen2.5-7B", "--data", "p.jsonl", "--gpus", "8"]
    assert main([*words, "policy.tensor_parallel=4", "policy.context_parallel=4"]) == 2
    assert "8 ranks cannot hold" in capsys.readouterr().err
    for given in (["policy.tensor_parallel=4", "policy.recompute=full"], ["rollout.servers.tensor_parallel=4"]):
        assert main([*words, *given, "--output", str(tmp_path / f"{len(given)}.yaml")]) == 0
        config = load_config(tmp_path / f"{len(given)}.yaml")
        assert config == load_config(tmp_path / f"{len(given)}.yaml", given)
        servers, said = config.rollout.servers, (tmp_path / f"{len(given)}.yaml").read_text()
        assert 8 % config.policy.model_ranks == 0 and servers.tensor_parallel * servers.count == 8
        capsys.readouterr()
        assert main(["plan", str(tmp_path / f"{len(given)}.yaml"), "--gpus", "8", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        memory = plan["trainer_bytes"]["total"] / 2**30
        assert f"Predicted: {plan['step_seconds']:.0f} s a step, {memory:.0f} GiB a GPU" in said
    alone = [f"policy.{kind}_parallel=1" for kind in ("tensor", "pipeline", "context")]
    assert main([*words[:-1], "1", *alone]) == 2
    assert "the trainer needs" in capsys.readouterr().err
    # Other settings of the policy leave the choice of the layout to init.
    assert main(words) == 0
    chosen = yaml.safe_load(capsys.readouterr().out)["policy"]
    assert main([*words, "policy.optimizer.lr=2e-6"]) == 0
    chosen["optimizer"]["lr"] = 2e-6
    assert yaml.safe_load(capsys.readouterr().out)["policy"] == chosen


@pytest.mark.parametrize(
    "settings",
    [
        ["slurm.engine_nodes=1", "rollout.servers.share_gpus=false", "rollout.weights.transport=distributed"],
        ["slurm.gpus_per_node=4"],
    ],
)
def test_nodes_that_are_given_are_planned(settings, tmp_path, capsys):
    """What init predicts is what plan says of the file: engines on a node of their own, and nodes of four GPUs."""
    file = tmp_path / "run.yaml"
    words = ["init", "--model", "Qwen2.5-7B", "--data", "p.jsonl", "--gpus", "16", "--output", str(file)]
    assert main([*words, *settings]) == 0
    assert capsys.readouterr().out and main(["plan", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert f"Predicted: {plan['step_seconds']:.0f} s a step" in file.read_text() and plan["gpus"] == 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--set", "rollout=5"], "rollout"),
        (["slurm.gpus_per_node=3"], "--gpus is 8: name a multiple of the 3"),
    ],
)
def test_wrong_settings_are_refused(settings, said, capsys):
    assert main(["init", "--model", "Qwen2.5-0.5B", "--data", "p.jsonl", "--gpus", "8", *settings]) == 2
    assert said in capsys.readouterr().err


def test_config_diff(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("trainer: {steps: 7}\npolicy: {model: m}\n")
    (tmp_path / "other.yaml").write_text("trainer: {steps: 8}\npolicy: {model: m}\n")
    assert main(["config", "diff", str(tmp_path / "run")]) == 0
    default = load_config(None).trainer.steps
    assert capsys.readouterr().out.splitlines() == ['policy.model: "" → m', f"trainer.steps: {default} → 7"]
    assert main(["config", "diff", str(tmp_path / "run"), str(tmp_path / "other.yaml")]) == 0
    assert capsys.readouterr().out == "trainer.steps: 8 → 7\n"
