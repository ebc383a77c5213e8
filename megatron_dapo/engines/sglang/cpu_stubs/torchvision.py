"""CPU stub for torchvision, whose published build is linked against CUDA and cannot be imported with a CPU torch.

Language models do not use it; SGLang and transformers import it for images.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []

SUBMODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _lacking(name: str) -> Any:
    """A class, because some of these names are used as base classes."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torchvision's {name} is not available: this server runs with a CPU stub")

    return type(name, (), {"__init__": refuse})


for _name in SUBMODULES:
    _module = ModuleType(f"{__name__}.{_name}")
    _module.__path__ = []
    _module.__getattr__ = _lacking  # type: ignore[method-assign]
    _module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules[f"{__name__}.{_name}"] = _module
    _parent, _, _leaf = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
