"""The gated delta rule on packed sequences: chunk by chunk it gives what the definition gives token by token, and no
state or convolution window crosses a sequence boundary."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dapo.policy.model import delta_rule
from megatron_dapo.policy.model.delta_rule import CHUNK, Chunks, causal_convolution, gated_delta_rule

LENGTHS = (1, 150, CHUNK, 3, 0, 200, CHUNK + 1)  # shorter than the window, exactly a chunk, several chunks, none
KEY_HEADS, VALUE_HEADS, DK, DV = 2, 4, 6, 5
CHUNKS = Chunks.of(LENGTHS, torch.device("cpu"))


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    t = sum(LENGTHS)

    def normal(*size):
        return torch.randn(size, generator=generator).requires_grad_()

    decay = -torch.rand(t, VALUE_HEADS, generator=generator) * 3
    strength = torch.rand(t, VALUE_HEADS, generator=generator)
    shapes = (t, KEY_HEADS, DK), (t, KEY_HEADS, DK), (t, VALUE_HEADS, DV)
    return [*(normal(*s) for s in shapes), decay.requires_grad_(), strength.requires_grad_()]


def by_definition(q, k, v, g, beta):
    """One sequence, in fp64: S ← exp(g)·S; S ← S + k·(β·(v − Sᵀk))ᵀ; o = Sᵀq/√dk, with unit q and k."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for x in (q, k))
    state, out = torch.zeros(VALUE_HEADS, DK, DV, dtype=torch.float64), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / DK**0.5)
    return torch.stack(out) if out else torch.zeros(0, VALUE_HEADS, DV, dtype=torch.float64)


def test_outputs_and_gradients_are_those_of_the_definition(inputs):
    found = gated_delta_rule(*inputs, CHUNKS)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    expected = torch.cat([by_definition(*part) for part in parts])
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_a_sequence_gives_the_same_result_alone(inputs):
    whole = gated_delta_rule(*inputs, CHUNKS).split(LENGTHS)
    for i, length in enumerate(LENGTHS):
        if length:
            alone = gated_delta_rule(*(x.split(LENGTHS)[i] for x in inputs), Chunks.of([length], torch.device("cpu")))
            assert torch.allclose(alone, whole[i], atol=1e-6)


def test_convolution_does_not_cross_a_boundary():
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(size, generator=generator) for size in ((sum(LENGTHS), 7), (7, 1, 4)))
    found = causal_convolution(x, weight, CHUNKS).split(LENGTHS)
    for part, ours in zip(x.split(LENGTHS), found, strict=True):
        padded = F.pad(part.T[None], (3, 0))
        theirs = F.silu(F.conv1d(padded, weight, groups=7))[0].T if len(part) else part
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("3.3.1", False), ("3.4.0+git1", True), ("3.7.0", True), ("3.7.1rc1", True), ("3.7.1", False), ("3.10.0", False)],
)
def test_versions_of_triton_with_wrong_gradients_on_hopper(monkeypatch, version, wrong):
    monkeypatch.setattr(delta_rule.importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(delta_rule.importlib.util, "find_spec", lambda _: None)
    assert delta_rule._triton_is_wrong_on_hopper() == wrong
