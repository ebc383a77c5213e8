"""The wheel, installed into an empty environment, works without the checkout. The sdist has all files to build it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_dapo import __version__

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # which the builds change
print(build_meta.build_sdist(target), build_meta.build_wheel(target))
"""


def run(*command, cwd, **options):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), built from a copy of the files that git tracks or would."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    names = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(ROOT / name, source / name)
    sdist, wheel = run(sys.executable, "-c", BUILD, str(folder), cwd=source).split()[-2:]
    return folder / sdist, folder / wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of an environment with the wheel. Other packages come from this one, as in `make sglang-cpu`."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python"))
    run(*pip, "install", "--no-deps", "--no-index", str(built[1]), cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "bin"


def bare_environment(folder):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_the_version_is_in_one_place(built):
    sdist, wheel = built
    assert wheel.name == f"megatron_dapo-{__version__}-py3-none-any.whl"
    assert sdist.name == f"megatron_dapo-{__version__}.tar.gz"
    assert __version__ not in (ROOT / "pyproject.toml").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text()


def test_wheel_and_sdist_contain_the_examples_and_the_data_files(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).split("\n")) - {""}
    tracked = {name for name in tracked if (ROOT / name).is_file()}
    examples = {name for name in tracked if name.startswith("examples/")}
    assert len(examples) > 10
    assert {f"megatron_dapo/_{name}" for name in examples} <= in_wheel
    package = {name for name in tracked if name.startswith("megatron_dapo/")}
    assert package <= in_wheel and package | examples <= in_sdist
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= in_sdist
    assert not {name for name in in_wheel if "__pycache__" in name or name.startswith("tests")}


def test_the_quickstart_runs_from_the_wheel_without_the_checkout(installed, tmp_path):
    environment = bare_environment(tmp_path)
    where = run(str(installed / "python"), "-c", "import megatron_dapo; print(megatron_dapo.__file__)", cwd=tmp_path,
                env=environment)  # fmt: skip
    assert where.startswith(str(installed.parent)), where
    settings = [  # of a model that can do nothing yet, all groups are alike
        "trainer.steps=1", "evaluate.samples=1", "trainer.prompts_per_step=2", "trainer.mini_batch_prompts=2",
        "rollout.dynamic_sampling=false",
    ]  # fmt: skip
    run(
        str(installed / "megatron-dapo"), "quickstart", "--run-dir", "first", "--pretraining-updates", "1",
        *(f"--set={setting}" for setting in settings), cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert {"report.html", "summary.json", "trained", "metrics.jsonl"} <= {
        p.name for p in (tmp_path / "first").iterdir()
    }


def test_the_examples_can_be_copied_out_of_the_wheel(installed, tmp_path):
    environment = bare_environment(tmp_path)
    run(str(installed / "megatron-dapo"), "examples", "mine", cwd=tmp_path, env=environment)
    assert (tmp_path / "mine/qwen2.5_32b_dapo/dapo.yaml").read_text() == (
        ROOT / "examples/qwen2.5_32b_dapo/dapo.yaml"
    ).read_text()
    again = subprocess.run(
        [str(installed / "megatron-dapo"), "examples", "mine"], cwd=tmp_path, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert again.returncode == 2 and "mine exists: name a new directory" in again.stderr
