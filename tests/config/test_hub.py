"""Models by their name on the hub, without a network: a cache directory as huggingface_hub lays it out."""

import json

import pytest
from workplace import MODELS

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
