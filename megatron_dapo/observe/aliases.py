"""Metrics under the names that verl and prime-rl give them, for dashboards that exist already (`observe.aliases`).

Trackers get the aliases in addition to our names; metrics.jsonl and the report have our names only. An alias has the
same value, or a multiple of it (percent, GiB). docs/monitoring.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
