"""`quickstart --run-dir` uses new directories and its own ones, and removes nothing that it did not make."""

import importlib.util
import sys

import pytest
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
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--run-dir", "/proc/mine"])
    assert quickstart.main() == 2
    assert "/proc/mine cannot be written" in capsys.readouterr().err


def test_the_command_passes_its_options_on(monkeypatch):
    given = []
    monkeypatch.setattr(cli, "_run_quickstart", lambda words: given.extend(words) or 0)
    assert cli.main(["quickstart", "--lora", "--seed", "1", "--set", "policy.lora.targets=[q_proj]"]) == 0
    assert given == ["--seed", "1", "--lora", "--set=policy.lora.targets=[q_proj]"]
