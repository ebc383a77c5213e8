"""Imports Megatron-Core without what a machine without CUDA does not use; a third of the imports of a rank.

- torch's compiler. Megatron decorates small functions with torch.compile, which imports the compiler at once. On a CPU
  they run uncompiled (`patches`).
- wandb. Megatron imports it, where it is installed, for a logger of its own; metrics go through `observe.trackers`.
- Transformer Engine and Apex. Megatron would take norms and Adam from them, and their kernels need a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE, NOT_IMPORTED = "megatron.core", "wandb"
NEED_A_GPU = ("transformer_engine", "apex", "amp_C")


class MegatronFinder(MetaPathFinder):
    """Acts once, when Megatron-Core is imported, and then leaves `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(PACKAGE)
        if spec is not None and spec.loader is not None:
            spec.loader = _MegatronLoader(spec.loader)
        return spec


class _MegatronLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        if torch.cuda.is_available():
            return self._loader.exec_module(module)
        for name in NEED_A_GPU:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # importing it fails, later as well
        with _without_compiler(torch), _without(NOT_IMPORTED):
            self._loader.exec_module(module)


@contextmanager
def _without_compiler(torch: Any) -> Iterator[None]:
    original, torch.compile = torch.compile, _leave_as_is
    try:
        yield
    finally:
        torch.compile = original


def _leave_as_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _leave_as_is if function is None else function


@contextmanager
def _without(name: str) -> Iterator[None]:
    """An `import` of this module fails, unless it has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def install() -> None:
    if PACKAGE not in sys.modules and not any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MegatronFinder())


def gpu_count() -> int:
    """GPUs that this process may use. Uses neither torch nor CUDA, because ranks may be forked later."""
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
