"""`megatron-dapo selfcheck objective`: good objectives pass, and of each bad one the rule that it breaks is named."""

import logging
import re
import sys
import types

import pytest
import torch

from megatron_dapo.algorithm import Needs, Objective, TokenMetrics
from megatron_dapo.cli import main


class Good(Objective):
    """REINFORCE with a scale; the bad ones differ in one thing."""

    default_options = {"scale": 1.0}  # noqa: RUF012

    def token_losses(self, scores, batch, sums):
        return -batch.advantages * scores.logprobs * self.options["scale"]


def with_losses(function, needs=None):
    """`function(losses, scores, batch, sums)` makes other losses of good ones."""

    class Changed(Good):
        def token_losses(self, scores, batch, sums):
            return function(super().token_losses(scores, batch, sums), scores, batch, sums)

    Changed.needs = needs or Needs()
    return Changed


def with_metrics(function):
    class Measured(Good):
        def metrics(self, scores, batch, sums):
            return TokenMetrics(function(scores, batch))

    return Measured


class SharedMean(Good):
    """Its value per token is a mean over the tokens that this rank has."""

    needs = Needs(whole_sequences=True)

    def sequence_values(self, scores, batch):
        ids = batch.sequence_ids
        ones, total = (
            torch.zeros(batch.sequences).double().index_add(0, ids, v) for v in (batch.mask.double(), scores.logprobs)
        )
        return {"mean": total[ids] / ones[ids].clamp_min(1) ** 2}

    def token_losses(self, scores, batch, sums):
        return super().token_losses(scores, batch, sums) * sums["mean"]


class Counting(Good):
    calls = 0

    def token_losses(self, scores, batch, sums):
        Counting.calls += 1
        return super().token_losses(scores, batch, sums) * Counting.calls


def edited(tensor):
    return lambda losses, scores, batch, sums: (tensor(scores, batch).mul_(2), losses)[1]


BROKEN = {
    "mean of the micro-batch": (lambda x, s, b, _: x - x.mean(), "a token's loss must not depend on padding"),
    "active tokens of the micro-batch": (lambda x, s, b, _: x / b.mask.sum(), "other sequences of its micro-batch"),
    "its own mean over sequences": (lambda x, s, b, _: x * s.logprobs.sum().detach(), "other sequences of its micro-b"),
    "gradient of a mean": (
        lambda x, s, b, _: x + (s.logprobs.sum() - s.logprobs.sum().detach()), r"its gradient is .* instead of"),
    "number of sequences": (lambda x, s, b, _: x / b.sequences, "numbering of sequences"),
    "number of its sequence": (lambda x, s, b, _: x * b.sequence_ids, "numbering of sequences"),
    "counts": (lambda x, s, b, _: x / b.counts.sum(), "weights and counts"),
    "weights": (lambda x, s, b, _: x * b.weights, "weights and counts"),
    "position": (lambda x, s, b, _: x * torch.arange(len(x)), "the order in which tokens are packed"),
    "padding": (lambda x, s, b, _: x * len(x), "padding and masked tokens"),
    "previous token": (lambda x, s, b, _: x + x.roll(1), "the order in which tokens are packed"),
    "random": (lambda x, s, b, _: x * torch.rand(len(x)), "asked again"),
    "no gradient": (lambda x, s, b, _: x.detach(), "must be differentiable in scores, but has no gradient"),
    "one number": (lambda x, s, b, _: x.sum(), r"one loss per token, torch.bool \[22\]: torch.float64 \[\]"),
    "a float": (lambda x, s, b, _: 1.0, "one loss per token, .*: a float"),
    "less precise": (lambda x, s, b, _: x.bfloat16(), "must keep the type of the log-probs, torch.bfloat16"),
    "changes advantages": (edited(lambda s, b: b.advantages), "changes advantages in place"),
    "changes log-probs": (edited(lambda s, b: s.logprobs.detach()), "changes logprobs in place"),
    "NaN at masked": (lambda x, s, b, _: x / s.logprobs.abs(), "finite at masked tokens, where every tensor holds 0"),
    "NaN at active": (lambda x, s, b, _: x + (b.advantages < 0).double().log(), "finite at active tokens"),
    "undeclared reference": (lambda x, s, b, _: x + b.ref_logprobs, r"reads batch.ref_logprobs, .* Needs\(reference"),
    "undeclared entropy": (lambda x, s, b, _: x + s.entropy, r"reads scores.entropy, .* Needs\(entropy=True\)"),
    "undeclared sums": (lambda x, s, b, sums: x + sums["length"], r"reads sums\['length'\], .*whole_sequences"),
    "one size of micro-batch": (lambda x, s, b, _: x + torch.zeros(22), "raised RuntimeError at .*: The size of"),
    "raises": (lambda x, s, b, _: x + 1 // 0, "raised ZeroDivisionError"),
    "no tokens": (lambda x, s, b, _: x + 0 * x.detach().max(), "micro-batch without tokens.* raised"),
    "item": (lambda x, s, b, _: x + 0 * s.logprobs.new_zeros(1).sum().item(), "no method may read a value on the host"),
    "if": (lambda x, s, b, _: x if (b.advantages == b.advantages).all() else -x, "no method may read a value on the h"),
    "boolean index": (lambda x, s, b, _: x + 0 * x[b.mask].sum(), "no method may read a value on the host"),
    "tensor on the host": (lambda x, s, b, _: x + torch.zeros(len(x)), "or mix devices"),
}  # fmt: skip


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs the command for a class; returns its exit code and what it printed."""
    module = types.ModuleType("own_objectives")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(objective, *words):
        module.Mine = objective
        code = main(["selfcheck", "objective", "python:own_objectives.Mine", *words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.parametrize("name", BROKEN)
def test_the_rule_that_is_broken_is_named_in_one_line(check, name):
    function, rule = BROKEN[name]
    code, printed = check(with_losses(function))
    assert code == 1
    assert len(printed.splitlines()) == 1
    assert re.search(rule, printed), printed


@pytest.mark.parametrize(
    ("objective", "rule"),
    [
        (SharedMean, "sequence_values must be a value of each token alone"),
        (Counting, "asked again"),
        (with_metrics(lambda s, b: {"gap": s.logprobs - s.logprobs.mean()}), "metric gap: a token's value must not"),
        (with_metrics(lambda s, b: {"gap": s.logprobs.mean()}), "metric gap must have one value per token"),
        (with_metrics(lambda s, b: {"gap_max": s.logprobs}), "expected names in _max for maxima"),
        (with_metrics(lambda s, b: {f"gap{len(b.mask) > 0}": s.logprobs}), "same names.*gapFalse, gapTrue"),
    ],
)
def test_sums_state_and_metrics(check, objective, rule):
    code, printed = check(objective)
    assert code == 1 and re.search(rule, printed), printed


@pytest.mark.parametrize(("made", "code"), [(True, 1), (False, 2)])
def test_an_error_of_its_own_is_one_message_and_verbose_adds_the_traceback(check, made, code, caplog, monkeypatch):
    class Raises(Good):
        def __init__(self, config):
            super().__init__(config)
            self.margin = None if made else 1 // 0

        def token_losses(self, scores, batch, sums):
            return scores.logprobs * (1 // 0)

    monkeypatch.setattr(logging.getLogger("megatron_dapo"), "level", logging.NOTSET)
    found, printed = check(Raises)
    assert found == code and not caplog.records
    assert re.fullmatch(
        r".*python:own_objectives\.Mine.* raised ZeroDivisionError at test_obj.*\.py:\d+: .*\n", printed
    )
    assert check(Raises, "-v")[0] == code
    assert "return scores.logprobs * (1 // 0)" in caplog.text if made else "else 1 // 0" in caplog.text


def test_a_good_one_passes_and_takes_its_options(check):
    code, printed = check(Good, "algorithm.objective_options.scale=2.0")
    assert code == 0 and "ok, " in printed
    reference = with_losses(lambda x, s, b, _: x + b.ref_logprobs, Needs(reference=True))
    assert check(reference)[0] == check(Good, "algorithm.kl.coefficient=0.1")[0] == 0
    code, printed = check(Good, "algorithm.objective_options.skale=2.0")
    assert code == 2 and "has no option 'skale'" in printed


@pytest.mark.parametrize(
    "name", ["dapo", "gspo", "cispo", *(f"python:examples.own_objective.{n}" for n in ("gmpo.GMPO", "sapo.SAPO"))]
)
def test_ours_keep_the_rules(name, capsys):
    assert main(["selfcheck", "objective", name]) == 0
    assert "ok, " in capsys.readouterr().out
