"""The embedded engine: its log-probs are the model's, and a sample depends on its seed, not on other requests.
test_conformance.py has what every engine must do."""

import asyncio
import os
import random

import numpy as np
import pytest
import torch
from event_loop import close_at_the_end
from long_lists import some
from tiny_model import byte_tokenizer, changed_weights, reference_logprobs, tiny_model, write_model
from torch.nn import functional as F

from megatron_dapo.config.rollout import EmbeddedConfig
from megatron_dapo.engines.embedded.batch_invariant_model import sample_tokens, uniform
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import SamplingParams, WeightUpdateError, derive_seed
from megatron_dapo.errors import EngineError
from megatron_dapo.types import WeightSpan, as_tokens

SMALL = EmbeddedConfig(batch_tokens=32, prompt_cache=4)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def prompt_of(seed: int, length: int):
    return as_tokens(np.random.default_rng(seed).integers(0, 256, length))


@pytest.mark.parametrize(
    ("temperature", "kind"),
    some(
        [
            *((temperature, kind) for temperature in (1.0, 0.7, 0.0) for kind in ("qwen2", "qwen3", "qwen3_moe")),
            *((1.0, kind) for kind in ("qwen2_yarn", "qwen2_moe", "qwen3_next", "qwen3_5")),
        ],
        (1.0, "qwen2"), (0.7, "qwen3"), (0.0, "qwen3_moe"),
        *((1.0, kind) for kind in ("qwen2_yarn", "qwen2_moe", "qwen3_next", "qwen3_5")),
    ),
)  # fmt: skip
async def test_logprobs_are_those_of_transformers(kind, temperature):
    """Prompt and response together are longer than a page (64 positions), so attention uses several pages."""
    model, prompt = tiny_model(kind), prompt_of(1, 50)
    engine = close_at_the_end(EmbeddedEngine(model, config=SMALL))
    params = SamplingParams(max_new_tokens=100, temperature=temperature, top_p=0.9, top_k=40, seed=3)
    completion = await engine.generate("a", prompt, params)
    expected = reference_logprobs(model, prompt, completion.tokens, temperature)
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    assert completion.weight_spans == [WeightSpan(0, 0, len(completion.tokens))]


@pytest.mark.parametrize("kind", some(["qwen3", "qwen3_moe", "qwen3_next"], "qwen3_moe", "qwen3_next"))
def test_other_requests_do_not_change_a_single_bit(kind):
    """Requests run alone, then among 70 in random order with aborts: identical bits."""
    prompts = [prompt_of(i, 3 + 11 * (i % 9)) for i in range(14)]
    wanted = {
        f"{p}.{s}": (prompts[p], SamplingParams(max_new_tokens=20 + 9 * s, temperature=1 + 0.1 * s, seed=100 * p + s))
        for p in range(14)
        for s in range(5)
    }

    async def main():
        engine = EmbeddedEngine(tiny_model(kind), config=SMALL)
        alone = {name: await engine.generate(name, *wanted[name]) for name in ("0.0", "5.4", "8.2", "13.3")}
        names = list(wanted)
        random.Random(0).shuffle(names)
        noise = [
            asyncio.ensure_future(engine.generate(f"noise{i}", prompt_of(i, 5), SamplingParams(200, seed=i)))
            for i in range(10)
        ]
        running = asyncio.gather(*(engine.generate(name, *wanted[name]) for name in names))
        await asyncio.sleep(0.05)
        for i in range(10):
            await engine.abort(f"noise{i}")
        together = dict(zip(names, await running, strict=True))
        await asyncio.gather(*noise)
        await engine.close()
        return alone, together

    alone, together = run(main())
    for name, completion in alone.items():
        assert completion.tokens.tolist() == together[name].tokens.tolist()
        assert completion.logprobs.tobytes() == together[name].logprobs.tobytes()


async def test_an_interrupted_and_continued_sample_is_the_same_bit_for_bit():
    """A partial rollout against a full one, with the same weights."""
    prompt, params = prompt_of(4, 30), SamplingParams(max_new_tokens=90, ignore_eos=True, seed=11)
    engine = close_at_the_end(EmbeddedEngine(tiny_model(), config=SMALL))
    whole = await engine.generate("whole", prompt, params)
    for cut in (1, 34, 89):
        prefix = as_tokens(np.concatenate([prompt, whole.tokens[:cut]]))
        rest = await engine.generate(
            f"rest{cut}", prefix, SamplingParams(max_new_tokens=90 - cut, ignore_eos=True, seed=11)
        )
        assert rest.tokens.tolist() == whole.tokens[cut:].tolist()
        assert rest.logprobs.tobytes() == whole.logprobs[cut:].tobytes()


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda pairs: pairs[:-1], "are missing"),
        (lambda pairs: [*pairs, pairs[0]], "sent twice"),
        (lambda pairs: [*pairs, ("model.nonsense", torch.zeros(1))], "no tensor 'model.nonsense'"),
        (lambda pairs: [(pairs[0][0], pairs[0][1][:-1]), *pairs[1:]], "has shape"),
    ],
)
async def test_a_wrong_update_is_read_to_its_end_and_not_served(spoil, cause):
    model = tiny_model()
    pairs = spoil(changed_weights(model, seed=1))
    made = []

    def buckets():
        for pair in pairs:
            made.append(pair[0])
            yield [pair]

    engine = close_at_the_end(EmbeddedEngine(model, config=SMALL))
    with pytest.raises(WeightUpdateError, match=cause):
        await engine.update_weights(1, buckets())
    assert len(made) == len(pairs)
    with pytest.raises(EngineError, match="weight version 1 failed"):
        await engine.generate("a", prompt_of(0, 4), SamplingParams(4))
    await engine.update_weights(2, [changed_weights(tiny_model(), seed=1)])
    assert len((await engine.generate("b", prompt_of(0, 4), SamplingParams(4, ignore_eos=True))).tokens) == 4


async def test_buckets_that_cannot_be_produced_leave_nothing_waiting():
    """Requests fail like after any other failed update."""

    def buckets():
        yield changed_weights(tiny_model(), seed=1)[:2]
        raise RuntimeError("a rank has left")

    engine = close_at_the_end(EmbeddedEngine(tiny_model(), config=SMALL, pause_mode="retract"))
    running = asyncio.ensure_future(engine.generate("a", prompt_of(0, 4), SamplingParams(900, ignore_eos=True)))
    await asyncio.sleep(0.05)
    with pytest.raises(WeightUpdateError, match="RuntimeError: a rank has left"):
        await engine.update_weights(1, buckets())
    for request in (running, engine.generate("b", prompt_of(0, 4), SamplingParams(4))):
        with pytest.raises(EngineError, match="weight version 1 failed"):
            await asyncio.wait_for(request, 10)


async def test_a_stop_string_may_have_more_tokens_than_characters():
    """One character of four bytes, each of which is a token here."""
    tokenizer, model = byte_tokenizer(), tiny_model()
    engine = close_at_the_end(EmbeddedEngine(model, tokenizer, SMALL))
    stop = "🙂🙃🙂"
    answer = iter(tokenizer.encode(f"{stop} and more"))
    model.lm_head.forward = lambda hidden: F.one_hot(torch.full(hidden.shape[:1], next(answer)), 320) * 100.0
    prompt, params = as_tokens([7]), SamplingParams(16, temperature=0.0, stop=(stop,))
    assert tokenizer.decode((await engine.generate("a", prompt, params)).tokens) == stop


def test_a_checkpoint_that_was_cut_off_is_an_error_that_names_it(tmp_path):
    folder = write_model(tmp_path)
    (weights,) = folder.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(EngineError, match=f"cannot load a model and its tokenizer from {folder}"):
        EmbeddedEngine.from_directory(folder)


def test_sampled_tokens_follow_the_truncated_distribution():
    """20 000 samples of one distribution: frequencies within 4 standard errors, also with top-k and top-p."""
    logits = torch.log(torch.tensor([0.5, 0.05, 0.25, 0.15, 0.05]))
    samples = 20_000
    numbers = uniform(np.arange(samples, dtype=np.uint64), np.full(samples, 17, dtype=np.uint64))

    def frequencies(**params):
        tokens, logprobs = sample_tokens(logits.repeat(samples, 1), [SamplingParams(1, **params)] * samples, numbers)
        expected = torch.log_softmax(logits / (params.get("temperature") or 1.0), -1)
        assert torch.allclose(logprobs, expected[tokens])
        return np.bincount(tokens.numpy(), minlength=5) / samples

    assert frequencies() == pytest.approx([0.5, 0.05, 0.25, 0.15, 0.05], abs=0.015)
    assert frequencies(top_k=2) == pytest.approx([2 / 3, 0, 1 / 3, 0, 0], abs=0.015)
    assert frequencies(top_p=0.7) == pytest.approx([2 / 3, 0, 1 / 3, 0, 0], abs=0.015)
    assert frequencies(temperature=0.0) == pytest.approx([1, 0, 0, 0, 0])
    squared = np.array([0.5, 0.05, 0.25, 0.15, 0.05]) ** 2
    assert frequencies(temperature=0.5) == pytest.approx(squared / squared.sum(), abs=0.015)


def test_every_argument_changes_the_derived_seed():
    base = (1, 2, "p", 3, 0)
    others = [(9, 2, "p", 3, 0), (1, 9, "p", 3, 0), (1, 2, "q", 3, 0), (1, 2, "p", 9, 0), (1, 2, "p", 3, 9)]
    assert len({derive_seed(*name) for name in [base, *others]}) == 6
    assert 0 <= derive_seed(*base) < 2**63 and derive_seed(*base) == derive_seed(*base)
