"""environment.json: what a run was computed with. One entry per start of the run: date, versions, commit, hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.files import write_atomically

NAME = "environment.json"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")


def describe(ranks: int = 1) -> dict[str, Any]:
    """Of this process."""
    versions = {"megatron-dapo": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": commit(), "versions": versions,
        "hardware": hardware(ranks), "ranks": ranks, "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip


def commit() -> str | None:
    """Of the checkout that this package is imported from, with "+changes" if files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def hardware(ranks: int) -> str:
    import torch

    if torch.cuda.is_available():
        return f"{ranks} × {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {ranks} rank{'s' if ranks > 1 else ''}"


def record(run_dir: Path, ranks: int) -> None:
    """Appends the description of this start. A full disk or a damaged file does not end a run."""
    with suppress(OSError):
        write_atomically(run_dir / NAME, json.dumps([*read(run_dir), describe(ranks)], indent=1) + "\n", fsync=False)


def read(run_dir: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads((run_dir / NAME).read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
