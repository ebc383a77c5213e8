"""The metric that decides which checkpoint is the best one."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dapo.config.trainer import CheckpointConfig


def best_metric(metrics: Mapping[str, float], config: CheckpointConfig, default: float | None) -> float | None:
    """`best_metric` as configured; else the evaluation's avg@k; else the accuracy of the step's samples. `default` if
    these metrics do not have it."""
    averages = [name for name in metrics if "avg@" in name]
    name = config.best_metric or next(iter(averages), "reward/accuracy")
    return float(metrics[name]) if name in metrics else default
