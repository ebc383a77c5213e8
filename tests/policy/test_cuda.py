"""The same updates on CUDA and on the CPU. These tests run where there is an NVIDIA GPU."""

import os

import pytest

from megatron_dapo.policy.ranks import run_ranks
from megatron_dapo.policy.selfcheck import LayoutSpec, compare, trace_updates
from megatron_dapo.policy.visible import gpu_count

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="needs an NVIDIA GPU; this machine has none")
SINGLE = LayoutSpec.parse("single")


def without_gpu(place, model):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked rank that has not touched CUDA yet
    return trace_updates(place, SINGLE, 3, model)


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_cuda_and_cpu_give_the_same_update(model):
    on_gpu = run_ranks(1, trace_updates, SINGLE, 3, model)[0]
    on_cpu = run_ranks(1, without_gpu, model)[0]
    difference = compare(on_gpu, on_cpu)
    assert difference.within(1e-4), difference


CASES = [
    (case, dtype, vocab)
    for case in ("ordinary", "tiny", "negative")
    for dtype in ("float32", "bfloat16")
    for vocab in (4096, 5003, 12345)
]


@pytest.fixture(scope="module")
def heads():
    """All cases in one process: starting CUDA is what takes time."""
    return dict(zip(CASES, run_ranks(1, heads_on_cuda)[0], strict=True))


def heads_on_cuda(place):
    import torch

    from megatron_dapo.config.policy import PolicyConfig
    from megatron_dapo.policy.runtime import initialize

    runtime = initialize(PolicyConfig(timeout_seconds=60), rendezvous=place)
    return [head_on_cuda(runtime, case, getattr(torch, dtype), vocab) for case, dtype, vocab in CASES]


def head_on_cuda(runtime, case, dtype, vocab):
    """Ours in one pass through the Triton kernels, and float64 on the same inputs; relative differences."""
    import torch

    from megatron_dapo.policy.head import HeadRequest, one_pass

    tokens, hidden = 301, 128
    g = torch.Generator().manual_seed(5)
    h, w = torch.randn(tokens, hidden, generator=g), torch.randn(vocab, hidden, generator=g) / 6
    if case == "tiny":
        w *= 1e-3
    elif case == "negative":
        h[:, 0], w[:, 0] = 6.0, -5.0
    targets = torch.randint(vocab - 3, (tokens,), generator=g)
    a, b = torch.linspace(-1, 2, tokens), torch.linspace(0.5, -0.5, tokens)
    exact_h, exact_w = (x.to(dtype).double().cuda().requires_grad_() for x in (h, w))
    logp = torch.log_softmax((exact_h @ exact_w.t())[:, : vocab - 3] / 0.8, -1)  # the last three columns are padding
    picked = logp.gather(1, targets.cuda()[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    ((picked * a.cuda()).sum() + (entropy * b.cuda()).sum()).backward()
    ours_h, ours_w = (x.to(dtype).cuda().requires_grad_() for x in (h, w))
    found = torch.zeros(2, tokens, device="cuda")

    def loss(chunk, lp, ent):
        found[:, chunk] = torch.stack([lp, ent]).detach()
        return (lp * a.cuda()[chunk]).sum() + (ent * b.cuda()[chunk]).sum()

    request = HeadRequest(targets.cuda(), targets.cuda(), vocab - 3, 0.8, 100, loss)
    one_pass(ours_h, ours_w, request, runtime.groups.tp).backward()

    def relative(x, y):
        return float((x.double() - y).norm() / y.norm())

    largest = float((exact_h @ exact_w.t()).abs().max())
    return (
        largest,
        float((found[0].double() - picked).abs().max()),
        float((found[1].double() - entropy).abs().max()),
        relative(ours_h.grad, exact_h.grad),
        relative(ours_w.grad, exact_w.grad),
    )


@pytest.mark.parametrize(("case", "dtype", "vocab"), CASES)
def test_triton_head_against_float64(case, dtype, vocab, heads):
    largest, logp, entropy, *gradients = heads[case, dtype, vocab]
    # Logits are kept in the model's precision: bf16 rounds one of size x by up to x / 256.
    rounding = 1e-4 if dtype == "float32" else 1.5 * largest / 256 / 0.8
    assert logp <= rounding and entropy <= rounding
    assert case == "negative" or dtype == "float32" or logp <= 2e-2
    assert max(gradients) <= (1e-5 if dtype == "float32" else 1e-2)


def packed_attention(place, one_kernel):
    """Output and gradients of CoreAttention over packed bf16 sequences."""
    import torch

    from megatron_dapo.config.policy import PolicyConfig
    from megatron_dapo.policy import varlen
    from megatron_dapo.policy.local_spec import CoreAttention
    from megatron_dapo.policy.packing import _packed_params
    from megatron_dapo.policy.runtime import initialize

    runtime = initialize(PolicyConfig(timeout_seconds=60), rendezvous=place)
    if not one_kernel:
        varlen.can_attend = lambda query: False
    config = type("C", (), {"kv_channels": 64, "init_method": None})()
    attention = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(attention)
    attention.cp_group, attention.scale, attention.config = runtime.groups.cp, 0.125, config
    attention.rotary_base = 1e4
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(700, n, 64, device="cuda", generator=g).bfloat16().requires_grad_() for n in (8, 2, 2))
    out = attention(q, k, v, packed_seq_params=_packed_params([300, 7, 393], torch.device("cuda")))
    (out.float() * torch.linspace(-1, 1, out.shape[-1], device="cuda")).sum().backward()
    return [x.float().cpu() for x in (out.detach(), q.grad, k.grad, v.grad)]


def test_one_kernel_for_packed_sequences_gives_the_same_attention():
    import torch
    from torch.nn.attention import varlen  # noqa: F401  (the test is about this torch having it)

    for ours, reference in zip(
        run_ranks(1, packed_attention, True)[0], run_ranks(1, packed_attention, False)[0], strict=True
    ):
        assert (ours - reference).norm() <= 1e-2 * reference.norm()
        assert torch.isfinite(ours).all()


def rotated(place, fused):
    """Rotated heads and their gradient, from a strided slice as Megatron's attention makes it."""
    import torch

    from megatron_dapo.policy import rotary

    if not fused:
        rotary.has_triton = lambda: False
    g = torch.Generator("cuda").manual_seed(0)
    table = rotary.RotaryTable.of(torch.arange(700, device="cuda") % 300, 96, 1e4)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(700, 7, 160, device="cuda", generator=g).to(dtype).requires_grad_()
        out = rotary.rotate(whole[..., 32:128], table)
        (out.float() * torch.linspace(-1, 1, 96, device="cuda")).sum().backward()
        results.append((out.detach().float().cpu(), whole.grad.float().cpu()))
    return results


def test_the_rotary_kernel_is_the_torch_rotation():
    for ours, reference, tolerance in zip(
        run_ranks(1, rotated, True)[0], run_ranks(1, rotated, False)[0], (1e-6, 1e-2), strict=True
    ):
        for mine, theirs in zip(ours, reference, strict=True):
            assert theirs.abs().max() > 0.5
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
