"""From graded groups to a training batch: rewards, length penalty, advantages, masks. Pure functions.

The order is that of the DAPO recipe. Groups have been filtered on accuracy. The length penalty is added to the score.
The estimator that `algorithm.advantage` names sees the graded rollouts, or those of them that are in the loss
(`overlong.group_statistics`); every sample of a rollout gets the rollout's advantage. Turn credit and on-policy
distillation add advantages of single tokens. Ungraded samples, truncated ones under overlong filtering, and tokens that
the policy has not generated are masked here, before any token is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dapo.algorithm.advantage_input import AdvantageInput
from megatron_dapo.algorithm.advantages import estimate, reads_values
from megatron_dapo.algorithm.gae import generalized_advantages, value_metrics
from megatron_dapo.algorithm.overlong import carries_loss, length_penalty
from megatron_dapo.config import Config
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.policy.batch import Floats, TrainBatch, trained_tokens
from megatron_dapo.types import Sample, StepBatch

Rollout = Sequence[Sample]
SMALLEST_ADVANTAGE = 1e-6  # below: the rewards of a group are equal, up to rounding
SMALLEST_SPREAD = 1e-9  # relative: the same turn rewards, added in another order, differ by less


def add_distillation(batch: TrainBatch, samples: Sequence[Sample], config: AlgorithmConfig) -> dict[str, float]:
    """The teacher's log-probs become an advantage of each token: sets `batch.token_advantages`, and with `alone` also
    advantages and mask. Returns metrics."""
    settings, generated = config.distillation, trained_tokens(samples)
    scored = np.array([s.teacher_logprobs is not None for s in samples], dtype=np.bool_)
    known = np.repeat(scored, batch.response_lengths) & generated  # [responses]
    none = np.zeros(0, np.float32)
    teacher = np.concatenate([none, *(_filled(s) for s in samples)])
    assert batch.engine_logprobs is not None
    gap = np.where(known, teacher - batch.engine_logprobs, 0.0)
    before = 0.0 if batch.token_advantages is None or settings.alone else batch.token_advantages
    own = settings.weight * gap.clip(-settings.max_gap, settings.max_gap)
    batch.token_advantages = (before + own).astype(np.float32)
    if settings.alone:
        batch.advantages = np.zeros_like(batch.advantages)
        kept = np.array([not (config.overlong.filter and s.truncated) for s in samples], dtype=np.bool_)
        batch.loss_mask = known & np.repeat(kept, batch.response_lengths)
    return {
        "distillation/reverse_kl": float(-gap[known].mean()) if known.any() else 0.0,
        "distillation/unscored_share": float(1 - scored.mean()) if len(samples) else 0.0,
    }


def _filled(sample: Sample) -> np.ndarray:
    return np.zeros(sample.length, np.float32) if sample.teacher_logprobs is None else sample.teacher_logprobs


def turn_advantages(
    groups: Sequence[Sequence[Rollout]], totals: Sequence[np.ndarray], *, normalize_std: bool, eps: float
) -> Floats:
    """[responses]: what is added to the advantage of every token, so that a turn is not credited with rewards that were
    earned before it. `totals[g]`: scores of the rollouts of group g."""
    found = [
        _of_group(rollouts, _divisor(rollouts, scores, normalize_std, eps))
        for rollouts, scores in zip(groups, totals, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.float32), *found]).astype(np.float32)


def _of_group(rollouts: Sequence[Rollout], divisor: float) -> np.ndarray:
    earned = [_earned_before(rollout) for rollout in rollouts]
    graded = [before for before, rollout in zip(earned, rollouts, strict=True) if _graded(rollout)]
    parts = []
    for rollout, before in zip(rollouts, earned, strict=True):
        turn = 0
        for sample in rollout:
            values = np.zeros(sample.length)
            for span in sample.turns:
                if span.generated:
                    mean = np.mean([other[min(turn, len(other) - 1)] for other in graded]) if graded else 0.0
                    values[span.start : span.end] = -(before[turn] - mean) / divisor if _graded(rollout) else 0.0
                    turn += 1
            parts.append(values)
    return np.concatenate([np.zeros(0), *parts])


def _earned_before(rollout: Rollout) -> list[float]:
    """Rewards before each generated turn, and at the end those of all turns."""
    rewards = [span.reward or 0.0 for sample in rollout for span in sample.turns if span.generated]
    return [0.0, *np.cumsum(rewards).tolist()]


def _divisor(rollouts: Sequence[Rollout], scores: np.ndarray, normalize_std: bool, eps: float) -> float:
    """Infinite, so that turns get 0, where all scores are equal: the group has no scale to compare them on. Their std
    would not show it: that of 0.1 ten times is 1e-17."""
    values = scores[np.array([_graded(rollout) for rollout in rollouts], dtype=np.bool_)]
    if not normalize_std:
        return 1.0
    if len(values) < 2 or np.ptp(values) <= SMALLEST_SPREAD * np.abs(values).max():
        return np.inf
    return float(np.std(values, ddof=1)) + eps


def _graded(rollout: Rollout) -> bool:
    grade = rollout[0].grade
    return grade is not None and not grade.ungraded


def advantage_input(batch: StepBatch, config: Config, values: Floats | None = None) -> AdvantageInput:
    """What the estimator reads. `values` [responses]: the critic's."""
    samples, rollouts = batch.samples, _rollouts(batch)
    active, in_loss = _in_loss(batch, config)
    lengths = np.array([s.length for s in samples], dtype=np.int64)
    generated = trained_tokens(samples)
    parts = np.cumsum([0, *(len(rollout) for rollout in rollouts)])
    return AdvantageInput(
        rewards=_scores(rollouts) + _penalties(rollouts, config),
        groups=np.repeat(np.arange(len(batch.groups)), [len(g.rollouts) for g in batch.groups]),
        valid=in_loss if config.algorithm.overlong.group_statistics == "in_loss" else _all_graded(rollouts),
        truncated=np.array([rollout[-1].truncated for rollout in rollouts], dtype=np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)])[parts],
        generated=generated,
        in_loss=np.repeat(active, lengths) & generated,
        turn_rewards=_turn_rewards(samples),
        values=None if values is None else values.astype(np.float64),
    )


def _turn_rewards(samples: Sequence[Sample]) -> np.ndarray | None:
    """[responses]: the reward of each turn at its last generated token; None if there is none."""
    if not any(turn.reward for sample in samples for turn in sample.turns):
        return None
    parts = [np.zeros(sample.length) for sample in samples]
    for sample, rewards in zip(samples, parts, strict=True):
        for turn in sample.turns:
            before = np.flatnonzero(sample.trained_mask[: turn.end])
            if turn.reward and before.size:
                rewards[before[-1]] += turn.reward
    return np.concatenate(parts)


def add_values(batch: TrainBatch, source: StepBatch, values: Floats, config: Config) -> tuple[Floats, dict[str, float]]:
    """When the critic has scored the batch: adds the advantages that depend on its values [responses] to
    `batch.token_advantages`. Returns the critic's targets [responses], 0 at tokens that are not generated, and metrics.
    """
    known = advantage_input(source, config, values)
    found = generalized_advantages(known, config.algorithm)
    metrics = value_metrics(known, found, _right([rollout[0] for rollout in _rollouts(source)]))
    if reads_values(config.algorithm):
        gae = config.algorithm.advantage == "gae"
        estimated = found.advantages.astype(np.float32) if gae else estimate(known, config.algorithm)
        of_tokens = estimated if len(estimated) > len(known.rewards) else estimated[known.rollout_of]
        before = 0.0 if batch.token_advantages is None else batch.token_advantages
        batch.token_advantages = (before + of_tokens).astype(np.float32)
        metrics |= _signal_metrics(source, of_tokens, known, config)
    return found.returns.astype(np.float32), metrics


def shape_batch(batch: StepBatch, config: Config) -> tuple[TrainBatch, dict[str, float]]:
    """The whole step's samples, in order, and the metrics that describe them. An estimator that reads a critic's values
    is left to `add_values`; until then advantages are 0."""
    samples, rollouts = batch.samples, _rollouts(batch)
    known = advantage_input(batch, config)
    graded, scores, penalties = _all_graded(rollouts), _scores(rollouts), _penalties(rollouts, config)
    active, in_loss = _in_loss(batch, config)
    none = np.zeros(len(rollouts), np.float32)
    found = none if reads_values(config.algorithm) else estimate(known, config.algorithm)
    of_rollouts = found if len(found) == len(rollouts) else none
    advantages = np.repeat(of_rollouts, [len(rollout) for rollout in rollouts])  # [samples]
    lengths = np.array([sum(sample.trained_tokens for sample in rollout) for rollout in rollouts])
    metrics = {
        "reward/mean": _mean((scores + penalties)[graded]),
        "reward/score": _mean(scores[graded]),
        "reward/score_in_loss": _mean(scores[in_loss]),
        "reward/accuracy": _mean([c for g in batch.groups for c in g.accuracies]),
        "reward/penalty": _mean(penalties),
        "reward/ungraded_share": _mean(~graded),
        "rollout/masked_share": _mean(~active),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(lengths.max(initial=0)),
    }
    metrics |= _signal_metrics(batch, found, known, config)
    metrics |= _turn_metrics(rollouts) | _scores_by_grader(batch)
    shaped = TrainBatch.from_samples(samples, advantages, active)
    if len(samples) > len(rollouts):
        shaped.rollouts = np.repeat(np.arange(len(rollouts)), [len(rollout) for rollout in rollouts])
    if config.algorithm.positive_coefficient > 0:
        shaped.right = _right(samples)
    if found is not of_rollouts:
        shaped.token_advantages = found
    if config.algorithm.turn_credit == "turn":
        shaped.token_advantages = turn_advantages(
            [group.rollouts for group in batch.groups],
            np.split(scores + penalties, np.cumsum([len(group.rollouts) for group in batch.groups])[:-1]),
            normalize_std=config.algorithm.advantage == "group-std",
            eps=config.algorithm.advantage_eps,
        )
    if config.algorithm.distillation.enabled:
        metrics |= add_distillation(shaped, samples, config.algorithm)
        metrics["rollout/masked_share"] = _mean(~np.array([m.any() for m in _by_sample(shaped)]))
    return shaped, metrics


def _rollouts(batch: StepBatch) -> list[list[Sample]]:
    return [rollout for group in batch.groups for rollout in group.rollouts]


def _all_graded(rollouts: Sequence[Rollout]) -> NDArray[np.bool_]:
    return np.array([_graded(rollout) for rollout in rollouts], dtype=np.bool_)


def _right(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    return np.array([s.grade is not None and s.grade.correct is True for s in samples], dtype=np.bool_)


def _scores(rollouts: Sequence[Rollout]) -> np.ndarray:
    grades = [rollout[0].grade for rollout in rollouts]
    return np.array([0.0 if grade is None else grade.score for grade in grades], dtype=np.float64)


def _in_loss(batch: StepBatch, config: Config) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[samples] and [rollouts]: which carry loss."""
    active = np.array([carries_loss(s, config.algorithm.overlong) for s in batch.samples], dtype=np.bool_)
    starts = np.cumsum([0, *(len(rollout) for rollout in _rollouts(batch))])[:-1]
    return active, np.logical_or.reduceat(active, starts) if len(active) else active


def _by_sample(batch: TrainBatch) -> list[np.ndarray]:
    """The loss mask of each sample."""
    return np.split(batch.loss_mask, batch.response_offsets[1:-1])


def _total_length(rollout: Rollout) -> int:
    """Tokens after the prompt, appended ones included: what `rollout.max_response_tokens` limits. A later sample of a
    rollout has a part of them in its prompt."""
    prompt = len(rollout[0].prompt_tokens)
    return max(len(sample.prompt_tokens) + sample.length - prompt for sample in rollout)


def _signal_metrics(batch: StepBatch, found: Floats, known: AdvantageInput, config: Config) -> dict[str, float]:
    """Where the learning signal is: groups without any, truncated responses, tokens of long responses, wrong ones.
    `found`: advantages of rollouts or of tokens; of those a sample's is the mean size."""
    samples, active = batch.samples, _in_loss(batch, config)[0]
    if len(found) == len(known.rewards):
        parts = [len(rollout) for rollout in _rollouts(batch)]
        size, mean = np.repeat(np.abs(found), parts) * active, _mean(np.abs(found))
    else:
        ends = np.cumsum([0, *(sample.length for sample in samples)])
        totals = [np.concatenate([[0.0], np.cumsum(x)])[ends] for x in (np.abs(found) * known.in_loss, known.in_loss)]
        size = np.diff(totals[0]) / np.maximum(np.diff(totals[1]), 1)
        mean = float(totals[0][-1] / max(totals[1][-1], 1))
    groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
    strongest = np.zeros(len(batch.groups))
    np.maximum.at(strongest, groups, size)
    truncated = np.array([sample.truncated for sample in samples])
    metrics = {
        "reward/advantage_abs": mean,
        "reward/zero_advantage_share": _mean(strongest < SMALLEST_ADVANTAGE),
        "reward/truncated_advantage_share": float(size[truncated].sum() / max(size.sum(), SMALLEST_ADVANTAGE)),
    }
    lengths = np.array([sample.trained_tokens for sample in samples])
    counted = lengths[active & (lengths > 0)]
    if counted.size:
        weights = 1.0 / counted if config.algorithm.aggregation == "seq-mean-token-mean" else np.ones(counted.size)
        long = counted >= np.quantile(counted, 0.75)
        mean_weight = (weights * counted).sum() / counted.sum()
        metrics["rollout/long_token_weight"] = float(
            (weights * counted)[long].sum() / counted[long].sum() / mean_weight
        )
    wrong = np.array([s.grade is not None and s.grade.correct is False for s in samples])
    if wrong.any():
        metrics["rollout/length_wrong"] = _mean(lengths[wrong])
    return metrics


def _turn_metrics(rollouts: list[list[Sample]]) -> dict[str, float]:
    """Of rollout functions; empty if there is none."""
    turns = [[turn for sample in rollout for turn in sample.turns] for rollout in rollouts]
    if not any(turns):
        return {}
    generated = np.array([sum(turn.generated for turn in found) for found in turns])
    seconds = [sum(turn.seconds for turn in found if not turn.generated) for found in turns]
    samples = [sample for rollout in rollouts for sample in rollout]
    tokens, trained = sum(s.length for s in samples), sum(s.trained_tokens for s in samples)
    return {
        "rollout/turns_mean": _mean(generated),
        "rollout/turns_max": float(generated.max()),
        "rollout/tool_seconds": float(np.mean(seconds)),
        "rollout/appended_share": 1 - trained / max(1, tokens),
        "rollout/samples_per_rollout": len(samples) / len(rollouts),
    }


def _scores_by_grader(batch: StepBatch) -> dict[str, float]:
    """Of several graders: the mean score of each, and the share of responses that it could not grade."""
    grades = [s.grade for s in batch.samples if s.part == 0 and s.grade is not None and s.grade.parts]
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


def _penalties(rollouts: Sequence[Rollout], config: Config) -> np.ndarray:
    lengths = np.array([_total_length(rollout) for rollout in rollouts])
    penalty = length_penalty(torch.from_numpy(lengths), config.algorithm.overlong, config.overlong_max_length)
    return penalty.double().numpy()


def _mean(values: Floats | np.ndarray | list[bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
