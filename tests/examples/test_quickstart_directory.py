"""`quickstart --run-dir` uses new directories and its own ones, and removes nothing that it did not make. With `--lora`
it trains adapters and adds them to the model."""

import importlib.util
import resource
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from tiny_run import environment
from workplace import ROOT

from megatron_dapo import cli


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_directory_with_other_files_is_refused(quickstart, tmp_path, monkeypatch, capsys):
    for name in ("thesis.tex", "start"):
        (tmp_path / name).write_text("mine")
    for extra in ([], ["--fresh"]):
        monkeypatch.setattr(sys, "argv", ["quickstart.py", "--run-dir", str(tmp_path), *extra])
        assert quickstart.main() == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"thesis.tex": "mine", "start": "mine"}


def test_a_new_start_removes_only_what_a_quickstart_makes(quickstart, tmp_path):
    assert quickstart.may_use(tmp_path / "new") and quickstart.may_use(tmp_path)
    (tmp_path / quickstart.MARKER).touch()
    (tmp_path / "notes.md").write_text("mine")
    for name in ("checkpoints", "start", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    outside = tmp_path.with_name("outside")
    outside.mkdir()
    (outside / "weights").touch()
    (tmp_path / "trained").symlink_to(outside)
    (tmp_path / "metrics.jsonl").touch()
    assert quickstart.may_use(tmp_path)
    quickstart.remove_what_was_made(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [quickstart.MARKER, "notes.md"]
    assert (outside / "weights").exists(), "a link is removed, not what it points to"


def test_a_directory_that_cannot_be_written_is_one_line(quickstart, monkeypatch, capsys):
    for place in ("/proc/mine", __file__):
        monkeypatch.setattr(sys, "argv", ["quickstart.py", "--run-dir", place])
        assert quickstart.main() == 2
        assert f"{place} cannot be written" in " ".join(capsys.readouterr().err.split())


def test_a_full_disk_is_one_line(quickstart, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--run-dir", str(tmp_path)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert quickstart.main() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written (File too large)" in " ".join(capsys.readouterr().err.split())


def test_the_command_passes_its_options_on(monkeypatch):
    given = []
    monkeypatch.setattr(cli, "_run_quickstart", lambda words: given.extend(words) or 0)
    assert cli.main(["quickstart", "--lora", "--seed", "1", "--set", "policy.lora.targets=[q_proj]"]) == 0
    assert given == ["--seed", "1", "--lora", "--set=policy.lora.targets=[q_proj]"]


def test_lora_changes_the_layers_that_have_adapters_and_nothing_else(tmp_path):
    settings = [  # a model that was hardly pre-trained, and a reward that it sometimes earns
        "trainer.steps=1", "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=4", "evaluate.every=0",
        "evaluate.samples=1", "rollout.dynamic_sampling=false", "reward.grader=python:tiny_reward.even_characters",
        "policy.lora.targets=[q_proj,v_proj,down_proj]",
    ]  # fmt: skip
    words = ["quickstart", "--lora", "--run-dir", str(tmp_path / "run"), "--pretraining-updates", "1"]
    command = [sys.executable, "-m", "megatron_dapo", *words, *(f"--set={item}" for item in settings)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    start, trained = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("start", "trained"))
    assert start.keys() == trained.keys() and (tmp_path / "run" / "report.html").exists()
    changed = {name.rsplit(".", 2)[1] for name in start if not start[name].equal(trained[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}
    adapter = load_file(next((tmp_path / "run/checkpoints/step_1/policy/adapter").glob("*.safetensors")))
    assert len(adapter) == 2 * 3 * 3, "an A and a B in each of three layers of each of three blocks"
