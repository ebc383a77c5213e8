"""Short texts for the consoles: numbers, percentages, durations, and the summary of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_dapo.observe.metric_names import filter_yield, response_length, update_speed


def step_summary(metrics: Mapping[str, float]) -> dict[str, str]:
    """Column title to text. Columns whose metrics are absent are left out."""
    columns = {
        "reward": number(metrics.get("reward/mean")),
        "accuracy": percent(metrics.get("reward/accuracy_all", metrics.get("reward/accuracy"))),
        "entropy": number(metrics.get("train/entropy")),
        "length": number(response_length(metrics), 4),
        "yield": percent(filter_yield(metrics)),
        "grad": number(metrics.get("train/grad_norm")),
        "rollout tok/s": number(metrics.get("rollout/tokens_per_second")),
        "update tok/s": number(update_speed(metrics)),
        "time": duration(metrics.get("time/step")),
    }
    return {title: text for title, text in columns.items() if text}


def number(value: float | None, digits: int = 3) -> str:
    """Examples: 0.412, 12.3, 8.1k, 3e-06."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.{digits}g}{letter}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.{digits}g}".rstrip(".") if size < 10**digits else f"{value:.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}" if math.isfinite(share) else str(float(share))


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 100:
        return f"{minutes:.0f}min"
    return f"{int(hours)}h{int(minutes) % 60:02d}" if hours < 48 else f"{hours / 24:.1f}d"
