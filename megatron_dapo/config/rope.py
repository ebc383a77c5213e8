"""Rotary position embeddings as config.json describes them: the default one, and YaRN for contexts that are longer than
those of pre-training. Imports no torch.

YaRN (arXiv 2309.00071) divides the frequencies of slow channels by `factor`, keeps those of fast channels, and goes
linearly from one to the other between two channels. It also scales queries and keys. The numbers are transformers'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config.base import ConfigError


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float
    original_positions: int  # the context of pre-training
    attention_factor: float  # scales rotated queries and rotated keys
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def ramp(self, dim: int, base: float) -> tuple[float, float]:
        """Channel pairs below the first number keep their frequency; from the second on it is divided by `factor`."""

        def channel(rotations: float) -> float:
            return dim * math.log(self.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high if high != low else high + 0.001


def rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: 'rope_parameters' and 'rope_scaling' must be objects (found {rope!r})")
    return rope


def rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def read_yarn(rope: dict[str, Any], max_positions: int, where: str) -> Yarn:
    """The YaRN settings in `rope`. Without `original_max_position_embeddings` it is the model's length."""

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key) if rope.get(key) is not None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{where}: {key!r} of YaRN must be a positive number (found {value!r})")
        return float(value)

    original = int(number("original_max_position_embeddings", max_positions))
    factor = number("factor", max_positions / original if rope.get("original_max_position_embeddings") else None)
    attention = rope.get("attention_factor")
    if attention is not None:
        attention = number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = _scale(factor, number("mscale")) / _scale(factor, number("mscale_all_dim"))
    else:
        attention = _scale(factor)
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    return Yarn(factor, original, attention, fast, slow, rope.get("truncate", True) is not False)


def _scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
