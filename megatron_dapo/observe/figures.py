"""The figures of a report: which metrics each shows, how numbers are formatted, and a note for the reader.

`figures_of` turns runs into figures of plain numbers, which the page and examples/curves.py draw. Figures without data
are left out. NaN and infinity become None: a gap in the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

import numpy as np

from megatron_dapo.observe.runs import Run

Format = Literal["number", "percent", "count", "seconds", "rate"]
MOST_POINTS = 2000


@dataclass(slots=True)
class Series:
    label: str
    x: list[int]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(slots=True, frozen=True)
class Figure:
    """`metrics` are names, or patterns if they end with `*`."""

    id: str
    title: str
    note: str
    metrics: dict[str, str]  # metric to its label in this figure; the label of a pattern is what `*` matched
    format: Format = "number"
    stacked: bool = False
    log: bool = False
    zero: bool = False  # the axis starts at 0
    smooth: bool = True  # may be smoothed
    runs: list[list[Series]] = field(default_factory=list)  # one list per run; empty if the run has no data


SECTIONS: dict[str, tuple[Figure, ...]] = {
    "Learning": (
        Figure("reward", "Reward", "mean over trained responses, penalties included", {"reward/mean": "reward"}),
        Figure("accuracy", "Accuracy",
                   "share of right responses; the filter drops groups that are all right or all wrong", {
            "reward/accuracy_all": "all sampled", "reward/accuracy": "trained",
        }, "percent"),
        Figure("evaluation", "Evaluation", "held-out scores; the band is the confidence interval", {"eval/*": ""},
                   "percent"),
        Figure("length", "Response length", "mean tokens per response", {
            "rollout/length_trained": "trained", "rollout/length_dropped": "dropped",
            "rollout/length_interrupted": "interrupted",
        }, "count", zero=True),
    ),
    "Policy": (
        Figure("entropy", "Entropy", "mean per token, in nats", {"train/entropy": "entropy"}, zero=True),
        Figure("clip", "Clip fractions", "tokens whose ratio was replaced by a bound", {
            "train/clip_fraction_high": "high", "train/clip_fraction_low": "low", "train/clip_fraction_dual": "dual",
        }, "percent", zero=True),
        Figure("approx_kl", "Policy shift", "KL(old‖new) within a step, k3 estimate",
                   {"train/approx_kl": "approx_kl"}, zero=True),
        Figure("grad_norm", "Gradient norm", "before clipping", {"train/grad_norm": "grad_norm"}, log=True),
        Figure("loss", "Loss", "policy objective; its absolute value says little", {"train/loss": "loss"}),
        Figure("lr", "Learning rate", "", {"train/lr": "lr"}, zero=True, smooth=False),
    ),
    "Critic": (
        Figure("explained_variance", "Explained variance", "1 − Var(return − value) / Var(return)", {
            "critic/explained_variance": "all tokens", "critic/explained_variance/position_0": "first tenth",
            "critic/explained_variance/position_9": "last tenth",
        }),
        Figure("value_bias", "Bias of the values", "mean of value − return", {
            "critic/bias": "all tokens", "critic/bias/right": "right", "critic/bias/wrong": "wrong",
            "critic/bias/position_0": "first tenth", "critic/bias/position_9": "last tenth",
        }),
        Figure("value_loss", "Value loss", "half the squared error, clipped", {"critic/loss": "loss"}, zero=True),
        Figure("value_clip", "Clipped values", "tokens whose loss the clip replaced",
                   {"critic/clip_fraction": "clipped"}, "percent", zero=True),
        Figure("critic_grad_norm", "Gradient norm of the critic", "before clipping",
                   {"critic/grad_norm": "grad_norm"}, log=True),
        Figure("lambda", "λ of the policy", "over responses", {
            "critic/lambda_mean": "mean", "critic/lambda_min": "shortest response",
        }, zero=True),
    ),
    "Engine and trainer": (
        Figure("mismatch_kl", "Mismatch KL", "KL(engine‖trainer), k3 estimate",
                   {"train/mismatch_kl": "mismatch_kl"}, log=True),
        Figure("mismatch", "Log-prob difference", "|trainer − engine| per token, and weights above the cap", {
            "train/mismatch_mean": "mean difference", "train/mismatch_over_cap": "share over cap",
        }, zero=True),
        Figure("off_policy_masks", "Off-policy masks", "tokens removed by a mask of algorithm.off_policy", {
            "train/token_mask_share": "token mask", "train/sequence_mask_share": "sequence mask",
            "train/opsm_share": "OPSM",
        }, "percent", zero=True),
    ),
    "Sampling": (
        Figure("groups", "Groups by outcome", "kept for training, or dropped for a reason", {
            "rollout/groups_kept": "kept", "rollout/groups_failed": "failed", "rollout/dropped/*": "",
        }, "count", stacked=True, zero=True),
        Figure("yield", "Filter yield", "kept groups per group judged by the filter", {
            "rollout/filter_yield": "yield", "rollout/expected_yield": "expected by the sampler",
        }, "percent", zero=True),
        Figure("occupancy", "Engine occupancy", "running requests per request that the engines can run",
                   {"rollout/engine_occupancy": "occupancy"}, "percent", zero=True),
        Figure("staleness", "Staleness", "weight versions between sampling and training", {
            "rollout/staleness_tokens": "mean of tokens", "rollout/staleness_max": "oldest token",
        }, zero=True),
        Figure("engine_load", "Engine load", "KV cache in use, mean and highest over the rollout", {
            "rollout/kv_use": "mean", "rollout/kv_use_max": "highest",
        }, "percent", zero=True),
        Figure("engine_queue", "Engine queue", "requests that wait in the engines, mean and highest", {
            "rollout/queue": "mean", "rollout/queue_max": "highest",
        }, "count", zero=True),
        Figure("truncated", "Truncated responses", "by the length limit, or interrupted by the end of the step", {
            "rollout/truncated_share": "truncated", "rollout/interrupted_share": "interrupted",
        }, "percent", zero=True),
    ),
    "Time": (
        Figure("phases", "Time per phase", "seconds of each step", {"time/*": ""}, "seconds",
                   stacked=True, zero=True),
        Figure("speed", "Throughput", "tokens per second", {
            "rollout/tokens_per_second": "rollout", "train/tokens_per_second": "update",
        }, "rate", zero=True),
        Figure("speed_per_gpu", "Throughput per GPU", "prompt and response tokens of trained samples per second", {
            "train/tokens_per_second_per_gpu": "update", "time/tokens_per_second_per_gpu": "whole step",
        }, "rate", zero=True),
        Figure("mfu", "MFU", "model FLOPs of the updates per FLOP that the GPUs could do (dense bf16, data sheet)",
                   {"train/mfu": "mfu"}, "percent", zero=True),
        Figure("memory", "Memory", "of rank 0, in GiB: GPU memory of the trainer, memory of its process", {
            "memory/gpu_peak_gib": "GPU, highest", "memory/gpu_reserved_gib": "GPU, reserved",
            "memory/host_gib": "host",
        }, zero=True),
    ),
}  # fmt: skip

SCORE = re.compile(r"eval/.*(?:avg|pass|maj)@\d+$")
# The sum; the start-up, which is longer than all others; and no time at all.
NOT_PHASES = ("time/step", "time/start", "time/tokens_per_second_per_gpu")
PHASE_ORDER = ("rollout", "hand_over", "advantages", "log_probs", "critic", "update", "sync", "checkpoint", "evaluate")


def figures_of(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Section title to its figures; the last section, "All other metrics", has one figure for each."""
    sections: dict[str, list[Figure]] = {}
    shown: set[str] = set()
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for title, specs in SECTIONS.items():
        figures = []
        for spec in specs:
            names = _expand(spec, known)
            shown.update(names)
            figures.append(_figure(spec, names, runs))
        sections[title] = [figure for figure in figures if any(figure.runs)]
    shown |= {f"{name}{end}" for name in shown for end in ("_low", "_high")} | {"time/step"}
    others = [_figure(_single(name), {name: name}, runs) for name in known if name not in shown]
    sections["All other metrics"] = [figure for figure in others if any(figure.runs)]
    return {title: figures for title, figures in sections.items() if figures}


def _single(name: str) -> Figure:
    kind: Format = "percent" if name.endswith(("share", "_rate")) else "number"
    return Figure(re.sub(r"\W+", "-", name), name, "", {name: name}, kind)


def _expand(spec: Figure, known: Sequence[str]) -> dict[str, str]:
    """Metric to label, in the order of the spec; the matches of a pattern are sorted."""
    names: dict[str, str] = {}
    for metric, label in spec.metrics.items():
        if not metric.endswith("*"):
            if metric in known:
                names[metric] = label
            continue
        prefix = metric[:-1]
        found = {
            name: name.removeprefix(prefix) for name in known if name.startswith(prefix) and name not in NOT_PHASES
        }
        if prefix == "eval/":
            found = {
                name: label for name, label in found.items() if SCORE.fullmatch(name) and not _repeats_avg(name, known)
            }
        names |= dict(sorted(found.items(), key=lambda item: _rank(item[1])))
    return names


def _repeats_avg(name: str, known: Iterable[str]) -> bool:
    """pass@1 equals avg@k; drawing both would hide one."""
    prefix = name.removesuffix("pass@1")
    return prefix != name and any(other.startswith(f"{prefix}avg@") for other in known)


def _rank(label: str) -> tuple[int, str]:
    """Phases in the order in which they run, `other` last, anything else by name."""
    if label in PHASE_ORDER:
        return PHASE_ORDER.index(label), ""
    return (len(PHASE_ORDER) + 1, "") if label == "other" else (len(PHASE_ORDER), label)


def _figure(spec: Figure, names: dict[str, str], runs: Sequence[Run]) -> Figure:
    build = _stack if spec.stacked else _lines
    return replace(spec, metrics=names, runs=[build(run, names) for run in runs])


def _lines(run: Run, names: dict[str, str]) -> list[Series]:
    found = []
    for name, label in names.items():
        x, y = run.series(name)
        if not any(math.isfinite(value) for value in y):
            continue
        if name.startswith("eval/"):
            found.append(Series(label, x, _clean(y), _aligned(run, f"{name}_low", x), _aligned(run, f"{name}_high", x)))
        else:
            kept = thin(y)
            found.append(Series(label, [x[i] for i in kept], _clean(y[i] for i in kept)))
    return found


def _aligned(run: Run, name: str, x: Sequence[int]) -> list[float | None] | None:
    values = dict(zip(*run.series(name), strict=True))
    return _clean(values.get(step, math.nan) for step in x) if values else None


def _stack(run: Run, names: dict[str, str]) -> list[Series]:
    """One value per step in every series; 0 if the metric was not recorded."""
    x = [record.step for record in run.steps]
    stacks = {label: [record.metrics.get(name, 0.0) for record in run.steps] for name, label in names.items()}
    width = max(1, math.ceil(len(x) / MOST_POINTS))
    found = []
    for label, values in stacks.items():
        finite = [value if math.isfinite(value) else 0.0 for value in values]
        means = [fmean(finite[i : i + width]) for i in range(0, len(x), width)]
        if any(means):
            found.append(Series(label, x[::width], _clean(means)))
    return found


def thin(values: Sequence[float]) -> list[int]:
    """Indices to draw: all, or the lowest and highest of each interval, so that no spike is lost."""
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    width = math.ceil(2 * len(values) / MOST_POINTS)
    numbers = np.full(-(-len(values) // width) * width, np.nan)
    numbers[: len(values)] = values
    intervals = numbers.reshape(-1, width)
    finite, starts = np.isfinite(intervals), np.arange(len(intervals)) * width
    kept = {0, len(values) - 1}
    for ends in (np.where(finite, -intervals, -np.inf), np.where(finite, intervals, -np.inf)):
        kept.update((starts + ends.argmax(axis=1))[finite.any(axis=1)].tolist())
    return sorted(kept)


def _clean(values: Iterable[float]) -> list[float | None]:
    """Six digits: more than a screen shows, and a small file."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
