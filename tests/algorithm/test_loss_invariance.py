"""Sums and gradients do not depend on how the same sequences are ordered, packed, split or shared between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Inputs, Sequence, pack, poison, policy_loss

from megatron_dapo.algorithm import LossOutputs
from megatron_dapo.config.algorithm import AlgorithmConfig

MASKED = Sequence([1.5, 0.2, 1.0], 2.0, active=[False] * 3)


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    """Two to five sequences of unequal length, ratios on both sides of every bound, and one fully masked."""
    ratio = st.floats(0.05, 15)
    lengths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5, unique=True))
    made = []
    for n in lengths:
        ratios = {name: draw(st.lists(ratio, min_size=n, max_size=n)) for name in ("ratios", "engine_ratios")}
        active = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        ref, entropy = (draw(st.lists(st.floats(0.1, 3), min_size=n, max_size=n)) for _ in range(2))
        made.append(
            Sequence(**ratios, advantage=draw(st.floats(-3, 3)), active=active, ref_ratios=ref, entropy=entropy)
        )
    return [*made, MASKED]


configs = st.builds(
    AlgorithmConfig,
    objective=st.sampled_from(["dapo", "gspo", "cispo"]),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    entropy_coefficient=st.just(0.01),
    kl=st.fixed_dictionaries(
        {"coefficient": st.sampled_from([0.0, 0.1]), "estimator": st.sampled_from(["k1", "k2", "k3"])}
    ),
    off_policy=st.fixed_dictionaries(
        {"importance_weight": st.sampled_from(["off", "token", "sequence"])},
        optional={
            "token_mask": st.just([0.37, 2.3]),
            "geometric_mask": st.just([0.61, 1.7]),
            "product_mask": st.just([0.03, 11.0]),
            "opsm_delta": st.just(0.13),
        },
    ),
)
quick = settings(max_examples=40)


class Total:
    """The totals over all parts; gradients by the token's index in the whole batch."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}
        self.gradients: dict[int, tuple[float, float]] = {}

    def add(self, inputs: Inputs, outputs: LossOutputs, tokens: list[int]) -> None:
        outputs.loss_sum.backward()
        sums = outputs.sums | {"loss_sum": outputs.loss_sum.detach(), "denominator": outputs.denominator}
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        for name, value in outputs.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)
        pairs = zip(inputs.logprobs.grad.tolist(), inputs.entropy.grad.tolist(), strict=True)
        self.gradients |= dict(zip(tokens, pairs, strict=True))

    def assert_same(self, other: Total) -> None:
        assert self.sums["denominator"] == other.sums["denominator"]
        for mine, theirs in ((self.sums, other.sums), (self.maxima, other.maxima)):
            assert {k: v.item() for k, v in mine.items()} == pytest.approx({k: v.item() for k, v in theirs.items()})
        assert self.gradients.keys() == other.gradients.keys()
        for token, pair in self.gradients.items():
            assert pair == pytest.approx(other.gradients[token], rel=1e-6, abs=1e-9)


def whole(batch: list[Sequence], config: AlgorithmConfig) -> Total:
    total, inputs = Total(), pack(batch, config)
    total.add(inputs, policy_loss(inputs.scores, inputs.batch, config), list(range(len(inputs.mask))))
    return total


def token_indices(batch: list[Sequence]) -> list[list[int]]:
    """For each sequence, the indices of its tokens in the whole batch."""
    found, at = [], 0
    for sequence in batch:
        found.append(list(range(at, at + len(sequence.ratios))))
        at += len(sequence.ratios)
    return found


def take(inputs: Inputs, tokens: list[int]) -> Inputs:
    """These tokens of the packed batch, as fresh leaves."""
    index = torch.tensor(tokens, dtype=torch.int64)
    batch = replace(inputs.batch, **{name: tensor[index] for name, tensor in inputs.batch.tensors.items()})
    return Inputs(*(leaf.detach()[index].requires_grad_() for leaf in inputs.scores), batch)


@quick
@given(sequences(), configs, st.randoms(use_true_random=False))
def test_order_and_micro_batches_of_sequences(batch, config, random):
    """Sequences shuffled and split into two micro-batches; each computes its own weights, as separate packing does."""
    order = random.sample(range(len(batch)), len(batch))
    cut, indices, total = random.randint(1, len(batch) - 1), token_indices(batch), Total()
    for part in (order[:cut], order[cut:]):
        inputs = poison(pack([batch[i] for i in part], config))
        total.add(
            inputs, policy_loss(inputs.scores, inputs.batch, config), [token for i in part for token in indices[i]]
        )
    total.assert_same(whole(batch, config))


@quick
@given(sequences(), configs, st.randoms(use_true_random=False))
def test_packing_order_of_tokens(batch, config, random):
    """Any interleaving of the tokens, as context-parallel slicing produces, with weights computed before."""
    inputs = pack(batch, config)
    order = random.sample(range(len(inputs.mask)), len(inputs.mask))
    shuffled, total = take(inputs, order), Total()
    total.add(shuffled, policy_loss(shuffled.scores, shuffled.batch, config), order)
    total.assert_same(whole(batch, config))


@quick
@given(sequences(), configs, st.randoms(use_true_random=False))
def test_sequences_shared_between_two_ranks(batch, config, random):
    """Every token is on one of two ranks, one of which may be empty; reduce adds the ranks' tensors."""
    inputs = pack(batch, config)
    side = [random.random() < random.choice([0, 0.5, 1]) for _ in inputs.mask]
    shares = [[t for t, right in enumerate(side) if right == rank] for rank in (False, True)]

    contributions: list[list[torch.Tensor]] = [[], []]
    for rank, share in enumerate(shares):
        part = take(inputs, share)
        policy_loss(part.scores, part.batch, config, lambda t, mine=contributions[rank]: mine.append(t.clone()) or t)
    assert len(contributions[0]) == len(contributions[1]) <= 1

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return contributions[0][0] + contributions[1][0]

    total = Total()
    for share in shares:
        part = take(inputs, share)
        total.add(part, policy_loss(part.scores, part.batch, config, all_reduce), share)
    total.assert_same(whole(batch, config))


def test_a_mean_per_micro_batch_differs():
    """One token with loss 1 beside nine with loss 0: globally 1/10; averaged per micro-batch (1 + 0)/2."""
    config = AlgorithmConfig()
    parts = [[Sequence([1.0], -1.0), MASKED], [Sequence([1.0] * 9, 0.0), MASKED]]
    packed = [pack(part, config) for part in parts]
    outputs = [policy_loss(part.scores, part.batch, config) for part in packed]
    assert sum(o.loss_sum.item() for o in outputs) / sum(o.denominator.item() for o in outputs) == pytest.approx(0.1)
    assert [o.denominator.item() for o in outputs] == [1, 9]
