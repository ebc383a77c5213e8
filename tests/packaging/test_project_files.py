"""Files for people and services around the code: they parse, and what they name exists."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
YAML_FILES = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"])


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_the_file_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_workflow_runs_the_two_commands_on_every_python_and_machine():
    files = (ROOT / ".github/workflows").glob("*.yml")
    jobs = {name: job for file in files for name, job in yaml.safe_load(file.read_text())["jobs"].items()}
    assert jobs["test"]["strategy"]["matrix"] == {
        "os": ["ubuntu-24.04", "ubuntu-24.04-arm"], "python": ["3.11", "3.12", "3.13"]
    }  # fmt: skip
    lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for wanted in ("make quickstart", "make test", "python -m build", "tools/build_site.py", "tools/install.sh cpu",
                   "tools/interop.py --versions"):  # fmt: skip
        assert any(wanted in line for line in lines), wanted
    for name in re.findall(r"tools/[\w.]+", " ".join(lines)):
        assert (ROOT / name).is_file(), name
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"\bmake ([a-z-]+)", " ".join(lines))) <= set(targets)


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path):
    (tmp_path / "python3.10").write_text('#!/bin/bash\n[ "$1" = -c ] && exit 1\necho "$@" >> "$0.calls"\n')
    (tmp_path / "python3.10").chmod(0o755)
    for python in (tmp_path / "python3.10", tmp_path / "missing"):
        command = ["make", "quickstart", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (
            done.returncode
            and "or not Python 3.11, 3.12 or 3.13: name another one, e.g. make PYTHON=python3.12 quick" in done.stdout
        )
    assert {path.name for path in tmp_path.iterdir()} == {"python3.10"}, "nothing was installed"


def test_plain_pytest_can_collect_every_file():
    """Tests have no packages: equal names stop the collection, and `conftest` is the last one that was imported."""
    files = [*(ROOT / "tests").rglob("*.py")]
    names = Counter(path.name for path in files if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]
    assert not [path for path in files if re.search(r"^(from|import) conftest\b", path.read_text(), flags=re.M)]


def test_hooks_before_a_commit_name_existing_programs():
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/") and (ROOT / program).exists(), program


def test_a_tag_has_its_section_of_the_changelog():
    from megatron_dapo import __version__

    def notes(version):
        command = [sys.executable, str(ROOT / "tools/tag_notes.py"), version]
        return subprocess.run(command, capture_output=True, text=True)

    assert "megatron-dapo init" in notes(f"v{__version__}").stdout
    assert notes("v0.1.0").stdout.startswith("First version.")
    assert notes("v99.0").returncode == 1 and "no section ## 99.0" in notes("v99.0").stderr


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/build_site.py"), str(tmp_path / "site")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert (tmp_path / "site/docs/cluster.html").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_that_opens_process_groups_closes_them(path):
    """Otherwise torch ends it with a warning on a GPU."""
    text = path.read_text()
    assert ("initialize(" in text) == ("    shutdown()\n" in text)
