"""The policy loss on flat packed tokens: DAPO, with GSPO and CISPO as named variants.

Promises:
- Everything returned is a sum (or a maximum) over active tokens. Whoever knows the global denominator divides, so
  the result is the same for every micro-batch split, packing and parallel layout.
- A masked position cannot reach the loss, a metric or a gradient, whatever it holds. A NaN or infinity at an active
  position is never repaired: it is counted in `sums["nonfinite_tokens"]`, and the caller must stop on it.
- No host synchronisation and no process groups. Where a sequence is shared between ranks, `reduce` adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_dapo.algorithm.kl import MAX_LOG_RATIO, kl_estimate
from megatron_dapo.config.algorithm import AlgorithmConfig

Reduce = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class LossInputs:
    """One packed micro-batch, or one context-parallel rank's share of it. Every tensor is [tokens].

    Positions that belong to no sequence (padding) have mask False and any id within 0..sequences−1.
    """

    logprobs: Tensor  # differentiable: the policy's log-prob of each token, fp32
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # bool: tokens that carry loss; truncated and ungraded samples are already masked out
    weights: Tensor  # from token_weights()
    counts: Tensor  # integer, from token_weights()
    sequence_ids: Tensor  # int64, 0..sequences−1
    sequences: int
    entropy: Tensor | None = None  # differentiable
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None


@dataclass(slots=True)
class LossOutputs:
    """Sums that add up over micro-batches and ranks. `sums` and `maxima` are fp64 scalars without gradient.

    sums, each a mean over active tokens once divided by sums["tokens"]:
        tokens, nonfinite_tokens          active tokens; those with a NaN or infinity among what the loss reads
        clip_fraction_high, _low, _dual   tokens whose ratio the upper, lower and dual bound replaced
        ratio_mean                        π/π_old as the objective uses it (gspo: the sequence's)
        approx_kl                         k3 estimate of KL(π_old‖π)
        entropy, reference_kl             where the inputs hold entropy, ref_logprobs
        mismatch_mean, mismatch_kl        where they hold engine_logprobs: |old − engine|; k3 of KL(engine‖π_old)
        mismatch_over_cap                 tokens whose weight exp(old − engine) lies above the cap (level sequence:
                                          the sequence's weight)
        importance_weight                 the weight applied, where importance sampling is on
    maxima, reduced with max, 0 where no token is active: ratio_max, mismatch_max.
    """

    loss_sum: Tensor  # scalar, differentiable
    denominator: Tensor  # int64 scalar
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def policy_loss(inputs: LossInputs, config: AlgorithmConfig, reduce: Reduce = identity) -> LossOutputs:
    """Weighted sum of the token losses, its denominator and the metrics.

    `reduce` sums a tensor over the ranks that share these sequences (context parallelism). It is called at most once,
    under no_grad, and the configuration alone decides whether: every rank makes the same calls.
    """
    inputs, losses, sequence = _token_losses(inputs, config, reduce)
    with torch.no_grad():
        sums, maxima = _metrics(inputs, losses, sequence, config)
    return LossOutputs((inputs.weights * losses).sum(), inputs.counts.sum(), sums, maxima)


def policy_loss_sum(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """policy_loss's `loss_sum` alone: for whoever needs the gradient now and the metrics later."""
    inputs, losses, _ = _token_losses(inputs, config, identity)
    return (inputs.weights * losses).sum()


def _token_losses(
    inputs: LossInputs, config: AlgorithmConfig, reduce: Reduce
) -> tuple[LossInputs, Tensor, _SequenceTerms]:
    """The inputs with masked positions blanked, each token's loss, and what came from whole sequences."""
    _check(inputs, config)
    inputs = _blank_masked(inputs)
    with torch.no_grad():
        sequence = _sequence_terms(inputs, config, reduce)
    losses = token_loss(
        inputs.logprobs,
        inputs.entropy,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        config=config,
        sequence_log_ratio=sequence.log_ratio,
        importance_weights=sequence.importance_weights,
        ref_logprobs=inputs.ref_logprobs,
    )
    return inputs, losses, sequence


def token_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: AlgorithmConfig,
    sequence_log_ratio: Tensor | None = None,
    importance_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Tensor:
    """Loss of each token before aggregation; elementwise over any slice of tokens, differentiable in the first two.

    sequence_log_ratio  gspo only: the mean log-ratio of the token's sequence, without gradient
    importance_weights  truncated importance-sampling weights, without gradient; they scale the policy term only
    """
    ratio = policy_ratio(logprobs, old_logprobs, sequence_log_ratio)
    lower, upper = clip_bounds(advantages, config)
    if config.objective == "cispo":
        losses = -ratio.detach().clamp(lower, upper) * advantages * logprobs
    else:
        losses = -ratio.clamp(lower, upper) * advantages
    if importance_weights is not None:
        losses = losses * importance_weights
    if config.kl.coefficient > 0:
        assert ref_logprobs is not None
        losses = losses + config.kl.coefficient * kl_estimate(logprobs, ref_logprobs, config.kl.estimator)
    if config.entropy_coefficient > 0:
        assert entropy is not None
        losses = losses - config.entropy_coefficient * entropy
    return losses


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor, sequence_log_ratio: Tensor | None = None) -> Tensor:
    """π/π_old with the log-ratio held within ±20; beyond it the gradient is zero.

    With `sequence_log_ratio` (gspo) the value is the sequence's ratio s and the gradient s·∇log π of the token alone:
    s_t = sg(s)·exp(log π_t − sg(log π_t)). Summed over a sequence this is the gradient of length·s, and it needs no
    collective that autograd knows about.
    """
    if sequence_log_ratio is None:
        log_ratio = logprobs - old_logprobs
    else:
        log_ratio = sequence_log_ratio + (logprobs - logprobs.detach())
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_bounds(advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The interval (lower, upper) in which each token's ratio counts.

    min(r·Â, clip(r)·Â) binds on one side only: from above where Â > 0, from below where Â < 0. The dual clip adds an
    upper bound where Â < 0. CISPO clips its weight on both sides whatever the sign, and has no dual clip; its authors
    use no lower bound, which is clip_low = 1.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.objective == "cispo":
        return torch.full_like(advantages, low), torch.full_like(advantages, high)
    dual = torch.inf if config.dual_clip is None else config.dual_clip
    negative, positive = advantages < 0, advantages > 0
    lower = torch.zeros_like(advantages).masked_fill(negative, low)
    upper = torch.full_like(advantages, torch.inf).masked_fill(positive, high).masked_fill(negative, dual)
    return lower, upper


@dataclass(slots=True)
class _SequenceTerms:
    """What the token loss needs from the whole sequence, spread back over its tokens."""

    log_ratio: Tensor | None  # gspo
    importance_weights: Tensor | None  # importance sampling, at either level
    mismatch_weights: Tensor | None  # the same before the cap; at token level also where importance sampling is off


def _sequence_terms(inputs: LossInputs, config: AlgorithmConfig, reduce: Reduce) -> _SequenceTerms:
    mismatch = None if inputs.engine_logprobs is None else inputs.old_logprobs - inputs.engine_logprobs
    rows: dict[str, Tensor] = {}
    if config.objective == "gspo":
        rows |= {"length": inputs.mask, "log_ratio": inputs.logprobs - inputs.old_logprobs}
    if config.importance_sampling.level == "sequence":
        assert mismatch is not None
        rows |= {"mismatch": mismatch}
    sums = _sums_per_sequence(rows, inputs, reduce)

    log_ratio = sums["log_ratio"] / sums["length"].clamp_min(1) if config.objective == "gspo" else None
    difference = sums.get("mismatch", mismatch)
    weights = None if difference is None else difference.exp()
    capped = weights.clamp(max=config.importance_sampling.cap) if weights is not None else None
    return _SequenceTerms(
        log_ratio=log_ratio,
        importance_weights=capped if config.importance_sampling.level != "off" else None,
        mismatch_weights=weights,
    )


def _sums_per_sequence(rows: dict[str, Tensor], inputs: LossInputs, reduce: Reduce) -> dict[str, Tensor]:
    """Sum every [tokens] row over each whole sequence, on all ranks, and give every token its sequence's sum.

    One call of `reduce` for all rows. In fp64, so that the order of addition, which differs between layouts and
    between runs on a GPU, is lost when the result is rounded back.
    """
    if not rows:
        return {}
    stacked = torch.stack([row.double() for row in rows.values()])
    totals = stacked.new_zeros(len(rows), inputs.sequences).index_add_(1, inputs.sequence_ids, stacked)
    spread = reduce(totals)[:, inputs.sequence_ids].to(inputs.logprobs.dtype)
    return dict(zip(rows, spread, strict=True))


def _metrics(
    inputs: LossInputs, losses: Tensor, sequence: _SequenceTerms, config: AlgorithmConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    old, logprobs = inputs.old_logprobs, inputs.logprobs
    ratio = policy_ratio(logprobs, old, sequence.log_ratio)
    lower, upper = clip_bounds(inputs.advantages, config)
    above, negative = ratio > upper, inputs.advantages < 0
    # CISPO has one upper bound whatever the sign; only for the others does "above, with Â < 0" mean the dual clip.
    dual = above & negative if config.objective != "cispo" else torch.zeros_like(above)
    values = {
        "tokens": inputs.mask,
        "nonfinite_tokens": ~_finite(inputs, losses, config),
        "clip_fraction_high": above & ~dual,
        "clip_fraction_low": ratio < lower,
        "clip_fraction_dual": dual,
        "ratio_mean": ratio,
        "approx_kl": kl_estimate(old, logprobs, "k3"),
    }
    peaks = {"ratio_max": ratio}
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    if inputs.ref_logprobs is not None:
        values["reference_kl"] = kl_estimate(logprobs, inputs.ref_logprobs, config.kl.estimator)
    if inputs.engine_logprobs is not None:
        assert sequence.mismatch_weights is not None
        peaks["mismatch_max"] = values["mismatch_mean"] = (old - inputs.engine_logprobs).abs()
        values["mismatch_kl"] = kl_estimate(inputs.engine_logprobs, old, "k3")
        values["mismatch_over_cap"] = sequence.mismatch_weights > config.importance_sampling.cap
    if sequence.importance_weights is not None:
        values["importance_weight"] = sequence.importance_weights
    # fp64 because a fp32 count stops being exact at 16.7 million tokens, and a batch has more.
    active = {name: torch.where(inputs.mask, value, 0).double() for name, value in (values | peaks).items()}
    return {name: active[name].sum() for name in values}, {name: _largest(active[name]) for name in peaks}


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())


def _finite(inputs: LossInputs, losses: Tensor, config: AlgorithmConfig) -> Tensor:
    """bool [tokens]: everything that enters the loss is finite. The loss alone would not show it: clamps hide ±inf."""
    read = [inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.weights, losses]
    if config.entropy_coefficient > 0 and inputs.entropy is not None:
        read.append(inputs.entropy)
    if config.kl.coefficient > 0 and inputs.ref_logprobs is not None:
        read.append(inputs.ref_logprobs)
    if config.importance_sampling.level != "off" and inputs.engine_logprobs is not None:
        read.append(inputs.engine_logprobs)
    return torch.stack([tensor.isfinite() for tensor in read]).all(dim=0)


def _blank_masked(inputs: LossInputs) -> LossInputs:
    """Zero at every masked position, before any arithmetic: 0·NaN is NaN, and so is its gradient."""

    def blank(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.where(inputs.mask, tensor, torch.zeros_like(tensor))

    blanked = {name: blank(tensor) for name, tensor in _tensors(inputs).items() if name not in ("mask", "sequence_ids")}
    return replace(inputs, **blanked)  # type: ignore[arg-type]


def _tensors(inputs: LossInputs) -> dict[str, Tensor | None]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "sequences"}


INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64)  # a bf16 log-prob of −10 is off by up to 0.03
DTYPES = {"mask": (torch.bool,), "counts": INTEGERS, "sequence_ids": (torch.int64,)}


def _check(inputs: LossInputs, config: AlgorithmConfig) -> None:
    """One ValueError that names the tensor; looks at shapes and types only, never at values on the device."""
    tokens = inputs.logprobs.numel()
    for name, tensor in _tensors(inputs).items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != (tokens,):
            raise ValueError(f"{name}: expected shape ({tokens},) like logprobs, found {tuple(tensor.shape)}")
        allowed = DTYPES.get(name, FLOATS)
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"{name}: expected {expected}, found {tensor.dtype}")
    needed = {
        "entropy": (config.entropy_coefficient > 0, "entropy_coefficient is above 0"),
        "ref_logprobs": (config.kl.coefficient > 0, "kl.coefficient is above 0"),
        "engine_logprobs": (config.importance_sampling.level != "off", "importance_sampling is on"),
    }
    for name, (need, why) in needed.items():
        if need and getattr(inputs, name) is None:
            raise ValueError(f"{name}: expected a tensor because algorithm.{why}, found None")
