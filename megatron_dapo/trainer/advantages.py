"""From graded groups to a training batch: rewards, length penalty, advantages, masks. Pure functions.

The order is that of the DAPO recipe. Groups have been filtered on accuracy. The length penalty is added to the score.
Advantages are normalised over the graded samples of each group. Ungraded samples, and truncated ones under overlong
filtering, are masked here, before any token is counted.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from megatron_dapo.algorithm import carries_loss, group_advantages, length_penalty
from megatron_dapo.config import Config
from megatron_dapo.policy.batch import Floats, TrainBatch
from megatron_dapo.types import StepBatch


def shape_batch(batch: StepBatch, config: Config) -> tuple[TrainBatch, dict[str, float]]:
    """The whole step's samples, in order, and the metrics that describe them."""
    samples = batch.samples
    lengths = np.array([s.length for s in samples])
    graded = np.array([s.grade is not None and not s.grade.ungraded for s in samples])
    scores = np.array([s.grade.score if s.grade is not None else 0.0 for s in samples], dtype=np.float64)
    penalties = _penalties(lengths, config)
    groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
    advantages = group_advantages(
        torch.from_numpy(scores + penalties),
        torch.from_numpy(groups),
        normalize_std=config.algorithm.advantage == "group-std",
        eps=config.algorithm.advantage_eps,
        valid=torch.from_numpy(graded),
    ).numpy()
    active = np.array([carries_loss(s, config.algorithm.overlong) for s in samples])
    metrics = {
        "reward/mean": _mean((scores + penalties)[graded]),
        "reward/score": _mean(scores[graded]),
        "reward/accuracy": _mean([c for g in batch.groups for c in g.accuracies]),
        "reward/penalty": _mean(penalties),
        "reward/ungraded_share": _mean(~graded),
        "reward/advantage_abs": _mean(np.abs(advantages)),
        "rollout/masked_share": _mean(~active),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(lengths.max(initial=0)),
    } | _scores_by_grader(batch)
    return TrainBatch.from_samples(samples, advantages, active), metrics


def _scores_by_grader(batch: StepBatch) -> dict[str, float]:
    """Of several graders: the mean score of each, and the share of responses that it could not grade."""
    grades = [s.grade for s in batch.samples if s.grade is not None and s.grade.parts]
    metrics = {}
    for name in sorted({name for grade in grades for name in grade.parts}):
        scores = [grade.parts.get(name) for grade in grades]
        known = [score for score in scores if score is not None]
        metrics[f"reward/grader/{name}"] = _mean(np.array(known))
        metrics[f"reward/grader/{name}/ungraded_share"] = 1 - len(known) / len(scores)
    return metrics


def mini_batches(batch: StepBatch, config: Config) -> list[list[int]]:
    """Sample indices of each update: whole groups, `mini_batch_prompts` at a time."""
    size = config.trainer.mini_batch_prompts
    starts = np.concatenate([[0], np.cumsum([len(g.samples) for g in batch.groups])]).astype(int)
    edges = [*range(0, len(batch.groups), size), len(batch.groups)]
    return [list(range(starts[a], starts[b])) for a, b in pairwise(edges)]


def _penalties(lengths: np.ndarray, config: Config) -> np.ndarray:
    penalty = length_penalty(torch.from_numpy(lengths), config.algorithm.overlong, config.overlong_max_length)
    return penalty.double().numpy()


def _mean(values: Floats | np.ndarray | list[bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
