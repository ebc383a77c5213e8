"""Settings without --set, log levels, and keys of other tools on the command line."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published_models import published
from tiny_run import environment

from megatron_dapo.arguments import set_log_level, with_set
from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, load_config, parse_config
from megatron_dapo.errors import UserError
from megatron_dapo.launch.local import print_plan


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


def test_a_terminal_without_unicode_gets_escapes():
    """As with LANG=en_US, whose encoding is Latin-1: it has no arrow."""
    command = [sys.executable, "-m", "megatron_dapo", "config", "diff", "examples/quickstart/config.yaml"]
    done = subprocess.run(command, env=environment() | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, timeout=60)
    assert done.returncode == 0 and rb"trainer.steps: 330 \u2192" in done.stdout, done.stderr


DIFF = "config diff examples/quickstart/config.yaml"
TABLE = "plan --model Qwen2.5-0.5B --gpus 1 trainer.prompts_per_step=32"  # printed by rich, which would end with 1


@pytest.mark.parametrize(
    ("words", "unbuffered"), [(DIFF, ""), (DIFF, "1"), ("config --help", ""), (TABLE, ""), (TABLE, "1")]
)
def test_a_reader_that_ends_early_is_no_error(words, unbuffered):
    """As `megatron-dapo config diff FILE | head -1`."""
    command = [sys.executable, "-m", "megatron_dapo", *words.split()]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, env=environment() | {"PYTHONUNBUFFERED": unbuffered}, stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    notice = b"Qwen2.5-0.5B is not here: the published config.json of that model is used\n" if words == TABLE else b""
    assert (done.returncode, done.stderr) == (141, notice)


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


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tra"], "train"),
        (["train", "--dr"], "--dry-run"),
        (["train", "trainer.run_d"], "trainer.run_dir"),
        (["convert", "hf-to-m"], "hf-to-megatron"),
        (["explain", "policy.opti"], "policy.optimizer.lr"),
    ],
)
def test_tab_completes_commands_options_and_settings(capsys, typed, expected):
    assert main(["explain", "--completion", "bash"]) == 0
    script = capsys.readouterr().out.replace("compopt", ":")  # only inside a completion
    words = " ".join(["megatron-dapo", *typed])
    script += f"\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _megatron_dapo; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert expected in found and len(found) < 20


def test_the_schema_is_in_the_package_and_accepts_an_example(capsys):
    assert main(["explain", "--schema"]) == 0
    schema = json.loads(Path(capsys.readouterr().out.strip()).read_text())
    section = schema["$defs"]["OptimizerConfig"]["properties"]["lr"]
    assert section["description"] == "Learning rate after the warm-up." and "base" in schema["properties"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--dryrun", "did you mean '--dry-run'?"),
        ("--rollout-batch-size", "here it is called 'trainer.prompts_per_step'"),
        ("--lr=1", "here it is called 'policy.optimizer.lr'"),
        ("--resume", "a run that is in trainer.run_dir is resumed"),
        ("--nonsense", "settings are given with their section"),
    ],
)
def test_an_option_that_there_is_not(capsys, word, said):
    with pytest.raises(SystemExit):
        main(["train", "examples/quickstart/config.yaml", word])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["beta=0.04"], "unknown key 'beta'; here it is called 'algorithm.kl.coefficient'"),
        (
            ["algorithm.adv_estimator=grpo"],
            "here it is called 'algorithm.advantage' (grpo is group-std",
        ),
        (["trainer.global_batch_size=256"], "(there in samples, here in prompts: divide by the samples per prompt)"),
        (["data.gen_batch_size=1536"], "(there prompts, here a multiple of the batch: 1536 / 512 = 3)"),
        (["over_sampling_batch_size=64"], "(there prompts, here a multiple of the batch)"),
        (
            ["rollout.sampler.oversampling=0"],
            "--set: rollout.sampler.oversampling: expected 'adaptive' or a number of at",
        ),
    ],
)
def test_hints_name_units_and_where_the_mistake_is(settings, said):
    with pytest.raises(ConfigError) as error:
        load_config("examples/quickstart/config.yaml", settings)
    assert said in str(error.value)


@pytest.mark.parametrize("word", ["~nobody-here/run.yaml", "run.yaml"])
def test_a_file_of_an_unknown_user_does_not_exist(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("base: ~nobody-here/base.yaml\n")
    assert main(["config", "diff", word]) == 2
    assert "~nobody-here" in (said := capsys.readouterr().err) and "no such file" in said
    assert main(["import", "~nobody-here/run.sh"]) == 2


def test_base_files(tmp_path):
    (tmp_path / "a.yaml").write_text("trainer: {steps: 7, seed: 3}\nrollout: {stop: [x, y]}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.yaml").write_text("base: ../a.yaml\ntrainer: {seed: 4}\nrollout: {stop: [z]}\n")
    config = load_config(tmp_path / "sub/b.yaml", ["trainer.run_dir=elsewhere"])
    assert (config.trainer.steps, config.trainer.seed, config.rollout.stop) == (7, 4, ["z"])
    for text, said in (("base: c.yaml\n", "based on this file"), ("base: 3\n", "name of a YAML file"),
                       ("base: none.yaml\n", "none.yaml: no such file (the base of")):  # fmt: skip
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_config(tmp_path / "c.yaml")


def test_brackets_in_paths_are_not_markup(capsys):
    config = parse_config({"trainer": {"run_dir": "runs/[lr=1e-6] [/seed]"}})
    print_plan(config, published("Qwen2.5-0.5B"), 1)
    assert "runs/[lr=1e-6] [/seed] (new)" in capsys.readouterr().err


def test_a_configuration_in_the_home_directory_is_found_with_its_modules(tmp_path, monkeypatch):
    """Nothing expands ~ in a list of arguments, or behind an equals sign."""
    folder = tmp_path / "here"
    (folder / "run").mkdir(parents=True)
    (folder / "run.yaml").write_text(f"trainer: {{run_dir: {folder}/run}}")
    (folder / "run" / "config.yaml").write_text("")  # compared with the given file
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("megatron_dapo.launch.local.run_training", lambda config, dry_run: 7)
    assert main(["train", "~/here/run.yaml"]) == 7
    assert str(folder) in sys.path
