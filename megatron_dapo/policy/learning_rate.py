"""The learning rate as a function of how many updates have been made: nothing to save, nothing to drift."""

from __future__ import annotations

import math
from typing import Any

from megatron_dapo.config.policy import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates_per_step: int, total_steps: int) -> float:
    """The rate of update number `update` (from 0). Warm-up rises linearly, and its first update is not zero."""
    warmup = config.warmup_steps * updates_per_step
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    decay = max(1, (config.decay_steps or total_steps) * updates_per_step - warmup)
    progress = min(1.0, (update - warmup) / decay)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


def set_learning_rate(optimizer: Any, rate: float, weight_decay: float) -> None:
    """Megatron leaves both to its scheduler: rate, and weight decay where the group has any (not norms, not biases)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
