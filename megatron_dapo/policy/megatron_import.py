"""Imports Megatron-Core without what a machine without CUDA does not use; a third of the imports of a rank.

- torch's compiler. Megatron decorates small functions with torch.compile, which imports the compiler at once. On a CPU
  they run uncompiled (`policy.cpu`).
- wandb. Megatron imports it, where it is installed, for a logger of its own; metrics go through `observe.trackers`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE, NOT_IMPORTED = "megatron.core", "wandb"


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
