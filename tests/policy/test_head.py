"""The head against a float64 softmax: values and gradients, on inputs that are known to break such kernels."""

import inspect
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from joined_ranks import RankJobs
from megatron.core.models.gpt import GPTModel

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.head.fused import HeadRequest, one_pass, output_processor, two_pass
from megatron_dapo.policy.megatron.options import transformer_config
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model.gpt import _block_spec
from megatron_dapo.selfcheck.synthetic import synthetic_shape

TOKENS, HIDDEN, VOCAB = 23, 16, 101

CASES = (
    "ordinary",
    "tiny logits",  # a padding column counted as logit 0 would show here
    "all negative",  # a running maximum that starts at 0 would show here
    "large",
)
WORLDS = (1, 2, 3)
METHODS = ("two passes", "returned", "added", "added-shared")  # the last three: one pass, by where d_weight goes
jobs = RankJobs()


@cache
def tensor_parallel(rendezvous):
    """Made once in each forked rank: all its jobs use the same groups."""
    world = rendezvous.world_size
    policy = PolicyConfig(tensor_parallel=world, micro_batch_tokens=6, precision="fp32", timeout_seconds=60)
    return policy, initialize(policy, rendezvous=rendezvous)


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


def weighted(logp, entropy, chunk=slice(None)):
    """The loss of the comparison: every token has its own weights."""
    return (logp * torch.linspace(-1, 2, TOKENS)[chunk]).sum() + (entropy * torch.linspace(3, 1, TOKENS)[chunk]).sum()


def oracle(hidden, weight, targets, temperature):
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(h @ w.t() / temperature, -1)
    picked = logp.gather(1, targets[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    weighted(picked, entropy).backward()
    return picked, entropy, h.grad, w.grad


def scored(rendezvous, case, temperature, chunk, dtype=torch.float32, method="two passes"):
    """Log-probs, entropies, d_hidden and d_weight of this rank's vocabulary columns."""
    world, group = rendezvous.world_size, tensor_parallel(rendezvous)[1].groups.tp
    hidden, weight, targets = inputs(case)
    columns = -(-VOCAB // world)
    padded = torch.cat([weight, torch.full((columns * world - VOCAB, HIDDEN), 7.0)])  # padding that is not zero
    h = hidden.to(dtype).requires_grad_()
    w = padded[group.rank() * columns :][:columns].to(dtype).requires_grad_()
    request = HeadRequest(torch.arange(TOKENS), targets, VOCAB, temperature, chunk)
    if method == "two passes":
        logp, entropy = two_pass(h, w, request, group)
        weighted(logp, entropy).backward()
        return logp.detach(), entropy.detach(), h.grad, w.grad
    return in_one_pass(h, w, request, group, method)


def in_one_pass(h, w, request, group, destination):
    """The same loss through the one-pass head; the weight's gradient is returned, or added to a main_grad."""
    w.main_grad = torch.full(w.shape, 0.5)  # what an earlier micro-batch left there
    scores = torch.zeros(2, TOKENS)

    def loss(chunk, logp, entropy):
        scores[:, chunk] = torch.stack([logp, entropy]).detach()
        return weighted(logp, entropy, chunk)

    request = HeadRequest(
        request.positions, request.targets, VOCAB, request.temperature, request.chunk_tokens, loss, destination
    )
    one_pass(h, w, request, group).backward()
    if destination == "returned":
        return *scores, h.grad, w.grad
    assert getattr(w, "grad_added_to_main_grad", False) == (destination == "added")
    assert (w.grad is None) == (destination == "added-shared")
    return *scores, h.grad, w.main_grad - 0.5


def check(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


TEMPERATURE = 0.8
against_float64 = {
    (case, world, method): jobs.add(world, scored, case, TEMPERATURE, 7, torch.float32, method)
    for case in CASES
    for world in WORLDS
    for method in METHODS
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_against_float64(case, world, method):
    logp, entropy, grad_hidden, grad_weight = oracle(*inputs(case), TEMPERATURE)
    results = against_float64[case, world, method].results()
    for result in results:
        check(result[:2], (logp, entropy), 1e-5)
    shares = torch.stack([r[2] for r in results]).sum(0)  # each rank's columns give a share of d_hidden
    check((shares,), (grad_hidden,), 2e-5)
    whole = torch.cat([r[3] for r in results])
    check((whole[:VOCAB],), (grad_weight,), 2e-5)
    assert (whole[VOCAB:] == 0).all()  # padding columns have no gradient


tiny = jobs.add(2, scored, "tiny logits", 1.0, 5)


def test_log_probs_are_never_positive_and_sum_to_one():
    logp, *_ = tiny.results()[0]
    assert (logp < 0).all()
    assert torch.allclose(logp, torch.full_like(logp, -torch.log(torch.tensor(float(VOCAB)))), atol=1e-3)


CHUNKS = (1, 4, TOKENS, 1000)
chunked = {chunk: jobs.add(1, scored, "ordinary", 1.0, chunk) for chunk in (8, *CHUNKS)}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_chunk_size_changes_nothing(chunk):
    check(chunked[chunk].results()[0], [x.double() for x in chunked[8].results()[0]], 1e-6)


bf16 = jobs.add(2, scored, "ordinary", 1.0, 8, torch.bfloat16)


def test_bf16_inputs():
    hidden, weight, targets = (x.bfloat16().float() if x.is_floating_point() else x for x in inputs("ordinary"))
    expected = oracle(hidden, weight, targets, 1.0)
    found = bf16.results()
    assert (found[0][0].double() - expected[0]).abs().max() <= 2e-2
    shares = found[0][2].double() + found[1][2].double()
    assert (shares - expected[2]).norm() <= 1e-2 * expected[2].norm()


def nothing_scored(rendezvous):
    _, runtime = tensor_parallel(rendezvous)
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    weight = torch.ones(51, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.long)
    logp, entropy = two_pass(hidden, weight, HeadRequest(none, none, VOCAB), runtime.groups.tp)
    (logp.sum() + entropy.sum()).backward()
    return logp.detach(), weight.grad


nothing = jobs.add(2, nothing_scored)


def test_no_tokens_at_all():
    for logp, grad in nothing.results():
        assert logp.shape == (0,)
        assert (grad == 0).all()


# ---- in other models ----


def in_a_plain_gpt_model(rendezvous, tied):
    """Megatron's own model with our head as its output processor, against the logits it gives without."""
    policy, runtime = tensor_parallel(rendezvous)
    shape = synthetic_shape("dense")
    config = transformer_config(shape, policy)
    model = GPTModel(
        config, _block_spec(config, None, shape, False, exact=False), vocab_size=96, max_sequence_length=64,
        parallel_output=False, share_embeddings_and_output_weights=tied, position_embedding_type="none",
        pg_collection=runtime.groups,
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


HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters
plugged = {tied: jobs.add(2, in_a_plain_gpt_model, tied) for tied in (False, True) if HAS_OUTPUT_PROCESSOR}


@pytest.mark.skipif(not HAS_OUTPUT_PROCESSOR, reason="GPTModel takes an output_processor from megatron-core 0.19 on")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_plugs_into_a_plain_gpt_model(tied):
    for found, expected in plugged[tied].results():
        assert found.std() > 0.01
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def processed(rendezvous):
    _, runtime = tensor_parallel(rendezvous)
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


either_weight = jobs.add(1, processed)


def test_the_output_processor_takes_the_tied_weight_or_the_layers_own():
    for found, expected in either_weight.results()[0]:
        torch.testing.assert_close(found, expected)
