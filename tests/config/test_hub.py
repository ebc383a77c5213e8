"""Models by their name on the hub, without a network: a cache directory as huggingface_hub lays it out."""

import json
import sys

import pytest
from sparse_model import write_sparse_model
from workplace import MODELS

from megatron_dapo.ablation import runs
from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import local_model, with_local_model

NAME, COMMIT = "Qwen/Qwen2.5-1.5B", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache with the small files of one model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps(MODELS["models/Qwen2.5-1.5B-Instruct"]))
    return snapshot


def test_a_cached_model_is_found_by_its_name(cache):
    assert local_model(NAME) == str(cache)
    assert local_model(f"{NAME}@{COMMIT}") == str(cache)
    config = with_local_model(load_config(None, [f"policy.model={NAME}"]))
    assert config.policy.model == str(cache) and config.policy.tensor_parallel == 1


def test_plan_reads_the_config_of_a_cached_model(cache, capsys):
    assert main(["plan", "--model", NAME, "--gpus", "8"]) == 0
    assert "FITS" in capsys.readouterr().out


def test_every_command_that_uses_the_model_finds_it_and_modules_beside_the_file(cache, tmp_path, monkeypatch):
    used, before = [], [*sys.path]

    def use(config, *_, **__):
        used.append((config.policy.model, sys.path[-1]))
        sys.path[:] = before
        return 0

    for name in ("launch.local.run_training", "ablation.runs.run_training", "evaluation.run"):
        monkeypatch.setattr(f"megatron_dapo.{name}", use)
    monkeypatch.setattr("megatron_dapo.selfcheck.engine.run_engine_check", use)
    file = tmp_path / "mine" / "run.yaml"
    file.parent.mkdir()
    file.write_text(f"policy: {{model: {NAME}}}\n")
    for command in (["train"], ["eval"], ["selfcheck", "engine"]):
        assert main([*command, str(file)]) == 0
    assert runs._train(str(file), []) == 0, "a run of ablate"
    assert used == [(str(cache), str(file.parent))] * 4


def test_doctor_checks_a_model_of_the_hub_without_its_weights(cache, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(f"policy: {{model: {NAME}}}\n")
    doctor = ["doctor", "run.yaml", "--only", "model", "--json"]
    assert main(doctor) == 0
    (check,) = json.loads(capsys.readouterr().out)
    assert check["status"] == "warn" and "no weights" in check["found"] and f"hf download {NAME}" in check["remedy"]
    write_sparse_model(cache, json.loads((cache / "config.json").read_text()))
    assert main(doctor) == 0 and json.loads(capsys.readouterr().out)[0]["status"] == "ok"
    assert main([*doctor, "policy.model=Qwen/Missing"]) == 1
    assert "hf download Qwen/Missing" in capsys.readouterr().out


def test_a_directory_of_that_name_wins(cache, tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    assert local_model(NAME) == NAME


@pytest.mark.parametrize("text", ["", "models/x/y", "/models/qwen", "qwen", "./models/qwen"])
def test_other_texts_are_left_alone(cache, text):
    assert local_model(text) == text


def test_offline_says_what_to_do(cache, capsys):
    with pytest.raises(ConfigError, match=r"no directory Qwen/Missing.* HF_HUB_OFFLINE is set: .*hf download Qwen/"):
        local_model("Qwen/Missing")
    with pytest.raises(ConfigError, match="hf download"):
        local_model(f"{NAME}@another-branch")
    with pytest.raises(ConfigError, match="hf download ORGANISATION/Missing --local-dir models/Missing"):
        local_model("models/Missing")
    assert main(["plan", "--model", "Qwen/Missing", "--gpus", "8"]) == 2
    assert "hf download Qwen/Missing" in capsys.readouterr().err
