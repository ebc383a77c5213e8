"""The same updates on CUDA and on the CPU. These tests need an NVIDIA GPU."""

import importlib.util
import os
import pickle
import subprocess
import sys

import pytest

from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.model.delta_rule import has_fla
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import Case, LayoutSpec
from megatron_dapo.selfcheck.trace import compare, trace_updates

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="needs an NVIDIA GPU; this machine has none")
SINGLE = LayoutSpec.parse("single")


def without_gpu(case, folder):
    """Its trace, from a new process that sees no GPU: this one has imported Megatron-Core with CUDA's libraries."""
    request, reply = folder / "cases.pickle", folder / "outcomes.pickle"
    request.write_bytes(pickle.dumps(({case.key: case}, 3)))
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.selfcheck.layouts", str(request), str(reply)]
    subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    outcome = pickle.loads(reply.read_bytes())[case.key]
    assert outcome.trace is not None, outcome.error
    return outcome.trace


@pytest.mark.parametrize("model", ["dense", "tied", "moe", "moe-shared", "hybrid"])
def test_cuda_and_cpu_give_the_same_update(model, tmp_path):
    on_gpu = run_ranks(1, trace_updates, Case(SINGLE, model), 3)[0]
    on_cpu = without_gpu(Case(SINGLE, model), tmp_path)
    # The kernels of flash-linear-attention multiply in tf32.
    kernels = model == "hybrid" and has_fla()
    difference = compare(on_gpu, on_cpu, tolerance=1e-2 if kernels else 1e-4)
    assert difference.ok, difference


CASES = [
    (case, dtype, vocab)
    for case in ("ordinary", "tiny", "negative")
    for dtype in ("float32", "bfloat16")
    for vocab in (4096, 5003, 12345)
]


@pytest.fixture(scope="module")
def heads():
    """All cases in one process, because starting CUDA takes seconds."""
    return dict(zip(CASES, run_ranks(1, heads_on_cuda)[0], strict=True))


def heads_on_cuda(rendezvous):
    import torch

    from megatron_dapo.config.policy import PolicyConfig
    from megatron_dapo.policy.megatron.runtime import initialize

    runtime = initialize(PolicyConfig(timeout_seconds=60), rendezvous=rendezvous)
    return [head_on_cuda(runtime.groups.tp, case, getattr(torch, dtype), vocab) for case, dtype, vocab in CASES]


def head_on_cuda(group, case, dtype, vocab):
    """Relative differences between our one-pass head with Triton kernels and float64, on the same inputs. Each rank of
    `group` holds its part of the vocabulary, the last one with padding."""
    import torch
    import torch.distributed as dist

    from megatron_dapo.policy.head.fused import HeadRequest, one_pass

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
    columns = -(-vocab // group.size())
    mine = slice(group.rank() * columns, min((group.rank() + 1) * columns, vocab))
    shard = torch.nn.functional.pad(w[mine], (0, 0, 0, columns - (mine.stop - mine.start)), value=9.0)
    ours_h, ours_w = (x.to(dtype).cuda().requires_grad_() for x in (h, shard))
    found = torch.zeros(2, tokens, device="cuda")

    def loss(chunk, lp, ent):
        found[:, chunk] = torch.stack([lp, ent]).detach()
        return (lp * a.cuda()[chunk]).sum() + (ent * b.cuda()[chunk]).sum()

    request = HeadRequest(targets.cuda(), targets.cuda(), vocab - 3, 0.8, 100, loss)
    one_pass(ours_h, ours_w, request, group).backward()
    if group.size() > 1:
        dist.all_reduce(ours_h.grad, group=group)

    def relative(x, y):
        return float((x.double() - y).norm() / y.norm())

    largest = float((exact_h @ exact_w.t()).abs().max())
    return (
        largest,
        float((found[0].double() - picked).abs().max()),
        float((found[1].double() - entropy).abs().max()),
        relative(ours_h.grad, exact_h.grad),
        relative(ours_w.grad[: mine.stop - mine.start], exact_w.grad[mine]),
    )


@pytest.mark.parametrize(("case", "dtype", "vocab"), CASES)
def test_triton_head_against_float64(case, dtype, vocab, heads):
    largest, logp, entropy, *gradients = heads[case, dtype, vocab]
    # Logits are kept in the model's precision: bf16 rounds one of size x by up to x / 256.
    rounding = 1e-4 if dtype == "float32" else 1.5 * largest / 256 / 0.8
    assert logp <= rounding and entropy <= rounding
    assert case == "negative" or dtype == "float32" or logp <= 2e-2
    assert max(gradients) <= (1e-5 if dtype == "float32" else 1e-2)


def heads_of_two_ranks(rendezvous):
    """Two ranks on one GPU: gloo allows it, NCCL does not."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=rendezvous.world_size)
    return [head_on_cuda(dist.group.WORLD, "ordinary", getattr(torch, t), 5003) for t in ("float32", "bfloat16")]


def test_the_triton_head_over_two_ranks_against_float64():
    for exact, rounded in run_ranks(2, heads_of_two_ranks):
        assert max(exact[1:3]) <= 1e-4 and max(exact[3:]) <= 1e-5
        rounding = 1.5 * rounded[0] / 256 / 0.8  # of the logits, as above
        assert rounded[1] <= 2e-2 and rounded[2] <= rounding and max(rounded[3:]) <= 1e-2


def waits_of_an_update(rendezvous, micro_batch_tokens):
    """Where the host waited for the device, and the number of micro-batches."""
    import warnings

    import torch

    from megatron_dapo.config import parse_config
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.policy.policy import Policy
    from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape

    config = parse_config(
        {
            "policy": {"micro_batch_tokens": micro_batch_tokens},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 32},
        }
    )
    shape = synthetic_shape("dense")
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(shape))
    batch = awkward_batch(shape, 0)
    policy.update(batch)  # compiles
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = policy.update(batch)
    waits = [str(w.filename) + ":" + str(w.lineno) for w in caught if "synchroniz" in str(w.message)]
    return waits, metrics["micro_batches"]


def test_the_host_does_not_wait_for_the_device_in_a_micro_batch():
    (few, one), (many, several) = (run_ranks(1, waits_of_an_update, tokens)[0] for tokens in (4096, 48))
    assert several >= one + 3
    assert len(many) == len(few), sorted(set(many))
    assert len([where for where in few if "megatron_dapo" in where]) <= 8, few  # once an update: norms, metrics


def packed_attention(rendezvous, one_kernel):
    """Output and gradients of CoreAttention over packed bf16 sequences."""
    import torch

    from megatron_dapo.config.policy import PolicyConfig
    from megatron_dapo.policy.batch import _packed_params
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.policy.model import local_spec as varlen
    from megatron_dapo.policy.model.local_spec import CoreAttention

    runtime = initialize(PolicyConfig(timeout_seconds=60), rendezvous=rendezvous)
    if not one_kernel:
        varlen.can_attend_packed = lambda query: False
    config = type("C", (), {"kv_channels": 64, "init_method": None})()
    attention = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(attention)
    attention.cp_group, attention.scale, attention.config = runtime.groups.cp, 0.125, config
    attention.rotary_base, attention.rotary_dim, attention.rope_scaling = 1e4, 64, None
    attention.exact = False
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


def rotated(rendezvous, fused):
    """Rotated heads and their gradient, from a strided slice as Megatron's attention makes it."""
    import torch

    from megatron_dapo.policy.model import local_spec

    if not fused:
        local_spec.has_triton = lambda: False
    g = torch.Generator("cuda").manual_seed(0)
    table = local_spec.RotaryTable.of(torch.arange(700, device="cuda") % 300, 96, 1e4)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(700, 7, 160, device="cuda", generator=g).to(dtype).requires_grad_()
        out = local_spec.rotate(whole[..., 32:128], table)
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


def scored(rendezvous, with_te):
    """Log-probs of long and short packed sequences by a model of Qwen's proportions, in bf16."""
    import numpy as np
    import torch

    from megatron_dapo.config import ModelShape, parse_config
    from megatron_dapo.policy.batch import TrainBatch
    from megatron_dapo.policy.megatron import options
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.policy.model import gpt
    from megatron_dapo.policy.policy import Policy
    from megatron_dapo.selfcheck.synthetic import random_hf_weights

    if not with_te:
        options.has_transformer_engine = gpt.has_transformer_engine = lambda: False
    shape = ModelShape(
        "qwen2", layers=4, hidden=1536, ffn_hidden=8960, heads=12, kv_heads=2, head_dim=128, vocab=8192,
        max_positions=32768, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True, qk_norm=False,
    )  # fmt: skip
    config = parse_config(
        {
            "policy": {"micro_batch_tokens": 8192},
            "rollout": {"max_prompt_tokens": 64, "max_response_tokens": 4000},
        }
    )
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    g = torch.Generator().manual_seed(0)
    policy.load_hf(
        {
            name: torch.ones_like(tensor) if "norm" in name else 0.02 * torch.randn(tensor.shape, generator=g)
            for name, tensor in random_hf_weights(shape).items()
        }
    )
    responses, prompts = np.array([700, 1, 3000, 513, 64, 1900, 33]), np.full(7, 64)
    batch = TrainBatch(
        tokens=np.random.default_rng(0).integers(0, shape.vocab, int((responses + prompts).sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        advantages=np.ones(7, np.float32),
        loss_mask=np.ones(int(responses.sum()), np.bool_),
    )
    return policy.log_probs(batch)[0]


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine, which is not installed"
)
def test_transformer_engine_and_torch_layers_agree():
    """To bf16's rounding; measured 0.016 in the mean and 0.086 at most (fp32 with TE's TF32: 0.0008 and 0.005)."""
    ours, theirs = (run_ranks(1, scored, with_te)[0] for with_te in (False, True))
    gap = abs(ours - theirs)
    assert 1e-4 < gap.mean() < 0.03 and gap.max() < 0.3


def resumable(rendezvous, distributed):
    from megatron_dapo.config import parse_config
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.policy.policy import Policy
    from megatron_dapo.selfcheck.synthetic import synthetic_shape

    config = parse_config(
        {
            "policy": {"micro_batch_tokens": 256, "distributed_optimizer": distributed},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 32},
        }
    )
    return Policy(config, synthetic_shape("dense"), initialize(config.policy, rendezvous=rendezvous))


def continued(policy):
    """Two more updates: their losses, all weights, and the whole optimizer state, on the host."""
    from megatron_dapo.policy.megatron.optimizer_state import inner_optimizers
    from megatron_dapo.selfcheck.synthetic import awkward_batch

    losses = [policy.update(awkward_batch(policy.shape, seed))["loss"] for seed in (3, 4)]
    tensors = [parameter.detach().cpu() for chunk in policy.model for parameter in chunk.parameters()]
    for inner in inner_optimizers(policy.optimizer):
        for group in inner.param_groups:
            tensors += [parameter.detach().cpu() for parameter in group["params"]]
            tensors += [state.cpu() for p in group["params"] for _, state in sorted(inner.state[p].items())]
    steps = {group.get("step") for inner in inner_optimizers(policy.optimizer) for group in inner.param_groups}
    return losses, tensors, steps


def save_and_continue(rendezvous, distributed, folder):
    from save_policy import save_policy

    from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights

    policy = resumable(rendezvous, distributed)
    policy.load_hf(random_hf_weights(policy.shape))
    for seed in range(3):
        policy.update(awkward_batch(policy.shape, seed))
    save_policy(policy, folder)
    return continued(policy)


def load_and_continue(rendezvous, distributed, folder):
    from megatron_dapo.checkpoints.policy_state import load_policy

    policy = resumable(rendezvous, distributed)
    load_policy(policy, folder)
    assert policy.updates == 3
    return continued(policy)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_a_loaded_policy_continues_bit_for_bit(distributed, tmp_path):
    """With the optimizer that Megatron picks here: Transformer Engine's, apex's or torch's."""
    import torch

    losses, tensors, steps = run_ranks(1, save_and_continue, distributed, tmp_path / "c")[0]
    found_losses, found, found_steps = run_ranks(1, load_and_continue, distributed, tmp_path / "c")[0]
    assert found_losses == losses and found_steps == steps
    assert len(found) == len(tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, tensors, strict=True))
