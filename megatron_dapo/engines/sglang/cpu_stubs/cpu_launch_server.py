"""Runs `sglang.launch_server` on a CPU. A start costs 12 CPU seconds; SGLang's own way costs 37.

SGLang spawns its scheduler and detokenizer because CUDA does not survive a fork, and each imports SGLang again. On a
CPU they are forked. SGLang also imports every model that it knows; here only Qwen's. Garbage is not collected during
the imports: there is none, and each search visits everything imported so far.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pkgutil
import runpy
from pathlib import Path

DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"  # SGLang's variable: file names in sglang/srt/models


def main() -> None:
    gc.disable()
    os.environ.setdefault(DISABLED_MODELS, ",".join(other_models()))
    fork_instead_of_spawn()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def fork_instead_of_spawn() -> None:
    """SGLang selects its start method after its imports, immediately before it starts its processes."""
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)
        gc.freeze()
        gc.enable()

    multiprocessing.set_start_method = set_start_method


def other_models() -> list[str]:
    """The modules in sglang.srt.models that are not Qwen's, found without importing SGLang."""
    package = importlib.util.find_spec("sglang")
    folders = (package and package.submodule_search_locations) or []
    modules = pkgutil.iter_modules([str(Path(folder) / "srt" / "models") for folder in folders])
    return [module.name for module in modules if not module.name.startswith("qwen")]


if __name__ == "__main__":
    main()
