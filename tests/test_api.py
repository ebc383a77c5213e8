"""`import megatron_dapo as md`: train, evaluate, convert and read_run, with functions that no module has."""

import json
import subprocess
import sys

import pytest
from tiny_run import environment, raw_config, write_config

import megatron_dapo as md
from megatron_dapo.api import _named
from megatron_dapo.cli import DEMO
from megatron_dapo.errors import UserError

NOTEBOOK = """
import math
from fractions import Fraction
import megatron_dapo as md
from megatron_dapo.algorithm import Objective

LIMIT = {"least": 2}

def even(text):
    return Fraction(len(text)) % LIMIT["least"] == 0

def grade(prompt, response):
    return even(response) and math.pi > 3

class Mine(Objective):
    def token_losses(self, scores, batch, sums):
        return -batch.advantages * scores.logprobs

run = md.train("model", "model/prompts.jsonl", grade, objective=Mine, config="run.yaml", run_dir="first",
               trainer__steps=1, **{"rollout.samples_per_prompt": 4})
assert run.config["trainer"]["steps"] == 1 and len(run.records.steps) == 1, run
print("accuracy", run.records.series("reward/accuracy")[1])
result = md.evaluate("model", "model/problems.jsonl", grade, samples=2, config="run.yaml", out="evaluation")
print(sorted(result))
print(md.convert("first", "trained"))
try:
    md.train("model", "model/prompts.jsonl", grade, config="run.yaml", run_dir="second", trainer__stepz=1)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_notebook_trains_with_its_own_functions(tmp_path):
    raw = raw_config(tmp_path / "model", tmp_path / "run", evaluate__every=0)
    raw["evaluate"]["data"] = {"template": "plain"}
    raw["data"] = {"template": "plain"}
    write_config(raw, tmp_path / "run.yaml")
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "cells.py"], cwd=tmp_path, env=environment(), text=True, capture_output=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UserError" not in done.stdout.splitlines()[-1] or "stepz" in done.stdout.splitlines()[-1]
    assert "did you mean 'trainer.steps'?" in done.stdout.splitlines()[-1]
    assert (tmp_path / "trained/model.safetensors").exists() and (tmp_path / "evaluation/results.json").exists()
    metrics = json.loads((tmp_path / "first/metrics.jsonl").read_text().splitlines()[-1])
    assert (
        "reward.grader" not in metrics
        and "python:run_functions_grade.grade" in (tmp_path / "first/config.yaml").read_text()
    )


def helper(prompt, response):
    return True


def test_functions_of_modules_are_named_and_lambdas_refused(tmp_path):
    assert _named(helper, tmp_path) == f"python:{__name__}.helper" and not any(tmp_path.iterdir())
    local = 3

    def closure(prompt, response):
        return local

    for function in (lambda prompt, response: True, closure):
        with pytest.raises(UserError, match="expected a function that uses only global names"):
            _named(function, tmp_path)


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


def test_the_demo_is_a_finished_run():
    run = md.read_run(DEMO)
    steps, accuracy = run.records.series("reward/accuracy")
    assert steps[-1] == 60 and accuracy[-1] > 2 * accuracy[0] and run.records.transcripts
