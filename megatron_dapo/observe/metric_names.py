"""What a metric's name implies: whether it is a wall-clock time, and which groups a filter dropped.

A new metric needs no entry here or in `figures`: metrics.jsonl, the trackers and the report (under "All other
metrics") take any name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


# Metrics under the names that verl and prime-rl give them, for dashboards that exist already (`observe.aliases`).


# Our name to theirs and the factor from our unit to theirs.
Table = dict[str, tuple[str, float]]

VERL: Table = {
    ours: (theirs, 1.0)
    for ours, theirs in {
        "reward/mean": "critic/rewards/mean",
        "reward/score": "critic/score/mean",
        "train/loss": "actor/pg_loss",
        "train/entropy": "actor/entropy",
        "train/grad_norm": "actor/grad_norm",
        "train/lr": "actor/lr",
        "train/clip_fraction_high": "actor/pg_clipfrac",
        "train/clip_fraction_dual": "actor/pg_clipfrac_lower",
        "train/approx_kl": "actor/ppo_kl",
        "train/mfu": "perf/mfu/actor",
        "train/batch_tokens": "perf/total_num_tokens",
        "time/tokens_per_second_per_gpu": "perf/throughput",
        "memory/gpu_peak_gib": "perf/max_memory_allocated_gb",
        "memory/gpu_reserved_gib": "perf/max_memory_reserved_gb",
        "memory/host_gib": "perf/cpu_memory_used_gb",
        "rollout/length_trained": "response_length/mean",
        "rollout/length_max": "response_length/max",
        "rollout/truncated_share": "response_length/clip_ratio",
        "time/rollout": "timing_s/gen",
        "time/log_probs": "timing_s/old_log_prob",
        "time/advantages": "timing_s/adv",
        "time/update": "timing_s/update_actor",
        "time/sync": "timing_s/update_weights",
        "time/checkpoint": "timing_s/save_checkpoint",
        "time/evaluate": "timing_s/testing",
        "time/step": "timing_s/step",
    }.items()
}
PRIME_RL: Table = {
    "reward/mean": ("reward/mean", 1.0),
    "rollout/length_trained": ("seq_len/mean", 1.0),
    "rollout/truncated_share": ("is_truncated/mean", 1.0),
    "rollout/dropped/all-wrong": ("solve_none", 1.0),
    "rollout/dropped/all-correct": ("solve_all", 1.0),
    "train/loss": ("loss/mean", 1.0),
    "train/entropy": ("entropy/mean", 1.0),
    "train/mismatch_kl": ("mismatch_kl/mean", 1.0),
    "train/grad_norm": ("optim/grad_norm", 1.0),
    "train/lr": ("optim/lr", 1.0),
    "train/mfu": ("perf/mfu", 100.0),
    "train/tokens_per_second_per_gpu": ("perf/throughput_per_gpu", 1.0),
    "memory/gpu_peak_gib": ("perf/peak_memory", 1.0),
    "time/step": ("time/step", 1.0),
    "time/update": ("time/forward_backward", 1.0),
    "time/rollout": ("time/generate_completions", 1.0),
    "time/checkpoint": ("time/save_ckpt", 1.0),
}
TABLES = {"verl": VERL, "prime-rl": PRIME_RL}


def with_aliases(metrics: Mapping[str, float], tools: Iterable[str]) -> dict[str, float]:
    """The metrics, and those that a tool has under another name. Ours win where the names are the same."""
    found: dict[str, float] = {}
    for tool in tools:
        for name, (theirs, factor) in TABLES[tool].items():
            if name in metrics:
                found[theirs] = metrics[name] * factor
    return found | dict(metrics)
