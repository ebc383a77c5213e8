"""docs/tutorial.md and its notebook: in step with each other, and executed, with fewer steps. This is also the test of
`md.train`, `md.evaluate` and `md.convert`: the first run is a process of its own, as in a notebook; the others are
forks of one process, which has imported everything."""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from tiny_run import environment

from megatron_dapo import api
from megatron_dapo.cli import main
from megatron_dapo.launch.local import import_trainer
from megatron_dapo.processes.fork_ranks import run_in_fork

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("build_notebook", ROOT / "tools/build_notebook.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
SHORTER = {
    "from quickstart.quickstart import make_model": "from quickstart import quickstart\n"
    "quickstart.PRETRAINING_BATCH = 32\nmake_model = quickstart.make_model",
    "STEPS, PRETRAINING = 12, 1500": "STEPS, PRETRAINING = 1, 100",
    '"evaluate.every": 0,': '"evaluate.every": 0, "trainer.prompts_per_step": 4, "trainer.mini_batch_prompts": 2,'
    ' "rollout.dynamic_sampling": False, "observe.report": False,',
}


def test_the_notebook_is_the_page():
    assert build.NOTEBOOK.read_text() == build.notebook(build.PAGE.read_text())


def run_cells(folder):
    os.environ.update(environment())
    os.chdir(folder)
    import_trainer(driver=True)
    real, started = api._command, []

    def command(*arguments, folder, config):
        started.append(arguments[0])
        if len(started) == 1:
            return real(*arguments, folder=folder, config=config)
        if run_in_fork(in_fork, arguments, folder):
            raise AssertionError(arguments)

    api._command = command
    runpy.run_path("cells.py", run_name="__main__")
    return started


def in_fork(arguments, folder):
    sys.path.insert(0, str(folder))
    return main(list(arguments))


@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path):
    cells = [cell for cell in json.loads(build.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    for full, short in SHORTER.items():
        assert code.count(full) == 1
        code = code.replace(full, short)
    (tmp_path / "cells.py").write_text(code)
    started = run_in_fork(run_cells, tmp_path)
    assert started.count("train") == 11 and started.count("eval") == 2
    made = tmp_path / "tutorial"
    assert (made / "dapo/report.html").exists() and (made / "trained/model.safetensors").exists()
    assert len(list(made.glob("*.png"))) >= 6
    assert "python:run_functions_even.even" in (made / "own_reward/config.yaml").read_text()
