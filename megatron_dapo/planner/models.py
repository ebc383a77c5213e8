"""The shape of the model that a configuration names, also of published models that are not here."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.config.load import local_model
from megatron_dapo.errors import UserError


def known_shape(name: str) -> ModelShape | None:
    """By the last part of a path or of a name on the hub, e.g. Qwen2.5-32B, Qwen/Qwen2.5-32B, models/Qwen2.5-32B.

    `models.json` has what decides the shape of the published Qwens, so that `plan` and `simulate` need no download. The
    models of a size with -Base, -Instruct or -Chat have the same shape."""
    last = Path(name.partition("@")[0]).name
    for candidate in (last, re.sub(r"-(Base|Instruct|Chat)$", "", last)):
        if candidate in _configs():
            return ModelShape.from_hf(_configs()[candidate], candidate)
    return None


@cache
def _configs() -> dict[str, dict[str, object]]:
    return json.loads((files("megatron_dapo.planner") / "models.json").read_text(encoding="utf-8"))


def model_shape(name: str, key: str = "policy.model") -> ModelShape:
    if not name:
        raise UserError("no model is named: set policy.model, for example --set policy.model=Qwen2.5-32B")
    try:
        directory = local_model(name, weights=False)
        found = Path(directory).is_dir()
    except ConfigError:  # not in the cache, and the hub cannot be reached or does not have it
        found = False
        if known_shape(name) is None:
            raise
    if found:
        return ModelShape.from_dir(directory)
    if (shape := known_shape(name)) is None:
        raise UserError(
            f"{key}: {name} is not a directory; expected one with the model's config.json "
            "(the weights are not read), a name on the hub, or a published Qwen, for example --model Qwen2.5-32B"
        )
    print(f"{name} is not here: the published config.json of that model is used", file=sys.stderr)
    return shape
