"""Settings without --set, log levels, and keys of other tools on the command line."""

import logging

import pytest

from megatron_dapo.arguments import set_log_level, with_set
from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.errors import UserError


def test_settings_in_hydras_spelling_are_accepted():
    words = ["train", "run.yaml", "trainer.steps=5", "--dry-run", "+data.path=a=b.jsonl", "--set", "trainer.seed=1"]
    assert with_set(words) == [
        "train", "run.yaml", "--set", "trainer.steps=5", "--dry-run", "--set", "data.path=a=b.jsonl", "--set",
        "trainer.seed=1",
    ]  # fmt: skip
    assert with_set(["simulate", "r.yaml", "--sweep", "rollout.max_staleness=0,1"])[-1] == "rollout.max_staleness=0,1"
    for word in ("run.yaml", "runs/a=b", "--gpu=h100", "x=1", "runs/v1.0=final"):
        assert with_set(["plan", word]) == ["plan", word], "no setting"
    with pytest.raises(UserError, match=r"trainer.checkpoint.every=null"):
        with_set(["train", "run.yaml", "~trainer.checkpoint.every"])


def test_a_setting_without_set_reaches_the_configuration(capsys):
    assert main(["train", "examples/quickstart/config.yaml", "trainer.stepz=5"]) == 2
    assert "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?" in capsys.readouterr().err


def test_without_a_command_all_commands_are_listed(capsys):
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name}" in said for name in ("quickstart", "train", "watch", "doctor"))


def test_keys_of_verl_are_answered_with_ours():
    with pytest.raises(ConfigError) as error:
        load_config(None, [
            "actor_rollout_ref.rollout.n=16", "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8", "rollout.n=16", "data.train_files=x",
        ])  # fmt: skip
    text = str(error.value)
    for theirs, ours in {
        "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.servers.tensor_parallel",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "policy.tensor_parallel",
        "rollout.n": "rollout.samples_per_prompt",
        "data.train_files": "data.path",
    }.items():
        assert f"unknown key {theirs!r}; here it is called {ours!r}" in text


def test_a_list_of_files_is_short_for_sources():
    config = load_config(None, ["data.path=[a.jsonl, b.parquet]", "evaluate.data.path=[c.jsonl, ~/d.jsonl]"])
    assert [source.path for source in config.data.sources] == ["a.jsonl", "b.parquet"] and not config.data.path
    assert list(config.evaluate.data.files) == ["c", "d"]
    assert not config.evaluate.data.sources[1].path.startswith("~")
    with pytest.raises(ConfigError, match="under one of them"):
        load_config(None, ["data.path=[a.jsonl]", "data.sources=[{path: b.jsonl}]"])


def test_verbose_sets_the_level_of_this_package(monkeypatch):
    logger = logging.getLogger("megatron_dapo")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    set_log_level(0)
    assert logger.level == logging.NOTSET
    set_log_level(1)
    assert logger.level == logging.DEBUG
