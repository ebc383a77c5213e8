"""The number of GPUs that this process may use. Uses neither torch nor CUDA, because ranks may be forked later."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess


def gpu_count() -> int:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([item for item in listed.split(",") if item.strip() and item.strip() != "-1"])
    return _nvidia_smi("-L").count("GPU ")


def keep_cuda_uninitialized() -> None:
    """Settings under which `import megatron.core` leaves CUDA alone; a forked rank could not use it otherwise.

    Megatron asks `torch.cuda.is_available()`, which initializes CUDA unless torch is told to ask NVML. It also imports
    flashinfer where that is installed (SGLang brings it), and flashinfer asks every device for its compute capability
    unless the environment lists them.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and importlib.util.find_spec("flashinfer") is not None:
        capabilities = sorted(set(_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").split()))
        if capabilities:
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(capabilities)


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    found = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    return found.stdout if found.returncode == 0 else ""
