"""The config.json of published Qwens (`models.json`: what decides the shape), so that `plan` and `simulate` need no
download. The models of a size with -Base, -Instruct or -Chat have the same shape."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from megatron_dapo.config import ModelShape


def known_shape(name: str) -> ModelShape | None:
    """By the last part of a path or of a name on the hub, e.g. Qwen2.5-32B, Qwen/Qwen2.5-32B, models/Qwen2.5-32B."""
    last = Path(name.partition("@")[0]).name
    for candidate in (last, re.sub(r"-(Base|Instruct|Chat)$", "", last)):
        if candidate in _configs():
            return ModelShape.from_hf(_configs()[candidate], candidate)
    return None


@cache
def _configs() -> dict[str, dict[str, object]]:
    return json.loads((files("megatron_dapo.planner") / "models.json").read_text(encoding="utf-8"))
