"""The names of metrics, and what follows from them: which are wall-clock times, which groups a filter dropped."""

from __future__ import annotations

from collections.abc import Mapping

DROPPED = "rollout/dropped/"
# Groups that left the step for another reason than what the filter thought of them.
NOT_FILTERED = ("unfinished", "stale", "surplus")


def is_wall_clock(name: str) -> bool:
    """Whether a metric measures the machine, so that two runs of the same training may differ in it."""
    return name.startswith("time/") or name.endswith(("seconds", "per_second"))


def dropped_groups(metrics: Mapping[str, float]) -> dict[str, float]:
    """Groups by the reason for which they were not trained on."""
    return {name.removeprefix(DROPPED): value for name, value in metrics.items() if name.startswith(DROPPED)}


def filter_yield(metrics: Mapping[str, float]) -> float | None:
    """Kept groups per group that the filter judged; None where there were none."""
    kept = metrics.get("rollout/groups_kept")
    if kept is None:
        return None
    judged = kept + sum(n for reason, n in dropped_groups(metrics).items() if reason not in NOT_FILTERED)
    return kept / judged if judged > 0 else None


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase; they add up to time/step."""
    found = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    found.pop("step", None)
    return found


def response_length(metrics: Mapping[str, float]) -> float | None:
    """Mean tokens per trained answer."""
    return metrics.get("rollout/length_trained")


def update_speed(metrics: Mapping[str, float]) -> float | None:
    """Tokens that carried loss, per second of the update phase."""
    tokens, seconds = metrics.get("train/tokens"), metrics.get("time/update")
    return tokens / seconds if tokens is not None and seconds else None
