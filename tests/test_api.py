"""`import megatron_dapo as md`: train, evaluate, convert and read_run, with functions that no module has."""

import functools
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from tiny_run import environment

import megatron_dapo as md
from megatron_dapo import api
from megatron_dapo.api import _definition, _named
from megatron_dapo.cli import DEMOS
from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError

NOTEBOOK = """
import math
from fractions import Fraction
import megatron_dapo as md
from megatron_dapo.api import _named
from pathlib import Path

LIMIT, PAIR = {"least": 2}, {1: ({"a"}, None)}

def even(text):
    return Fraction(len(text)) % LIMIT["least"] == 0

def grade(prompt, response):
    return even(response) and math.pi > 3 and PAIR[1] == ({"a"}, None)

files = {}
print(_named(grade, Path("."), files))
[(path, text)] = files.items()
path.write_text(text)
md.train("model", "prompts.jsonl", grade, run_dir="run", trainer__stepz=1)
"""


def test_a_function_of_a_notebook_becomes_a_module_with_what_it_uses(tmp_path):
    """docs/test_tutorial.py trains with such functions."""
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=60
    )
    assert done.stdout == "python:run_functions_grade.grade\n"
    assert "did you mean 'trainer.steps'?" in done.stderr.splitlines()[-1], "found before anything is started"
    module = runpy.run_path(str(tmp_path / "run_functions_grade.py"))
    assert [module["grade"](None, text) for text in ("ab", "abc")] == [True, False]


def test_an_error_of_several_lines_arrives_whole(tmp_path, monkeypatch):
    lines = [
        "step 1",
        "megatron-dapo: interrupted: saving",
        "megatron-dapo: the grader raised:",
        "KeyError: 'a'. Saved",
    ]
    shown = [sys.executable, "-c", f"import sys; sys.exit(print({chr(10).join(lines)!r}) or 1)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **settings: start(shown, **settings))
    with pytest.raises(UserError) as caught:
        api._command("train", folder=tmp_path, config=None)
    assert str(caught.value) == "the grader raised:\nKeyError: 'a'. Saved"
    lines[:] = ["Segmentation fault", ""]
    shown[2] = f"import sys; sys.exit(print({chr(10).join(lines)!r}) or 1)"
    with pytest.raises(UserError, match="Segmentation fault"):
        api._command("train", folder=tmp_path, config=None)


def test_modules_beside_the_configuration_are_found_and_any_output_is_shown(tmp_path, monkeypatch, capfd):
    """As by the command `train`. A library in C may print bytes that are no text."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/grader_of_mine.py").write_text("grade = print")
    file = tmp_path / "mine/run.yaml"
    file.write_text("reward: {grader: python:grader_of_mine.grade}")
    code = "import sys, grader_of_mine; sys.stdout.buffer.write(b'caf\\xe9\\n')"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **settings: start([sys.executable, "-c", code], **settings)
    )
    md.train("model", "a.jsonl", run_dir=tmp_path / "run", config=file, dry_run=True)
    assert capfd.readouterr().out == "caf\ufffd\n"


def helper(prompt, response):
    return True


def test_functions_of_modules_are_named_and_lambdas_refused(tmp_path):
    files = {}
    assert _named(helper, tmp_path, files) == f"python:{__name__}.helper" and not files
    local = 3

    def closure(prompt, response):
        return local

    for function in (lambda prompt, response: True, closure):
        with pytest.raises(UserError, match="expected a function that uses only global names"):
            _named(function, tmp_path, files)


UNKNOWN = float("inf")
FIND = re.compile("a").findall


def test_values_that_cannot_be_copied_are_refused():
    for name in ("UNKNOWN", "FIND"):
        with pytest.raises(UserError, match=f"{name} is a .* which cannot be copied"):
            _definition(name, globals()[name], {})
    assert _definition("join", os.path.join, {}) == "from posixpath import join as join"


class Grader:
    def __call__(self, prompt, response):
        return True


@pytest.mark.parametrize("reward", [Grader(), Grader().__call__, functools.partial(helper, None)], ids=type)
def test_a_reward_is_a_function_or_a_class(tmp_path, reward):
    with pytest.raises(UserError, match=r"expected a function, found a .*; define one that calls it"):
        _named(reward, tmp_path, {})


@pytest.fixture
def commands(monkeypatch):
    """The commands that would have been run."""
    found = []
    monkeypatch.setattr(api, "_command", lambda *arguments, folder, config: found.append(arguments))
    return found


def test_settings_of_python_arrive_unchanged(tmp_path, commands):
    texts = {"data__template": "{question}\n\nThink.\u2028\n", "data__system": "null"}
    paths = {"evaluate.data.path": tmp_path / "a.jsonl", "policy__optimizer": {"lr": "1e-3"}, "trainer__steps": "7"}
    run = md.train("model", [tmp_path / "😀.jsonl", "b.jsonl"], run_dir=tmp_path, dry_run=True, **texts, **paths)
    config = load_config(tmp_path / "from_python.yaml")
    assert run.path == tmp_path and commands == [("train", str(tmp_path / "from_python.yaml"), "--dry-run")]
    assert (config.data.template, config.data.system) == tuple(texts.values())
    assert [source.path for source in config.data.sources] == [str(tmp_path / "😀.jsonl"), "b.jsonl"]
    assert config.evaluate.data.path == str(tmp_path / "a.jsonl")
    assert (config.policy.optimizer.lr, config.trainer.steps) == (1e-3, 7)


def test_the_run_directory_is_run_dir(tmp_path, commands, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert md.train("model", "a.jsonl", run_dir="~/run", dry_run=True).path == tmp_path / "run"
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "kind": "step", "metrics": {}}\n')
    assert md.read_run("~/run").path == tmp_path / "run"
    assert repr(md.read_run("~/run")) == f"TrainedRun(path={tmp_path / 'run'!r})", "what a notebook shows"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text('{"samples": 1}')
    assert md.evaluate("model", "a.jsonl", out="~/out") == {"samples": 1}
    for key in ("trainer__run_dir", "trainer.run_dir"):
        with pytest.raises(UserError, match=r"trainer\.run_dir: give it as run_dir="):
            md.train("model", "a.jsonl", **{key: tmp_path / "other"})


def test_data_replaces_that_of_the_file_and_several_benchmarks_have_a_result_each(tmp_path, commands):
    file, out = tmp_path / "base.yaml", tmp_path / "out"
    file.write_text("data: {sources: [{path: x}]}\nevaluate: {data: {sources: [{path: x}]}}\n")
    md.train("model", "a.jsonl", run_dir=tmp_path / "run", config=file, dry_run=True)
    assert list(load_config(tmp_path / "run/from_python.yaml").data.files) == ["a"]
    for name in "ab":
        (out / name).mkdir(parents=True)
        (out / name / "results.json").write_text(f'{{"name": "{name}"}}')
    found = md.evaluate("model", ["a.jsonl", tmp_path / "b.jsonl"], out=out, config=file)
    assert found == {"a": {"name": "a"}, "b": {"name": "b"}}


def test_the_run_directory_of_the_file_is_used(tmp_path, commands, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "base.yaml"
    for text, expected in (("trainer: {run_dir: runs/mine}", "runs/mine"), ("trainer: {steps: 3}", "runs/python")):
        file.write_text(text)
        assert md.train("model", "a.jsonl", config=file, dry_run=True).path == tmp_path / expected
        assert load_config(tmp_path / expected / "from_python.yaml").trainer.run_dir == str(tmp_path / expected)
    assert md.train("model", "a.jsonl", dry_run=True).path == tmp_path / "runs/python"


def test_a_function_is_not_copied_where_python_cannot_find_it(tmp_path, monkeypatch):
    monkeypatch.setattr(helper, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "helper", helper, raising=False)
    with pytest.raises(UserError, match="12:30: Python finds no modules in directories with ':'"):
        _named(helper, tmp_path / "12:30", {})


def test_a_mistake_leaves_no_directory(tmp_path):
    missing, folder = tmp_path / "missing.yaml", tmp_path / "run"
    mistakes = (
        ({"config": missing}, "missing.yaml"), ({"reward": lambda: True}, "global names"),
        ({"reward": test_a_mistake_leaves_no_directory, "trainer__stepz": 5}, "stepz"),
    )  # fmt: skip
    for settings, message in mistakes:
        with pytest.raises(UserError, match=message):
            md.train("model", "prompts.jsonl", run_dir=folder, **settings)
        with pytest.raises(UserError, match=message):
            md.evaluate("model", "prompts.jsonl", out=folder, **settings)
        assert not folder.exists()


def test_frames_have_a_row_for_each_step(tmp_path):
    lines = [{"step": step, "kind": "step", "metrics": {"reward/mean": step / 10}} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = md.read_run(tmp_path)
    assert run.records.series("reward/mean") == ([1, 2], [0.1, 0.2])
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="pip install pandas"):
            _ = run.steps
        return
    assert run.steps["reward/mean"].to_dict() == {1: 0.1, 2: 0.2} and run.evaluations.empty


def test_the_import_is_light():
    code = (
        "import sys, megatron_dapo; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'pydantic')))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), text=True, capture_output=True, timeout=60)
    assert done.stdout.strip() == "[]", done


@pytest.mark.parametrize("demo", sorted(DEMOS.iterdir()), ids=lambda path: path.name)
def test_a_demo_is_a_small_finished_run(demo):
    run = md.read_run(demo)
    _, accuracy = run.records.series("reward/accuracy")
    assert sum(accuracy[-5:]) > sum(accuracy[:5]) and run.records.transcripts
    assert sum(path.stat().st_size for path in demo.rglob("*") if path.is_file()) <= 600_000
