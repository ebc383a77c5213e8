"""docs/tutorial.md and its notebook: in step with each other, and executed, with fewer steps."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import environment

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("build_notebook", ROOT / "tools/build_notebook.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
FULL, SHORT = "STEPS, PRETRAINING = 12, 1500", "STEPS, PRETRAINING = 1, 100"


def test_the_notebook_is_the_page():
    assert build.NOTEBOOK.read_text() == build.notebook(build.PAGE.read_text())


@pytest.mark.timeout(900)
def test_the_notebook_runs(tmp_path):
    cells = [cell for cell in json.loads(build.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert code.count(FULL) == 1
    (tmp_path / "cells.py").write_text(code.replace(FULL, SHORT))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "cells.py"], cwd=tmp_path, env=environment(), text=True, timeout=880,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert (tmp_path / "tutorial/dapo/report.html").exists() and len(list((tmp_path / "tutorial").glob("*.png"))) >= 6
