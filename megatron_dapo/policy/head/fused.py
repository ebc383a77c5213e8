"""The head: output layer, log-probs, entropy and the policy loss. All logits never exist at once.

The vocabulary may be split over tensor-parallel ranks. Columns beyond the real vocabulary never count. Log-probs are
those of the distribution at `temperature`, from which the engine sampled. Two functions share the kernels:

- `one_pass`: loss and gradients in one loop over chunks of tokens. A token's loss depends on its own log-prob and on
  numbers known before, so the gradient of its logits is known as soon as they are: three matrix products, no
  recomputation, and the gradient is written over the logits.
- `two_pass`: log-probs and entropies as differentiable values; the backward pass computes the logits again. For losses
  that need whole sequences first, and for scoring without gradients.

The kernels (`row_stats`, `write_gradient`) are Triton's on CUDA, and torch's elsewhere and where Triton is absent;
tests compare the two. They never read columns of padding. Statistics are relative to each row's own maximum.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

# Given a slice of the scored tokens, their log-probs and entropies: the (summed) loss of that slice.
ChunkLoss = Callable[[slice, Tensor, Tensor], Tensor]
ROW_ALIGN = 128


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """Which hidden states to score. `positions` index this rank's packed tokens; `targets` are the next tokens."""

    positions: Tensor  # [tokens] int64
    targets: Tensor  # [tokens] int64
    vocab: int
    temperature: float = 1.0
    chunk_tokens: int = 2048
    loss: ChunkLoss | None = None  # set: one pass
    # One pass: where the weight's gradient goes. "returned": to autograd. "added": into the weight's fp32 main_grad.
    # "added-shared": the same, for a weight that the embedding of this stage shares. "none": the weight is frozen.
    weight_gradient: Literal["returned", "added", "added-shared", "none"] = "returned"
    exact: bool = False  # with the kernels of SGLang's servers (model/exact): bf16 logits, divided by the temperature


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: HeadRequest,
    config: Any,
    **_: Any,
) -> Tensor:
    """hidden_states [s, b, h] of this rank (s/tp under sequence parallelism) to [2, tokens]: log-probs and entropies.
    If the request has a loss, to that loss (a scalar). Positions index the hidden states [s, b], flattened.

    From Megatron-Core 0.19 on it works in any GPTModel: `model(…, output_processor=output_processor,
    output_processor_context=HeadRequest(…))`."""
    weight, group = output_layer.weight if output_weight is None else output_weight, output_layer.tp_group
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    chosen = hidden.flatten(0, 1).index_select(0, context.positions)
    if context.loss is not None:
        return one_pass(chosen, weight, context, group)
    return torch.stack(two_pass(chosen, weight, context, group))


def two_pass(
    hidden: Tensor, weight: Tensor, request: HeadRequest, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """hidden [tokens, h], weight [vocab/tp, h] to fp32 log-probs and entropies [tokens]; both differentiable.

    The gradient of `hidden` is this rank's share (its vocabulary columns); the caller's region op sums the shares.
    """
    return _TwoPass.apply(hidden, weight, _Shard.of(weight, request, tp_group))


def one_pass(hidden: Tensor, weight: Tensor, request: HeadRequest, tp_group: dist.ProcessGroup) -> Tensor:
    """The loss of the request over all tokens, a differentiable scalar. Gradients are made in the forward pass."""
    return _OnePass.apply(hidden, weight, _Shard.of(weight, request, tp_group), request)


@dataclass(frozen=True, slots=True)
class _Shard:
    """The columns [start, start + real) of the vocabulary that this rank holds, and the chunks of tokens."""

    start: int
    columns: int
    real: int
    targets: Tensor
    temperature: float
    exact: bool
    chunk_tokens: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: Tensor, request: HeadRequest, group: dist.ProcessGroup) -> _Shard:
        columns = weight.shape[0]
        start = group.rank() * columns
        real = min(max(request.vocab - start, 0), columns)
        rows = (request.targets, request.temperature, request.exact, request.chunk_tokens)
        return cls(start, columns, real, *rows, group)

    @property
    def inverse_temperature(self) -> float:
        return 1 / self.temperature

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Chunks of about equal size: a short last chunk would waste a whole matrix product."""
        count = max(1, -(-tokens // self.chunk_tokens))
        size = -(-tokens // count)
        if size > ROW_ALIGN:
            size = -(-size // ROW_ALIGN) * ROW_ALIGN
        return (slice(s, min(s + size, tokens)) for s in range(0, tokens, max(1, size)))

    def buffer(self, hidden: Tensor) -> Tensor:
        """One chunk of logits, reused for every chunk."""
        longest = max((c.stop - c.start for c in self.chunks(hidden.shape[0])), default=0)
        return torch.empty(longest, self.columns, dtype=hidden.dtype, device=hidden.device)

    def logits(self, hidden: Tensor, weight: Tensor, buffer: Tensor, chunk: slice) -> Tensor:
        out = buffer[: chunk.stop - chunk.start]
        if self.exact:
            from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels

            return kernels.mm(hidden[chunk], weight.t(), out=out)
        return torch.mm(hidden[chunk], weight.t(), out=out)

    def _stats(self, logits: Tensor, target: Tensor) -> tuple[RowStats, Tensor]:
        """Statistics of the rows, and the targets' logits, both at temperature."""
        picked = logits.gather(1, target.clamp_min(0)[:, None]).squeeze(1).float()
        if self.exact:
            from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels

            # By a tensor: torch multiplies by the inverse of a number.
            picked = picked / torch.full_like(picked, self.temperature)
            return RowStats(*kernels.row_stats(logits, self.real, self.temperature)), picked
        return row_stats(logits, self.real, self.inverse_temperature), picked * self.inverse_temperature

    def score(self, logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """log-prob of the target, entropy, and log Σ exp, over all ranks' columns. Two all-reduces: max, then sums."""
        column, here = self.local_target(chunk)
        stats, picked = self._stats(logits, column)
        peak = stats.peak
        sums = torch.stack([stats.total, stats.weighted, torch.where(here, picked, 0.0)])
        if self.group.size() > 1:
            peak = peak.clone()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
            moved = torch.where(stats.total > 0, stats.peak - peak, 0.0)  # a rank with only padding has peak −inf
            shrink = moved.exp()
            sums[1] = shrink * (stats.weighted + stats.total * moved)
            sums[0] = stats.total * shrink
            dist.all_reduce(sums, group=self.group)
        total, weighted, target_logit = sums
        log_sum = peak + total.log()
        # Relative to the peak: otherwise the entropy is a difference of large numbers.
        return target_logit - log_sum, total.log() - weighted / total, log_sum

    def local_target(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """This rank's column of each target (−1 where it is another rank's), and whether it is here."""
        local = self.targets[chunk] - self.start
        here = (local >= 0) & (local < self.real)
        return torch.where(here, local, -1), here

    def gradient(
        self, logits: Tensor, chunk: slice, scores: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor]
    ) -> None:
        log_sum, entropy = scores
        column, _ = self.local_target(chunk)
        grad_logprob, grad_entropy = (g.contiguous() for g in grads)
        write_gradient(
            logits, self.real, self.inverse_temperature, log_sum, entropy, column, grad_logprob, grad_entropy
        )


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs, entropy, log_sum = (torch.empty(tokens, device=hidden.device) for _ in range(3))
        buffer = shard.buffer(hidden)
        for chunk in shard.chunks(tokens):
            logits = shard.logits(hidden, weight, buffer, chunk)
            logprobs[chunk], entropy[chunk], log_sum[chunk] = shard.score(logits, chunk)
        ctx.save_for_backward(hidden, weight, log_sum, entropy)
        ctx.shard = shard
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, log_sum, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        buffer, grad_hidden = shard.buffer(hidden), torch.empty_like(hidden)
        grad_weight = _zeros(weight) if ctx.needs_input_grad[1] else None
        for chunk in shard.chunks(hidden.shape[0]):
            logits = shard.logits(hidden, weight, buffer, chunk)
            here = (grads[0][chunk], grads[1][chunk])
            shard.gradient(logits, chunk, (log_sum[chunk], entropy[chunk]), here)
            torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, logits, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, shard: _Shard, request: HeadRequest) -> Tensor:
        assert request.loss is not None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        buffer, grad_hidden = shard.buffer(hidden), torch.empty_like(hidden)
        ctx.weight_gradient = request.weight_gradient
        returned = request.weight_gradient == "returned"
        frozen = request.weight_gradient == "none"
        accumulator = _zeros(weight) if returned else None if frozen else weight.main_grad  # type: ignore[attr-defined]
        for chunk in shard.chunks(hidden.shape[0]):
            logits = shard.logits(hidden, weight, buffer, chunk)
            logprobs, entropy, log_sum = shard.score(logits, chunk)
            loss, grads = _differentiate(request.loss, chunk, logprobs, entropy)
            total += loss
            shard.gradient(logits, chunk, (log_sum, entropy), grads)
            torch.mm(logits, weight, out=grad_hidden[chunk])
            if accumulator is not None:
                add_product(accumulator, logits, hidden[chunk])
        ctx.save_for_backward(grad_hidden, accumulator if returned else weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, kept = ctx.saved_tensors
        if ctx.weight_gradient == "returned":
            return grad_hidden * grads[0], (kept * grads[0]).to(ctx.weight_dtype), None, None
        if ctx.weight_gradient == "none":
            return grad_hidden * grads[0], None, None, None
        _require_unscaled(grads[0])
        if ctx.weight_gradient == "added-shared":  # the embedding's gradient will trigger Megatron's hooks
            return grad_hidden * grads[0], None, None, None
        kept.grad_added_to_main_grad = True  # tells Megatron that the returned gradient only triggers its hooks
        return grad_hidden * grads[0], torch.empty_like(kept), None, None


def _require_unscaled(grad: Tensor) -> None:
    """main_grad already holds the gradient of the unscaled loss: scaling the loss later would not reach it."""
    message = "the loss of the one-pass head was scaled after the head: Megatron's per-token path must be on"
    if grad.is_cuda:
        torch._assert_async(grad == 1, message)  # does not wait for the device
    elif grad.item() != 1:
        raise RuntimeError(message)


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _differentiate(
    loss: ChunkLoss, chunk: slice, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The chunk's loss, and its gradient with respect to each token's log-prob and entropy."""
    with torch.enable_grad():
        leaves = (logprobs.detach().requires_grad_(), entropy.detach().requires_grad_())
        value = loss(chunk, *leaves)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
    grad_logprob, grad_entropy = (torch.zeros_like(logprobs) if g is None else g for g in found)
    return value.detach(), (grad_logprob, grad_entropy)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [columns, h] += leftᵀ · right, accumulated in total's own (fp32) precision."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left.t(), right)


# ---- one chunk of logits ----


class RowStats(NamedTuple):
    """Over this rank's columns, at temperature: maximum m, Σ exp(x−m), and Σ exp(x−m)·(x−m). Each [rows], fp32."""

    peak: Tensor
    total: Tensor
    weighted: Tensor


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def row_stats(logits: Tensor, real: int, inverse_temperature: float) -> RowStats:
    """logits [rows, columns] in any floating type."""
    if logits.is_cuda and has_triton():
        from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels

        return RowStats(*kernels.row_stats(logits, real, inverse_temperature, exact=False))
    x = logits[:, :real].float() * inverse_temperature
    if real == 0:  # all of this rank's columns are padding
        nothing = torch.zeros(logits.shape[0], device=logits.device)
        return RowStats(nothing - float("inf"), nothing, nothing)
    peak = x.amax(dim=-1)
    shifted = x - peak[:, None]
    weights = shifted.exp()
    return RowStats(peak, weights.sum(dim=-1), torch.linalg.vecdot(weights, shifted))


def write_gradient(
    logits: Tensor,
    real: int,
    inverse_temperature: float,
    log_sum: Tensor,
    entropy: Tensor,
    target: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
) -> None:
    """Overwrites logits [rows, columns] with the gradient of Σ grad_logprob·logp + grad_entropy·entropy.

    d logp / d x = 1[target] − p;  d entropy / d x = −p·(log p + entropy). `target` is this rank's column, or −1 if the
    target is in another rank's.
    """
    arguments: tuple[Any, ...] = (log_sum, entropy, target, grad_logprob, grad_entropy)
    if logits.is_cuda and has_triton():
        from megatron_dapo.policy.head import triton as head_triton

        head_triton.write_gradient(logits, real, inverse_temperature, *arguments)
        return
    log_p = logits[:, :real].float() * inverse_temperature - log_sum[:, None]
    slope = grad_logprob[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    gradient = log_p.exp_().mul_(slope).neg_()
    here = target >= 0
    gradient.scatter_add_(1, target.clamp_min(0)[:, None], torch.where(here, grad_logprob, 0.0)[:, None])
    logits[:, :real] = (gradient * inverse_temperature).to(logits.dtype)
    logits[:, real:] = 0
