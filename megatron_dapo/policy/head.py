"""The head: log-probs and entropies of chosen tokens, without ever holding all logits.

The output layer's product, the softmax over a vocabulary that is split over tensor-parallel ranks, and the pick of
the target are one autograd function over chunks of tokens: logits exist for `chunk_tokens` tokens at a time, in the
forward and (recomputed) in the backward pass. Columns beyond the real vocabulary never count. Log-probs are those
of the distribution at `temperature`, which is what the engine sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """Which hidden states to score. `positions` index this rank's packed tokens; `targets` are the next tokens."""

    positions: Tensor  # [tokens] int64
    targets: Tensor  # [tokens] int64
    vocab: int
    temperature: float = 1.0
    chunk_tokens: int = 2048


def run_head(
    hidden: Tensor, weight: Tensor, request: HeadRequest, tp_group: dist.ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """hidden [s, 1, h] of this rank (s/tp under sequence parallelism) to [2, tokens]: log-probs, entropies."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp_group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    chosen = hidden.flatten(0, 1).index_select(0, request.positions)
    logprobs, entropy = vocab_parallel_logprobs(chosen, weight, request.targets, request, tp_group)
    return torch.stack([logprobs, entropy])


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, request: HeadRequest, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """hidden [tokens, h], weight [vocab/tp, h] to fp32 log-probs and entropies [tokens]; both differentiable.

    The gradient of `hidden` is this rank's share (its vocabulary columns); the caller's region op sums the shares.
    """
    shard = _VocabShard.of(weight, request, tp_group)
    return _VocabParallelLogProbs.apply(hidden, weight, targets, shard)


@dataclass(frozen=True, slots=True)
class _VocabShard:
    """The columns [start, start + real) of the vocabulary that this rank holds, and how to walk over tokens."""

    start: int
    columns: int
    real: int
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: Tensor, request: HeadRequest, group: dist.ProcessGroup) -> _VocabShard:
        columns = weight.shape[0]
        start = group.rank() * columns
        real = min(max(request.vocab - start, 0), columns)
        return cls(start, columns, real, request.temperature, request.chunk_tokens, group)

    def chunks(self, tokens: int) -> Iterator[slice]:
        return (slice(s, min(s + self.chunk_tokens, tokens)) for s in range(0, tokens, self.chunk_tokens))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """fp32 [chunk, columns] at temperature; padding columns are −inf, so that they have no probability."""
        logits = torch.mm(hidden, weight.t()).float()
        if self.temperature != 1.0:
            logits /= self.temperature
        logits[:, self.real :] = float("-inf")
        return logits

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
        local = targets - self.start
        here = (local >= 0) & (local < self.real)
        return torch.where(here, local, 0), here

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: _VocabShard) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        log_sum, picked, entropy = (torch.empty(tokens, device=hidden.device) for _ in range(3))
        for chunk in shard.chunks(tokens):
            logits = shard.logits(hidden[chunk], weight)
            peak = shard.reduce(logits.amax(dim=-1), dist.ReduceOp.MAX)
            column, here = shard.local_targets(targets[chunk])
            target_logit = torch.where(here, logits.gather(1, column[:, None]).squeeze(1), 0.0)
            # Relative to the peak, so that the entropy is no difference of large numbers; padding columns are left
            # out of the product, where 0 · −inf would be NaN.
            shifted = (logits - peak[:, None])[:, : shard.real]
            weights = shifted.exp()
            total, mean, target_logit = shard.reduce(
                torch.stack([weights.sum(dim=-1), torch.linalg.vecdot(weights, shifted), target_logit]),
                dist.ReduceOp.SUM,
            )
            log_sum[chunk] = peak + total.log()
            entropy[chunk] = total.log() - mean / total
            picked[chunk] = target_logit
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.shard = shard
        return picked - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        shard: _VocabShard = ctx.shard
        grad_logprob, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in shard.chunks(hidden.shape[0]):
            log_p = shard.logits(hidden[chunk], weight) - log_sum[chunk, None]
            p = log_p.exp()
            # d logp / d logits = 1[target] − p;  d entropy / d logits = −p · (log p + entropy)
            log_p[:, shard.real :] = 0.0
            slope = grad_logprob[chunk, None] + grad_entropy[chunk, None] * (log_p + entropy[chunk, None])
            grad_logits = p.mul_(slope).neg_()
            column, here = shard.local_targets(targets[chunk])
            grad_logits.scatter_add_(1, column[:, None], torch.where(here, grad_logprob[chunk], 0.0)[:, None])
            if shard.temperature != 1.0:
                grad_logits /= shard.temperature
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            grad_weight += torch.mm(grad_logits.t(), hidden[chunk])
        return grad_hidden, grad_weight.to(weight.dtype), None, None
