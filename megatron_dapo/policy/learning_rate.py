"""The learning rate as a function of the number of updates made. It has no state, so there is nothing to save."""

from __future__ import annotations

import math
from typing import Any

from megatron_dapo.config.policy import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates_per_step: int, total_steps: int) -> float:
    """The rate of update number `update`, counted from 0. Warm-up is linear; its first update has a rate above zero."""
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
    """Sets what Megatron leaves to its own scheduler: the rate, and the weight decay (none for norms and biases)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
