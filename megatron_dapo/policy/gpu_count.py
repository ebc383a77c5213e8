"""The number of GPUs that this process may use. Uses neither torch nor CUDA, because ranks may be forked later."""

from __future__ import annotations

import os
import shutil
import subprocess


def gpu_count() -> int:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([item for item in listed.split(",") if item.strip() and item.strip() != "-1"])
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return found.stdout.count("GPU ") if found.returncode == 0 else 0
