"""Runs `sglang.launch_server` on a CPU. A start costs 12 CPU seconds; SGLang's own way costs 37.

SGLang spawns its scheduler and detokenizer because CUDA does not survive a fork, and each imports SGLang again. On a
CPU they are forked. SGLang also imports every model that it knows; here only the served one. Garbage is not collected
during the imports: there is none, and each search visits everything imported so far.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"  # SGLang's variable: file names in sglang/srt/models


def main() -> None:
    gc.disable()
    os.environ.setdefault(DISABLED_MODELS, ",".join(other_models(served_architecture(sys.argv))))
    fork_instead_of_spawn()
    sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang's dumper would import it where it is installed
    if "--enable-lora" in sys.argv:
        ignore_pinned_memory()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def fork_instead_of_spawn() -> None:
    """SGLang selects its start method after its imports, immediately before it starts its processes."""
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)
        gc.freeze()
        gc.enable()

    multiprocessing.set_start_method = set_start_method


def ignore_pinned_memory() -> None:
    """SGLang's LoRA asks for it on every device, and without a GPU torch refuses."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    for make in (torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full):
        setattr(torch, make.__name__, unpinned(make))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def served_architecture(arguments: list[str]) -> str:
    """Empty: not known, as for a name on the hub."""
    config = Path(arguments[arguments.index("--model-path") + 1]) / "config.json"
    return str(json.loads(config.read_bytes())["architectures"][0]) if config.is_file() else ""


def other_models(architecture: str) -> list[str]:
    """The modules in sglang.srt.models that do not define this class (empty: none), found without importing SGLang."""
    package = importlib.util.find_spec("sglang")
    folders = (package and package.submodule_search_locations) or []
    files = [file for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    return [file.stem for file in files if architecture and f"class {architecture}(" not in file.read_text()]


if __name__ == "__main__":
    main()
