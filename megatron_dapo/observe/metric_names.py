"""What a metric's name implies: whether it is a wall-clock time, and which groups a filter dropped.

A new metric needs no entry here or in `figures`: metrics.jsonl, the trackers and the report (under "All other
metrics") take any name.
"""

from __future__ import annotations

from collections.abc import Mapping

DROPPED = "rollout/dropped/"
# Groups that were not trained on for a reason other than the filter.
NOT_FILTERED = ("unfinished", "stale", "surplus")


def is_wall_clock(name: str) -> bool:
    """Whether a metric measures time or is a mean over time, or depends on the machine (memory): it may differ between
    two runs of the same training."""
    return name.startswith(("time/", "memory/", "rollout/kv_use", "rollout/queue")) or name.endswith(
        ("seconds", "per_second", "per_gpu", "mfu", "in_flight", "occupancy")
    )


def dropped_groups(metrics: Mapping[str, float]) -> dict[str, float]:
    """Groups by the reason why they were not trained on."""
    return {name.removeprefix(DROPPED): value for name, value in metrics.items() if name.startswith(DROPPED)}


def filter_yield(metrics: Mapping[str, float]) -> float | None:
    """Kept groups per group that the filter judged; None if it judged none."""
    kept = metrics.get("rollout/groups_kept")
    if kept is None:
        return None
    judged = kept + sum(n for reason, n in dropped_groups(metrics).items() if reason not in NOT_FILTERED)
    return kept / judged if judged > 0 else None


def response_length(metrics: Mapping[str, float]) -> float | None:
    """Mean tokens per trained response."""
    return metrics.get("rollout/length_trained")


def update_speed(metrics: Mapping[str, float]) -> float | None:
    """Tokens that carried loss, per second of the update phase."""
    tokens, seconds = metrics.get("train/tokens"), metrics.get("time/update")
    return tokens / seconds if tokens is not None and seconds else None
