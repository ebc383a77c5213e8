"""Packed loss inputs from readable sequences. Every loss test has unequal lengths and a fully masked sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_dapo.algorithm import LossOutputs, PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.config.algorithm import AlgorithmConfig

NAN, INF = math.nan, math.inf
NORM_LENGTH = 100


@dataclass
class Sequence:
    """Tokens given by their ratio π/π_old. `active` None means that all tokens are active."""

    ratios: list[float]
    advantage: float
    active: list[bool] | None = None
    old: float = -1.0
    ref_ratios: list[float] | None = None  # ref/π
    engine_ratios: list[float] | None = None  # old/engine
    entropy: list[float] | None = None

    @property
    def mask(self) -> list[bool]:
        return [True] * len(self.ratios) if self.active is None else self.active

    def logs(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        values = getattr(self, name) or [1.0] * len(self.ratios)
        return torch.tensor(values, dtype=dtype).log()


@dataclass
class Inputs:
    """What a loss reads. `logprobs` and `entropy` are the model's scores; everything else is in `batch`."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    batch: TokenBatch

    @property
    def scores(self) -> Scores:
        return Scores(self.logprobs, self.entropy)

    @property
    def mask(self) -> torch.Tensor:
        return self.batch.mask

    def get(self, name: str) -> torch.Tensor | None:
        return getattr(self._owner(name), name)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self._owner(name), name, tensor)

    def _owner(self, name: str) -> object:
        return self if name in ("logprobs", "entropy") else self.batch


def pack(
    sequences: list[Sequence],
    config: AlgorithmConfig,
    dtype: torch.dtype = torch.float64,
    extras: tuple[str, ...] = ("entropy", "ref_logprobs", "engine_logprobs"),
) -> Inputs:
    """The sequences, concatenated; `logprobs` and `entropy` are leaves that require a gradient."""
    old = torch.cat([torch.full((len(s.ratios),), s.old, dtype=dtype) for s in sequences])
    logprobs = old + torch.cat([s.logs("ratios", dtype) for s in sequences])
    mask = torch.tensor([m for s in sequences for m in s.mask])
    ids = torch.tensor([i for i, s in enumerate(sequences) for _ in s.ratios])
    weights, counts = token_weights(config.aggregation, mask, ids, len(sequences), NORM_LENGTH)
    available = {
        "entropy": torch.tensor([e for s in sequences for e in s.entropy or [0.5] * len(s.ratios)], dtype=dtype),
        "ref_logprobs": logprobs + torch.cat([s.logs("ref_ratios", dtype) for s in sequences]),
        "engine_logprobs": old - torch.cat([s.logs("engine_ratios", dtype) for s in sequences]),
    }
    optional = {name: available[name] for name in extras}
    if "entropy" in optional:
        optional["entropy"].requires_grad_()
    entropy = optional.pop("entropy", None)
    batch = TokenBatch(
        old_logprobs=old,
        advantages=torch.tensor([s.advantage for s in sequences for _ in s.ratios], dtype=dtype),
        mask=mask,
        weights=weights,
        counts=counts,
        sequence_ids=ids,
        sequences=len(sequences),
        **optional,
    )
    return Inputs(logprobs.requires_grad_(), entropy, batch)


def poison(inputs: Inputs) -> Inputs:
    """NaN and infinities at every masked position of every float tensor: padding and prompts may hold them."""
    junk = torch.tensor([NAN, INF, -INF]).repeat(len(inputs.mask))[: len(inputs.mask)]
    for name in ("logprobs", "old_logprobs", "advantages", "weights", "entropy", "ref_logprobs", "engine_logprobs"):
        tensor = inputs.get(name)
        if tensor is not None:
            poisoned = torch.where(inputs.mask, tensor.detach(), junk.to(tensor.dtype))
            inputs.put(name, poisoned.requires_grad_(tensor.requires_grad))
    return inputs


def policy_loss(scores: Scores, batch: TokenBatch, config: AlgorithmConfig, *reduce) -> LossOutputs:
    return PolicyLoss(config)(scores, batch, *reduce)
