"""tools/install.sh, which Dockerfile and apptainer.def run: what it installs, and in which order. pip is a recording
stub, since the packages have gigabytes; the GitHub workflow runs the script itself."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_dapo.doctor.software import LOCKS, NEEDED, read_lock, sglang_pairing, version_tuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """\
#!/bin/bash
[ "$1 $2" = "-m venv" ] && { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/megatron-dapo"; exit; }
[ "$1" = -c ] && { echo /site-packages; exit; }
echo "${0##*/} $* [${CUDNN_PATH:-}]" >> "$RECORD"
"""


def install(tmp_path, *arguments, python=PYTHON):
    (tmp_path / "python3").write_text(python)
    (tmp_path / "python3").chmod(0o755)
    record = tmp_path / "record"
    done = subprocess.run(
        [str(ROOT / "tools/install.sh"), *arguments], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(record)},
    )  # fmt: skip
    return done, record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize(("lock", "package"), [("cpu", "{root} []"), ("cuda13", "{root}[sglang] [")])
def test_the_script_installs_the_locked_versions(lock, package, tmp_path):
    done, record = install(tmp_path, lock, str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    *pip, doctor = record
    assert all(f"-m pip install --disable-pip-version-check --constraint {LOCKS / lock}.txt" in line for line in pip)
    assert f"torch=={read_lock(LOCKS / f'{lock}.txt', (3, 12))['torch']} " in pip[0]
    assert package.format(root=ROOT) in pip[-1]
    assert doctor.startswith("megatron-dapo doctor --only python,packages,lock,apex")
    engine = [line for line in pip if "transformer-engine[pytorch] [/site-packages/nvidia/cudnn]" in line]
    assert len(engine) == (lock == "cuda13")  # built after torch, against torch's own cuDNN


def test_an_unknown_lock_is_refused(tmp_path):
    done, record = install(tmp_path, "cuda12")
    assert done.returncode == 2 and "expected cpu or cuda13, found 'cuda12'" in done.stderr and not record


@pytest.mark.parametrize(("lock", "least"), [("cpu", 11), ("cuda13", 12)])
def test_an_old_python_is_refused_before_anything_is_installed(lock, least, tmp_path):
    old = (
        f'[ "$1" = -c ] && {{ [[ "$2" != *"(3, {least})"* ]]; exit; }}\n[ "$1" = --version ] && exec echo Python 3.10.1'
    )
    done, record = install(tmp_path, lock, str(tmp_path / "venv"), python=PYTHON.replace("[ ", f"{old}\n[ ", 1))
    assert done.returncode == 2 and f"expected Python 3.{least} or newer as python3, found Python 3.10.1" in done.stderr
    assert not record and not (tmp_path / "venv").exists()


def test_images_run_the_script():
    docker, apptainer = (ROOT / "Dockerfile").read_text(), (ROOT / "apptainer.def").read_text()
    assert '/opt/megatron-dapo/tools/install.sh "$LOCK" /opt/venv' in docker and "ARG LOCK=cuda13" in docker
    assert "/opt/megatron-dapo/tools/install.sh cuda13 /opt/venv" in apptainer
    image = re.search(r"^ARG BASE_IMAGE=(.+)$", docker, re.M)
    assert image and f"From: {image[1]}\n" in apptainer


@pytest.mark.parametrize(("lock", "python"), [("cpu", (3, 11)), ("cpu", (3, 12)), ("cuda13", (3, 12))])
def test_the_locked_versions_are_supported(lock, python):
    pins = read_lock(LOCKS / f"{lock}.txt", python)
    for name in ("torch", "megatron-core", "transformers"):
        lowest, too_new = NEEDED[name]
        assert lowest <= version_tuple(pins[name]) and (too_new is None or version_tuple(pins[name]) < too_new)
    assert (version_tuple(pins["megatron-core"]) >= (0, 17)) == (python >= (3, 12))
    if "sglang" in pins:
        assert sglang_pairing(pins["sglang"], pins["torch"]) is None
