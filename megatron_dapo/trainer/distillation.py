"""On-policy distillation: the teacher's log-probs become an advantage for each token.

The advantage of a token is weight · (log π_teacher − log π), with π as the engine sampled from it. Its expectation
under π is −weight · KL(π‖π_teacher) at that token: the policy is rewarded for tokens that the teacher finds likely.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.policy.batch import TrainBatch, trained_tokens
from megatron_dapo.types import Sample


def add_distillation(batch: TrainBatch, samples: Sequence[Sample], config: AlgorithmConfig) -> dict[str, float]:
    """Sets `batch.token_advantages`, and with `alone` also advantages and mask; returns metrics."""
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
