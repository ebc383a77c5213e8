"""The head against a float64 softmax: values and gradients, on inputs that have broken other kernels."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.head.fused import HeadRequest, one_pass, output_processor, two_pass
from megatron_dapo.policy.runtime import initialize

TOKENS, HIDDEN, VOCAB = 23, 16, 101

CASES = (
    "ordinary",
    "tiny logits",  # a padding column counted as logit 0 would show here
    "all negative",  # a running maximum that starts at 0 would show here
    "large",
)


def inputs(case):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) / 4
    if case == "tiny logits":
        weight = weight * 1e-4
    elif case == "all negative":
        hidden[:, 0], weight[:, 0] = 10.0, -3.0
    elif case == "large":
        weight = weight * 40
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets


def oracle(hidden, weight, targets, temperature):
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(h @ w.t() / temperature, -1)
    picked = logp.gather(1, targets[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = (picked * torch.linspace(-1, 2, TOKENS)).sum() + (entropy * torch.linspace(3, 1, TOKENS)).sum()
    loss.backward()
    return picked, entropy, h.grad, w.grad


def ours(place, case, temperature, chunk, dtype):
    world = place.world_size
    policy = PolicyConfig(tensor_parallel=world, micro_batch_tokens=6, timeout_seconds=30)
    runtime = initialize(policy, rendezvous=place)
    hidden, weight, targets = inputs(case)
    columns = -(-VOCAB // world)
    padded = torch.cat([weight, torch.full((columns * world - VOCAB, HIDDEN), 7.0)])  # padding that is not zero
    h = hidden.to(dtype).requires_grad_()
    w = padded[runtime.groups.tp.rank() * columns :][:columns].to(dtype).requires_grad_()
    request = HeadRequest(torch.arange(TOKENS), targets, VOCAB, temperature, chunk)
    logp, entropy = two_pass(h, w, request, runtime.groups.tp)
    loss = (logp * torch.linspace(-1, 2, TOKENS)).sum() + (entropy * torch.linspace(3, 1, TOKENS)).sum()
    loss.backward()
    return logp.detach(), entropy.detach(), h.grad, w.grad


def ours_in_one_pass(place, case, temperature, chunk, dtype, destination):
    """The same loss through the one-pass head; the weight's gradient returned, or added to a main_grad."""
    world = place.world_size
    policy = PolicyConfig(tensor_parallel=world, micro_batch_tokens=6, timeout_seconds=30)
    runtime = initialize(policy, rendezvous=place)
    hidden, weight, targets = inputs(case)
    columns = -(-VOCAB // world)
    padded = torch.cat([weight, torch.full((columns * world - VOCAB, HIDDEN), 7.0)])
    h = hidden.to(dtype).requires_grad_()
    w = padded[runtime.groups.tp.rank() * columns :][:columns].to(dtype).requires_grad_()
    w.main_grad = torch.full((columns, HIDDEN), 0.5)  # what an earlier micro-batch left there
    scores = torch.zeros(2, TOKENS)

    def loss(chunk, logp, entropy):
        scores[:, chunk] = torch.stack([logp, entropy]).detach()
        return (logp * torch.linspace(-1, 2, TOKENS)[chunk]).sum() + (
            entropy * torch.linspace(3, 1, TOKENS)[chunk]
        ).sum()

    request = HeadRequest(torch.arange(TOKENS), targets, VOCAB, temperature, chunk, loss, destination)
    one_pass(h, w, request, runtime.groups.tp).backward()
    if destination == "returned":
        return *scores, h.grad, w.grad
    assert getattr(w, "grad_added_to_main_grad", False) == (destination == "added")
    assert (w.grad is None) == (destination == "added-shared")
    return *scores, h.grad, w.main_grad - 0.5


def check(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("way", ["two passes", "returned", "added", "added-shared"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_against_float64(case, world, way):
    temperature = 0.8
    hidden, weight, targets = inputs(case)
    logp, entropy, grad_hidden, grad_weight = oracle(hidden, weight, targets, temperature)
    if way == "two passes":
        results = run_ranks(world, ours, case, temperature, 7, torch.float32)
    else:
        results = run_ranks(world, ours_in_one_pass, case, temperature, 7, torch.float32, way)
    for result in results:
        check(result[:2], (logp, entropy), 1e-5)
    shares = torch.stack([r[2] for r in results]).sum(0)  # each rank's columns give a share of d_hidden
    check((shares,), (grad_hidden,), 2e-5)
    whole = torch.cat([r[3] for r in results])
    check((whole[:VOCAB],), (grad_weight,), 2e-5)
    assert (whole[VOCAB:] == 0).all()  # padding columns take no part


def test_log_probs_are_never_positive_and_sum_to_one():
    logp, *_ = run_ranks(2, ours, "tiny logits", 1.0, 5, torch.float32)[0]
    assert (logp < 0).all()
    assert torch.allclose(logp, torch.full_like(logp, -torch.log(torch.tensor(float(VOCAB)))), atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 1000])
def test_the_chunk_size_changes_nothing(chunk):
    expected = run_ranks(1, ours, "ordinary", 1.0, 8, torch.float32)[0]
    found = run_ranks(1, ours, "ordinary", 1.0, chunk, torch.float32)[0]
    check(found, [x.double() for x in expected], 1e-6)


def test_bf16_inputs():
    hidden, weight, targets = (x.bfloat16().float() if x.is_floating_point() else x for x in inputs("ordinary"))
    expected = oracle(hidden, weight, targets, 1.0)
    found = run_ranks(2, ours, "ordinary", 1.0, 8, torch.bfloat16)
    assert (found[0][0].double() - expected[0]).abs().max() <= 2e-2
    shares = found[0][2].double() + found[1][2].double()
    assert (shares - expected[2]).norm() <= 1e-2 * expected[2].norm()


def test_no_tokens_at_all():
    result = run_ranks(2, nothing_scored)
    for logp, grad in result:
        assert logp.shape == (0,)
        assert (grad == 0).all()


def nothing_scored(place):
    runtime = initialize(PolicyConfig(tensor_parallel=2, timeout_seconds=30), rendezvous=place)
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    weight = torch.ones(51, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.long)
    logp, entropy = two_pass(hidden, weight, HeadRequest(none, none, VOCAB), runtime.groups.tp)
    (logp.sum() + entropy.sum()).backward()
    return logp.detach(), weight.grad


def in_a_plain_gpt_model(place, tied):
    """Megatron's own model with our head as its output processor, against the logits it gives without."""
    from megatron.core.models.gpt import GPTModel

    from megatron_dapo.policy.model.gpt import _block_spec, transformer_config
    from megatron_dapo.selfcheck.synthetic import synthetic_shape

    policy = PolicyConfig(tensor_parallel=2, precision="fp32", timeout_seconds=60)
    runtime = initialize(policy, rendezvous=place)
    shape = synthetic_shape("dense")
    config = transformer_config(shape, policy)
    model = GPTModel(
        config, _block_spec(config, None, 1e4), vocab_size=96, max_sequence_length=64, parallel_output=False,
        share_embeddings_and_output_weights=tied, position_embedding_type="none", pg_collection=runtime.groups,
    )  # fmt: skip
    tokens = torch.arange(16)[None] * 5 % 90
    where = torch.tensor([3, 8, 11])
    targets = tokens[0, where + 1]
    logits = model(tokens, torch.arange(16)[None], None)[0, where, :91].float()
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    request = HeadRequest(where, targets, vocab=91)
    found = model(
        tokens, torch.arange(16)[None], None, output_processor=output_processor, output_processor_context=request
    )
    return found[0].detach(), expected.detach()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_plugs_into_a_plain_gpt_model(tied):
    from megatron.core.models.gpt import GPTModel

    if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
        pytest.skip("this megatron-core's GPTModel takes no output_processor: it came with 0.19")
    for found, expected in run_ranks(2, in_a_plain_gpt_model, tied):
        assert found.std() > 0.01
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_output_processor_takes_the_tied_weight_or_the_layers_own():
    def processed(place):
        runtime = initialize(PolicyConfig(timeout_seconds=30), rendezvous=place)
        hidden, own, tied = torch.randn(5, 1, 8), torch.randn(7, 8), torch.randn(7, 8)
        layer = SimpleNamespace(weight=own, tp_group=runtime.groups.tp)
        request = HeadRequest(torch.tensor([1, 4]), torch.tensor([6, 0]), vocab=7)
        config = SimpleNamespace(sequence_parallel=False)
        given = {"hidden_states": hidden, "output_layer": layer, "context": request, "config": config, "labels": None}
        pairs = []
        for weight, used in ((None, own), (tied, tied)):
            logp = torch.log_softmax(hidden[[1, 4], 0] @ used.t(), -1)
            pairs.append((output_processor(output_weight=weight, **given)[0], logp[[0, 1], [6, 0]]))
        return pairs

    for found, expected in run_ranks(1, processed)[0]:
        torch.testing.assert_close(found, expected)
