"""`megatron-dapo selfcheck objective NAME`: does an objective keep the rules that the loss relies on?

The loss of a token depends on that token and on declared sums over its sequence, and on nothing else: then loss and
gradient are the same for every micro-batch, packing and layout. The objective is asked about the same random tokens in
other company (`_Check.layouts`): losses, gradients and metrics must stay. The first rule that does not hold is named,
in one line. In fp64 and without a model, so it takes a second.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_dapo.algorithm import Needs, Objective, PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.algorithm.objective import Sums, blank
from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.plugins import in_one_line

LENGTHS = (5, 1, 7, 3, 6)
TOLERANCE = 1e-9
LONGEST = 240  # characters of an error that are shown: torch explains at length
# What `Needs` declares, and where it is read.
DECLARED = {"entropy": "scores.entropy", "reference": "batch.ref_logprobs", "engine": "batch.engine_logprobs"}


class BrokenRule(UserError):
    """The objective does not keep the contract; the message names the rule."""


def run_objective(name: str, settings: Sequence[str] = ()) -> int:
    """The command: prints one line; returns 0 when every rule holds, else 1."""
    started = time.monotonic()
    loss = PolicyLoss(load_config(None, [f"algorithm.objective={name}", *settings]).algorithm)
    try:
        rules = check_objective(loss)
    except BrokenRule as broken:
        logging.getLogger(__name__).debug("where it breaks a rule:", exc_info=True)
        print(f"{name} breaks a rule: {broken}", file=sys.stderr)
        return 1
    print(f"{name}: ok, {rules} rules hold ({time.monotonic() - started:.1f} s)")
    return 0


def check_objective(loss: PolicyLoss) -> int:
    """Raises BrokenRule for the first rule that does not hold; returns the number of rules."""
    check = _Check(loss)
    rules = [
        check.needs, check.results, check.gradient, check.unchanged_inputs, check.finite, check.layouts, check.ranks,
        check.no_tokens, check.no_host,
    ]  # fmt: skip
    for rule in rules:
        try:
            rule()
        except Exception as error:
            _raised("it ", error, loss.objective)
    return len(rules) - 1 + len({variant.rule for variant in check.variants()})


@dataclass(slots=True)
class _Found:
    """Of each token. `gradients`: of the log-prob, and of the entropy."""

    losses: Tensor
    gradients: tuple[Tensor, Tensor]
    metrics: dict[str, Tensor]


@dataclass(slots=True)
class _Variant:
    """The same tokens in other company. `tokens`: their indices in the original."""

    rule: str
    tokens: Tensor
    scores: Scores
    batch: TokenBatch
    sums: Sums | None = None  # None: of these tokens
    with_metrics: bool = True


class _Check:
    def __init__(self, loss: PolicyLoss) -> None:
        self._loss = loss
        self._objective: Objective = loss.objective
        self._needs: Needs = loss.objective.needs
        self._scores, self._batch = _random_tokens(self._needs)
        self._probe = torch.rand(len(self._batch.mask), dtype=torch.float64, generator=_random()) + 0.5
        self._whole: _Found | None = None

    # ---- the rules ----

    def needs(self) -> None:
        """Only the declared tensors are given; then all, to tell an undeclared one from another error."""
        try:
            self._whole = self._ask(self._scores, self._batch)
        except Exception as error:
            for name, where in DECLARED.items():
                try:
                    self._ask(*_random_tokens(self._needs | Needs(**{name: True})))
                except Exception:
                    continue
                raise BrokenRule(f"it reads {where}, but `needs` does not declare Needs({name}=True)") from error
            if isinstance(error, KeyError) and not self._needs.whole_sequences:
                raise BrokenRule(f"it reads sums[{error}], but `needs` has no Needs(whole_sequences=True)") from error
            raise

    def results(self) -> None:
        if self._found.losses.dtype != torch.float64:
            raise BrokenRule(f"token_losses must keep the type of the log-probs, {_kind(self._found.losses)}")
        for name, value in self._found.metrics.items():
            if not isinstance(value, Tensor) or value.shape != self._batch.mask.shape:
                raise BrokenRule(f"metric {name} must have one value per token {_kind(self._probe)}: {_kind(value)}")
        self._loss(*_random_tokens(self._loss.needs))

    def gradient(self) -> None:
        if not any(gradient.any() for gradient in self._found.gradients):
            raise BrokenRule("token_losses must be differentiable in scores, but has no gradient")

    def unchanged_inputs(self) -> None:
        scores, batch = _each_of_both(self._scores, self._batch, torch.clone)
        sums = self._sums(scores, batch)
        tensors = {**batch.tensors, "logprobs": scores.logprobs, **{f"sums[{name!r}]": v for name, v in sums.items()}}
        before = {name: tensor._version for name, tensor in tensors.items()}
        self._objective.token_losses(scores, batch, sums)
        self._objective.sequence_values(scores, batch)
        self._objective.metrics(scores, batch, sums)
        for name, tensor in tensors.items():
            if tensor._version != before[name]:
                raise BrokenRule(f"it changes {name} in place, which others read after it")

    def finite(self) -> None:
        losses, mask = self._found.losses, self._batch.mask
        for chosen, where in ((mask, "at active tokens"), (~mask, "at masked tokens, where every tensor holds 0")):
            bad = int((chosen & ~losses.isfinite()).sum())
            if bad:
                raise BrokenRule(f"the loss must be finite {where}; it is NaN or infinite at {bad} of {chosen.sum()}")

    def layouts(self) -> None:
        for variant in self.variants():
            found = self._ask(variant.scores, variant.batch, variant.sums, self._probe[variant.tokens])
            self._compare(variant, found)
            for name, value in found.metrics.items() if variant.with_metrics else ():
                expected = self._found.metrics[name][variant.tokens].double()
                if _differing(value.double(), expected, variant.batch.mask) is not None:
                    raise BrokenRule(f"metric {name}: {variant.rule.replace('loss', 'value', 1)}")

    def variants(self) -> Iterator[_Variant]:
        scores, batch = self._scores, self._batch
        everything = torch.arange(len(batch.mask))
        sums = self._sums(scores, batch)
        yield _Variant("asked again, it must return the same (no random numbers, no state)", everything, scores, batch)
        other = replace(batch, weights=3 * batch.weights, counts=2 * batch.counts)
        rule = "a token's loss must not depend on weights and counts, which aggregation and all ranks' tokens decide"
        yield _Variant(rule, everything, scores, other)
        other = replace(batch, sequence_ids=batch.sequences - 1 - batch.sequence_ids, sequences=batch.sequences + 2)
        rule = "a token's loss must not depend on the numbering of sequences in its micro-batch"
        yield _Variant(rule, everything, scores, other)
        padded = torch.cat([everything, (~batch.mask).nonzero().flatten().repeat(3)])
        rule = "a token's loss must not depend on padding and masked tokens"
        yield self._some(rule, padded)
        rule = "a token's loss must not depend on the order in which tokens are packed"
        yield self._some(rule, torch.randperm(len(everything), generator=_random()))
        rule = "a token's loss must not depend on the other sequences of its micro-batch"
        for ids in ((0, 1), (2,), (3, 4)):
            yield self._some(rule, torch.isin(batch.sequence_ids, torch.tensor(ids)).nonzero().flatten())
        rule = (
            "a token's loss must not depend on other tokens but through `sums`: the head asks for any slice of tokens"
        )
        for part in (slice(0, 4), slice(4, 12), slice(12, 13), slice(13, None)):
            sliced = {name: total[part] for name, total in sums.items()}
            found = self._some(rule, everything[part])
            yield replace(found, sums=sliced, with_metrics=False)

    def ranks(self) -> None:
        """Context parallelism: two ranks share every sequence, and their sums are added."""
        if not self._needs.whole_sequences:
            return
        whole = torch.arange(len(self._batch.mask))
        halves = [self._some("", whole[rank::2]) for rank in (0, 1)]
        mine, theirs = (self._totals(half.scores, half.batch) for half in halves)
        total = {name: mine[name] + theirs[name] for name in mine}
        rule = "sequence_values must be a value of each token alone: ranks that share a sequence add them up"
        for half in halves:
            sums = {name: values[half.batch.sequence_ids] for name, values in total.items()}
            found = self._ask(half.scores, half.batch, sums, self._probe[half.tokens])
            self._compare(replace(half, rule=rule), found)

    def no_tokens(self) -> None:
        nothing = self._some("", torch.zeros(0, dtype=torch.int64))
        try:
            found = self._ask(nothing.scores, nothing.batch, probe=self._probe[:0])
        except Exception as error:
            _raised("a rank may have a micro-batch without tokens, for which it ", error, self._objective)
        names = ", ".join(sorted(found.metrics.keys() ^ self._found.metrics.keys()))
        if names:
            raise BrokenRule(f"metrics must always have the same names; without a token these differ: {names}")

    def no_host(self) -> None:
        """Meta tensors have no values."""
        scores, batch = _each_of_both(self._scores, self._batch, lambda tensor: tensor.to("meta"))
        try:
            sums = {name: total.to("meta") for name, total in self._sums(self._scores, self._batch).items()}
            self._objective.token_losses(scores, batch, sums)
            self._objective.sequence_values(scores, batch)
            self._objective.metrics(scores, batch, sums)
        except Exception as error:
            rule = (
                "no method may read a value on the host (.item(), `if` on a tensor, boolean indexing) or mix devices; "
            )
            _raised(rule + "with tensors that have no values it ", error, self._objective)

    # ---- asking ----

    @property
    def _found(self) -> _Found:
        assert self._whole is not None
        return self._whole

    def _ask(self, scores: Scores, batch: TokenBatch, sums: Sums | None = None, probe: Tensor | None = None) -> _Found:
        """As PolicyLoss does: zeros at masked positions, sums and metrics without gradient."""
        scores, batch = _each_of_both(scores, batch, torch.clone)
        leaves = [tensor.requires_grad_() for tensor in scores if tensor is not None]
        given = _each(scores, lambda tensor: blank(tensor, batch.mask))
        with torch.no_grad():
            sums = self._sums(given, batch) if sums is None else sums
        losses = self._objective.token_losses(given, batch, sums)
        if not isinstance(losses, Tensor) or losses.shape != batch.mask.shape:
            raise BrokenRule(f"token_losses must return one loss per token, {_kind(batch.mask)}: {_kind(losses)}")
        weighted = (blank(losses, batch.mask) * (self._probe if probe is None else probe)).sum()
        found = (
            torch.autograd.grad(weighted, leaves, allow_unused=True) if weighted.requires_grad else [None] * len(leaves)
        )
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
        with torch.no_grad():
            measured = self._objective.metrics(given, batch, sums)
        return _Found(losses.detach(), (filled[0], filled[-1]), measured.means | measured.maxima)

    def _totals(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        """[sequences]"""
        if not self._needs.whole_sequences:
            return {}
        values = self._objective.sequence_values(scores, batch)
        zeros = torch.zeros(batch.sequences, dtype=torch.float64)
        return {
            name: zeros.index_add(0, batch.sequence_ids, blank(value.double(), batch.mask))
            for name, value in values.items()
        }

    def _sums(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        return {name: total[batch.sequence_ids] for name, total in self._totals(scores, batch).items()}

    def _some(self, rule: str, tokens: Tensor) -> _Variant:
        return _Variant(rule, tokens, *_each_of_both(self._scores, self._batch, lambda tensor: tensor[tokens]))

    def _compare(self, variant: _Variant, found: _Found) -> None:
        whole, tokens = self._found, variant.tokens
        mask = variant.batch.mask
        for what, value, expected in (
            ("its loss", found.losses, whole.losses[tokens]),
            ("its gradient", found.gradients[0], whole.gradients[0][tokens]),
            ("its gradient by the entropy", found.gradients[1], whole.gradients[1][tokens]),
        ):
            worst = _differing(value, expected, mask)
            if worst is not None:
                where = f"token {int(tokens[worst])}: {what} is {value[worst]:.4g} instead of {expected[worst]:.4g}"
                raise BrokenRule(f"{variant.rule} ({where})")


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _random_tokens(needs: Needs) -> tuple[Scores, TokenBatch]:
    """Five sequences of unequal length, one of them masked, with both signs of Â and log-ratios between −2 and 2."""
    random = _random()

    def values(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(sum(LENGTHS), dtype=torch.float64, generator=random)

    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (values(0, 1) < 0.75) & (ids != len(LENGTHS) - 2)
    weights, counts = token_weights("seq-mean-token-mean", mask, ids, len(LENGTHS))
    old = values(-3, -0.1)
    scores = Scores(old + values(-2, 2), values(0.1, 2) if needs.entropy else None)
    advantages = torch.tensor([1.5, -0.7, -1.1, 0.4, 0.9], dtype=torch.float64)[ids]
    reference, engine = old + values(-1, 1), old + values(-0.5, 0.5)
    batch = TokenBatch(
        old_logprobs=old,
        advantages=advantages,
        mask=mask,
        weights=weights.double(),
        counts=counts,
        sequence_ids=ids,
        sequences=len(LENGTHS),
        ref_logprobs=reference if needs.reference else None,
        engine_logprobs=engine if needs.engine else None,
    )
    return _each(scores, lambda tensor: blank(tensor, mask)), batch.blanked()


def _each(scores: Scores, function: Callable[[Tensor], Tensor]) -> Scores:
    return Scores(function(scores.logprobs), None if scores.entropy is None else function(scores.entropy))


def _each_of_both(scores: Scores, batch: TokenBatch, function: Callable[[Tensor], Tensor]) -> tuple[Scores, TokenBatch]:
    tensors: dict[str, Any] = {name: function(tensor) for name, tensor in batch.tensors.items()}
    return _each(scores, function), replace(batch, **tensors)


def _differing(value: Tensor, expected: Tensor, mask: Tensor) -> int | None:
    """The active token that differs most, if one does."""
    gap = blank((value - expected).abs() / (1 + expected.abs()), mask).nan_to_num(torch.inf)
    return int(gap.argmax()) if gap.numel() and gap.max() > TOLERANCE else None


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _raised(where: str, error: Exception, objective: Objective) -> NoReturn:
    if isinstance(error, BrokenRule):
        raise error
    raise BrokenRule(f"{where}raised {in_one_line(error, type(objective))[:LONGEST]}") from error
