"""The policy loss on flat packed tokens: an objective, off-policy corrections, a KL term, an entropy bonus and the
likelihood of right responses.

Promises:
- Everything returned is a sum (or a maximum) over active tokens. The caller that knows the global denominator divides,
  so the result is the same for every micro-batch split, packing and parallel layout.
- A masked position cannot reach the loss, a metric or a gradient, whatever it holds. A NaN or infinity at an active
  position is never repaired: it is counted in `sums["nonfinite_tokens"]`, and the caller must stop on it.
- No host synchronisation and no process groups. Where ranks share a sequence, `reduce` adds up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dapo.algorithm.objective import (
    Needs,
    Objective,
    Scores,
    TokenBatch,
    TokenMetrics,
    blank,
    check_shapes,
    kl_estimate,
)
from megatron_dapo.algorithm.off_policy import Corrections, OffPolicy
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.errors import ConfigError, UserError
from megatron_dapo.plugins import in_one_line, is_plugin, load_function

Reduce = Callable[[Tensor], Tensor]
COUNTED = ("weights", "counts", "positive")  # of a TokenBatch: zero in excluded sequences


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class LossOutputs:
    """Sums that add up over micro-batches and ranks. `sums` and `maxima` are fp64 scalars without gradient.

    sums, each a mean over active tokens once divided by sums["tokens"]:
        tokens, nonfinite_tokens          active tokens; those with a NaN or infinity among what the loss reads
        ratio_mean                        π/π_old as the objective uses it (gspo: the sequence's)
        clip_fraction_high, _low, _dual   dapo, gspo, cispo: tokens whose ratio a bound replaced
        …                                 other metrics of the objective
        approx_kl                         k3 estimate of KL(π_old‖π)
        entropy, reference_kl             where entropy, ref_logprobs are given
        positive_loss, positive_share     where positive_coefficient is set: what its term adds to a token-mean loss;
                                          tokens of right responses
        mismatch_mean, mismatch_kl        where engine_logprobs are given and log-probs of the proximal policy are
                                          known: |proximal − engine|; k3 of KL(engine‖proximal)
        mismatch_over_cap                 same: tokens whose weight exp(proximal − engine) is above the cap (sequence
                                          level: the sequence's weight)
        importance_weight                 the weight applied, where there is one
        token_mask_share, sequence_mask_share, opsm_share
                                          where they are on: tokens removed by the token mask, in sequences removed by
                                          the sequence masks, in sequences removed by OPSM; the other metrics include
                                          these tokens
    maxima, reduced with max, 0 where no token is active: ratio_max, mismatch_max, and the objective's.
    """

    loss_sum: Tensor  # scalar, differentiable
    denominator: Tensor  # int64 scalar, without excluded sequences
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def load_objective(config: AlgorithmConfig) -> Objective:
    """The objective that the configuration names, made from the configuration."""
    name = config.objective
    if is_plugin(name):
        make = load_function(name, "algorithm.objective")
    else:
        make = importlib.import_module(f"megatron_dapo.algorithm.objectives.{name}").objective
    try:
        objective = make(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"algorithm.objective: {name} raised {in_one_line(error, make)}") from error
    if not isinstance(objective, Objective):
        expected = "must be a class derived from megatron_dapo.algorithm.Objective"
        raise ConfigError(f"algorithm.objective: {name} {expected}, but it made a {type(objective).__name__}")
    if not isinstance(objective.needs, Needs):
        raise ConfigError(f"algorithm.objective: the needs of {name} must be a Needs, found {objective.needs!r}")
    return objective


class PolicyLoss:
    """The policy loss of one configuration. `needs` says what it reads."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.objective = load_objective(config)
        self.off_policy = OffPolicy(config.off_policy)
        terms = Needs(
            entropy=config.entropy_coefficient > 0,
            reference=config.kl.coefficient > 0,
            right=config.positive_coefficient > 0,
        )
        self.needs = self.objective.needs | self.off_policy.needs | terms

    def __call__(self, scores: Scores, batch: TokenBatch, reduce: Reduce = identity) -> LossOutputs:
        """Weighted sum of the token losses, its denominator and the metrics.

        `reduce` sums a tensor over the ranks that share these sequences (context parallelism). It is called at most
        once, under no_grad. The configuration alone decides whether it is called: every rank makes the same calls.
        """
        scores, batch, terms, losses = self._evaluate(scores, batch, reduce)
        with torch.no_grad():
            sums, maxima = self._metrics(scores, batch, losses, terms)
        return LossOutputs(_weighted(scores, batch, terms, losses).sum(), batch.counts.sum(), sums, maxima)

    def details(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        """[tokens] of whole sequences: each token's `weight` and weighted `loss`, both 0 where it is masked or removed;
        and every value that the metrics of corrections and objective average."""
        scores, batch, terms, losses = self._evaluate(scores, batch, identity)
        own = {"weight": blank(batch.weights, _kept(batch, terms)), "loss": _weighted(scores, batch, terms, losses)}
        return own | terms.corrections.means | self.objective.metrics(scores, batch, terms.sums).means

    def sum(self, scores: Scores, batch: TokenBatch) -> Tensor:
        """The `loss_sum` of a call alone, for a caller that needs the gradient now and the metrics later."""
        scores, batch, terms, losses = self._evaluate(scores, batch, identity)
        return _weighted(scores, batch, terms, losses).sum()

    def included(self, batch: TokenBatch) -> Tensor:
        """bool [tokens], of a whole mini-batch: the active tokens whose sequence no correction excludes. What the model
        computes has no influence."""
        batch = batch.blanked()
        scores = Scores(batch.old_logprobs, torch.zeros_like(batch.old_logprobs))  # an objective may read the entropy
        excluded = self._sequence_terms(scores, batch, identity).corrections.excluded
        return batch.mask if excluded is None else batch.mask & ~excluded

    def _evaluate(
        self, scores: Scores, batch: TokenBatch, reduce: Reduce
    ) -> tuple[Scores, TokenBatch, _SequenceTerms, Tensor]:
        """Scores and batch with zeros at masked positions, without excluded sequences in weights and counts; what whole
        sequences contribute; and the token losses, also of tokens that the corrections remove."""
        check_shapes(scores, batch)
        self._check_present(scores, batch)
        # Before any arithmetic: what a masked position holds must not reach a sum or a gradient.
        entropy = None if scores.entropy is None else blank(scores.entropy, batch.mask)
        scores, batch = Scores(blank(scores.logprobs, batch.mask), entropy), batch.blanked()
        terms = self._sequence_terms(scores, batch, reduce)
        losses = self._losses(scores, batch, terms)
        excluded = terms.corrections.excluded
        if excluded is not None:
            kept = {name: blank(batch.tensors[name], ~excluded) for name in COUNTED if name in batch.tensors}
            batch = replace(batch, **kept)  # type: ignore[arg-type]
        return scores, batch, terms, losses

    def _check_present(self, scores: Scores, batch: TokenBatch) -> None:
        config, reads_it = self.config, f"objective {self.config.objective} reads it"
        for name, tensor, needed, why in (
            ("entropy", scores.entropy, self.needs.entropy,
             "entropy_coefficient is above 0" if config.entropy_coefficient else reads_it),
            ("ref_logprobs", batch.ref_logprobs, self.needs.reference,
             "kl.coefficient is above 0" if config.kl.coefficient else reads_it),
            ("engine_logprobs", batch.engine_logprobs, self.needs.engine,
             "off_policy compares it with old_logprobs" if self.off_policy.needs.engine else reads_it),
            ("positive", batch.positive, self.needs.right, "positive_coefficient is above 0"),
        ):  # fmt: skip
            if needed and tensor is None:
                raise ValueError(f"{name}: expected a tensor because algorithm.{why}, found None")

    @torch.no_grad()
    def _sequence_terms(self, scores: Scores, batch: TokenBatch, reduce: Reduce) -> _SequenceTerms:
        own = self.objective.sequence_values(scores, batch) if self.objective.needs.whole_sequences else {}
        off_policy = self.off_policy.sequence_values(scores, batch)
        totals = _sums_per_sequence([*own.values(), *off_policy.values()], batch, reduce, scores.logprobs.dtype)
        sums = dict(zip(own, totals[: len(own)], strict=True))
        corrections = self.off_policy.correct(scores, batch, dict(zip(off_policy, totals[len(own) :], strict=True)))
        return _SequenceTerms(sums, corrections)

    def _losses(self, scores: Scores, batch: TokenBatch, terms: _SequenceTerms) -> Tensor:
        """[tokens], elementwise over any slice of tokens once `terms` are known."""
        config = self.config
        losses = self.objective.token_losses(scores, batch, terms.sums)
        if losses.shape != scores.logprobs.shape:
            raise ValueError(
                f"algorithm.objective {config.objective}: expected one loss per token "
                f"{tuple(scores.logprobs.shape)}, found {tuple(losses.shape)}"
            )
        if terms.corrections.weights is not None:
            losses = losses * terms.corrections.weights
        if config.kl.coefficient > 0:
            assert batch.ref_logprobs is not None
            kl = kl_estimate(scores.logprobs, batch.ref_logprobs, config.kl.estimator)
            losses = losses + config.kl.coefficient * kl
        if config.entropy_coefficient > 0:
            assert scores.entropy is not None
            losses = losses - config.entropy_coefficient * scores.entropy
        return losses

    def _metrics(
        self, scores: Scores, batch: TokenBatch, losses: Tensor, terms: _SequenceTerms
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        old, logprobs = batch.old_logprobs, scores.logprobs
        of_objective = self.objective.metrics(scores, batch, terms.sums)
        values = {
            "tokens": batch.mask,
            "nonfinite_tokens": ~self._finite(scores, batch, losses),
            "approx_kl": kl_estimate(old, logprobs, "k3"),
        }
        peaks: dict[str, Tensor] = {}
        if scores.entropy is not None:
            values["entropy"] = scores.entropy
        if batch.ref_logprobs is not None:
            values["reference_kl"] = kl_estimate(logprobs, batch.ref_logprobs, self.config.kl.estimator)
        if batch.positive is not None:
            values["positive_loss"] = -batch.positive * logprobs
            values["positive_share"] = batch.positive > 0
        proximal = batch.proximal_logprobs(scores)
        if batch.engine_logprobs is not None and proximal is not None:
            peaks["mismatch_max"] = values["mismatch_mean"] = (proximal - batch.engine_logprobs).abs()
            values["mismatch_kl"] = kl_estimate(batch.engine_logprobs, proximal, "k3")
        values |= terms.corrections.means
        self._check_names(of_objective, values | peaks)
        values, peaks = values | of_objective.means, peaks | of_objective.maxima
        # fp64 because a fp32 count stops being exact at 16.7 million tokens, and a batch has more.
        active = {name: torch.where(batch.mask, value, 0).double() for name, value in (values | peaks).items()}
        return {name: active[name].sum() for name in values}, {name: _largest(active[name]) for name in peaks}

    def _check_names(self, metrics: TokenMetrics, shared: dict[str, Tensor]) -> None:
        """A step takes the maximum of names in `_max` and the mean of others, so the names must say which."""
        wrong = [n for n in metrics.maxima if not n.endswith("_max")] + [n for n in metrics.means if n.endswith("_max")]
        wrong += [n for n in metrics.maxima | metrics.means if n in shared]
        if wrong:
            raise ValueError(
                f"algorithm.objective {self.config.objective}: metrics {', '.join(wrong)}: expected names in _max for "
                "maxima and for nothing else, and no name that the loss itself reports"
            )

    def _finite(self, scores: Scores, batch: TokenBatch, losses: Tensor) -> Tensor:
        """bool [tokens]: everything the loss reads is finite. The loss alone would not show it: clamps hide ±inf."""
        read = [scores.logprobs, batch.old_logprobs, batch.advantages, batch.weights, losses]
        needs = self.needs
        extras = ((needs.entropy, scores.entropy), (needs.reference, batch.ref_logprobs))
        for needed, tensor in (*extras, (needs.engine, batch.engine_logprobs)):
            if needed and tensor is not None:
                read.append(tensor)
        return torch.stack([tensor.isfinite() for tensor in read]).all(dim=0)


@dataclass(slots=True)
class _SequenceTerms:
    """What the token losses need from whole sequences, given to each of their tokens."""

    sums: dict[str, Tensor]  # the objective's
    corrections: Corrections


def _sums_per_sequence(values: list[Tensor], batch: TokenBatch, reduce: Reduce, dtype: torch.dtype) -> list[Tensor]:
    """Sums each [tokens] tensor over the active tokens of every whole sequence, on all ranks; every token gets its
    sequence's sum.

    One call of `reduce` for all of them. In fp64, so that the order of addition, which differs between layouts and
    between runs on a GPU, is lost when the result is rounded back.
    """
    if not values:
        return []
    stacked = torch.stack([blank(value.double(), batch.mask) for value in values])
    totals = stacked.new_zeros(len(values), batch.sequences).index_add_(1, batch.sequence_ids, stacked)
    return list(reduce(totals)[:, batch.sequence_ids].to(dtype))


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())


def _kept(batch: TokenBatch, terms: _SequenceTerms) -> Tensor:
    """bool [tokens]: neither masked nor removed by a correction."""
    masked = terms.corrections.masked
    return batch.mask if masked is None else batch.mask & ~masked


def _weighted(scores: Scores, batch: TokenBatch, terms: _SequenceTerms, losses: Tensor) -> Tensor:
    """[tokens], 0 where they are masked or removed: an objective may be NaN there. With the positive-example loss."""
    kept = _kept(batch, terms)
    weighted = batch.weights * blank(losses, kept)
    return weighted if batch.positive is None else weighted - batch.positive * blank(scores.logprobs, kept)
