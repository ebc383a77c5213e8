"""What may differ between a run and its resumption, and what is refused."""

import json
from dataclasses import replace

import pytest
from tiny_run import raw_config

from megatron_dapo.checkpoints.folder import check_resume, record_settings
from megatron_dapo.config import ConfigError, check_config, parse_config


@pytest.fixture
def started(tmp_path):
    """A run that has a checkpoint: its configuration and the model's shape."""
    raw = raw_config(tmp_path / "model", tmp_path / "run")
    config = parse_config(raw)
    shape = check_config(config, 1)
    (tmp_path / "run" / "checkpoints" / "step_1").mkdir(parents=True)
    record_settings(tmp_path / "run", config, shape)
    return raw, shape


def test_the_same_run_may_be_resumed(started):
    raw, shape = started
    assert check_resume(parse_config(raw), shape) == []


def test_other_settings_are_listed(started):
    raw, shape = started
    raw["policy"]["optimizer"]["lr"], raw["trainer"]["steps"] = 1e-4, 9
    assert check_resume(parse_config(raw), shape) == ["policy.optimizer.lr: 0.003 → 0.0001", "trainer.steps: 4 → 9"]


def test_another_model_is_refused(started):
    raw, shape = started
    with pytest.raises(ConfigError, match=r"cannot resume: the model of .* has layers 3, but that of the run in .* 2"):
        check_resume(parse_config(raw), replace(shape, layers=3))


def test_another_tokenizer_is_refused(started, tmp_path):
    raw, shape = started
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"+"', '"plus"', 1))
    with pytest.raises(ConfigError, match=r"cannot resume: the tokenizer in .*model is not that of the run in "):
        check_resume(parse_config(raw), shape)


def test_a_tokenizer_of_several_files_is_compared_as_a_whole(started, tmp_path):
    raw, shape = started
    (tmp_path / "model" / "merges.txt").write_text("a b\n")
    with pytest.raises(ConfigError, match="the tokenizer in"):
        check_resume(parse_config(raw), shape)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_another_chat_template_is_listed_as_another_setting_is(started, tmp_path, name):
    raw, shape = started
    with (tmp_path / "model" / name).open("a") as file:
        file.write(" ")
    (line,) = check_resume(parse_config(raw), shape)
    assert line == f"the chat template or another setting of the tokenizer in {tmp_path / 'model'}"
    saved = json.loads((tmp_path / "run" / "resume.json").read_text())
    del saved["template"]  # of an older version
    (tmp_path / "run" / "resume.json").write_text(json.dumps(saved))
    assert check_resume(parse_config(raw), shape) == []


@pytest.mark.parametrize(
    "content", [3, [], {"config": [], "model": {}, "vocabulary": ""}, {"config": {}, "model": 3, "vocabulary": ""}]
)
def test_settings_of_another_kind_are_not_compared(started, tmp_path, content):
    raw, shape = started
    (tmp_path / "run" / "resume.json").write_text(json.dumps(content))
    (line,) = check_resume(parse_config(raw), shape)
    assert "resume.json cannot be read, so the settings were not compared" in line


def test_the_seed_is_refused_with_its_reason(started):
    raw, shape = started
    raw["trainer"]["seed"] = 5
    with pytest.raises(ConfigError, match=r"trainer\.seed is 5, but .* started with 0, and the order of the prompts"):
        check_resume(parse_config(raw), shape)


def test_adapters_of_other_settings_are_refused(started, tmp_path):
    raw, shape = started
    raw["policy"]["lora"] = {"alpha": 8}
    assert check_resume(parse_config(raw), shape) == ["policy.lora.alpha: 32.0 → 8.0"]  # not used without adapters
    raw["policy"]["lora"] = {"rank": 4}
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank is 4, but .* started with 0"):
        check_resume(parse_config(raw), shape)
    record_settings(tmp_path / "run", parse_config(raw), shape)
    raw["policy"]["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"policy\.lora\.alpha is 8\.0.*policy\.lora\.targets is \['q_proj'\]"):
        check_resume(parse_config(raw), shape)


def test_a_field_of_the_model_that_is_newer_than_the_run_is_not_compared(started, tmp_path):
    raw, shape = started
    saved = json.loads((tmp_path / "run" / "resume.json").read_text())
    del saved["model"]["dense_layers"]
    (tmp_path / "run" / "resume.json").write_text(json.dumps(saved))
    assert check_resume(parse_config(raw), shape) == []


def test_a_critic_that_the_checkpoints_do_not_have_is_refused(started, tmp_path):
    raw, shape = started
    raw = raw | {"algorithm": raw.get("algorithm", {}) | {"advantage": "gae"}}
    with pytest.raises(ConfigError, match=r"cannot resume: .*have no critic"):
        check_resume(parse_config(raw), shape)
    (tmp_path / "run" / "checkpoints" / "step_1" / "critic").mkdir()
    assert any("algorithm.advantage" in line for line in check_resume(parse_config(raw), shape))


def test_a_run_without_a_checkpoint_is_a_new_one(started, tmp_path):
    raw, shape = started
    (tmp_path / "run" / "checkpoints" / "step_1").rmdir()
    assert check_resume(parse_config(raw), replace(shape, layers=3)) == []
