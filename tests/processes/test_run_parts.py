"""`make test` fails if a part cannot run, or if a test fails beside other parts and again alone."""

import ast
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TESTS = {
    "right": "def test(): pass",
    "wrong": "def test(): assert False",
    "no_text": "import os\ndef test(): os.write(2, b'\\xff')",
    "disturbed": "import pathlib\ndef test(): assert pathlib.Path('seen').exists() or pathlib.Path('seen').touch()",
    "ended": "import os\ndef test(): os.kill(os.getpid(), 9)",
}
RUN = "import run_parts, sys; run_parts.import_once = lambda: None; sys.exit(run_parts.main(2, eval(sys.argv[1])))"


def run(folder, *names):
    for name in TESTS:
        (folder / f"test_{name}.py").write_text(TESTS[name])
    parts = {name: [f"test_{name}.py", f"--rootdir={folder}", "-s"] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(parts)], cwd=folder, env={"PYTHONPATH": str(SUPPORT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_test_that_fails_beside_others_runs_once_more(tmp_path):
    code, said, _ = run(tmp_path, "no_text", "disturbed")
    assert code == 0 and said.count("once more, alone") == said.count("1 failed") == 1
    assert "test_disturbed.py::test PASSED" in said


def test_what_fails_twice_or_cannot_run_is_an_error(tmp_path):
    code, said, errors = run(tmp_path, "wrong", "ended", "missing", "right")
    assert code == 1 and said.count("once more, alone") == 1 and "1 passed" in said
    assert ast.literal_eval(errors.partition("by part: ")[2]) == {"wrong": 1, "ended": -9, "missing": 4}
