"""One suite for all engines: the embedded one and SGLang, each with the same tiny random Qwen3."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from connect_engine import connect_engine
from fake_server import FakeServer
from faults import Texts
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS
from simulation import Prompts
from subject import PROMPT, TOLERANCE, Subject, copy_of, run, settings
from tiny_model import VOCABULARY, byte_tokenizer, changed_weights, reference_logprobs

from megatron_dapo.config.algorithm import DistillationConfig
from megatron_dapo.engines.protocol import SamplingParams, WeightUpdateError
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.engines.teacher import open_teacher
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.supervised import members
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, Sample, as_logprobs, as_tokens


@pytest.fixture(params=["embedded", *SGLANG_VERSIONS])
def subject(request, server_of_version):
    return Subject(None if request.param == "embedded" else server_of_version(request.param))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(40, ignore_eos=True),
        SamplingParams(40, temperature=0.6, ignore_eos=True),
        SamplingParams(40, temperature=1.3, top_p=0.8, top_k=20, ignore_eos=True),
        SamplingParams(40, temperature=0.0, ignore_eos=True),
    ],
    ids=["plain", "cold", "cut", "greedy"],
)
def test_logprobs_are_of_the_whole_distribution_at_the_temperature(subject, params):
    """Not renormalised to what top-p and top-k leave; greedy reports temperature 1."""

    async def main():
        async with subject.open() as engine:
            return await asyncio.gather(*(engine.generate(f"{params.top_k}-{i}", PROMPT, params) for i in range(5)))

    for completion in run(main()):
        assert len(completion.tokens) == len(completion.logprobs) == 40
        assert completion.finish_reason is FinishReason.LENGTH
        assert [(span.start, span.end) for span in completion.weight_spans] == [(0, 40)]
        subject.assert_agrees(PROMPT, completion, params.temperature)


async def test_greedy_is_the_most_likely_token(subject):
    async with subject.open() as engine:
        completion = await engine.generate("greedy", PROMPT, SamplingParams(20, temperature=0.0, ignore_eos=True))
    context = torch.tensor([[*PROMPT.tolist(), *completion.tokens.tolist()]])
    with torch.no_grad():
        best = subject.model(context).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert completion.tokens.tolist() == best.tolist()


async def test_stop_tokens_end_the_sample_and_are_part_of_it(subject):
    async with subject.open() as engine:
        free = await engine.generate("free", PROMPT, SamplingParams(20, temperature=0.0, ignore_eos=True))
        stop = int(free.tokens[6])
        params = SamplingParams(20, temperature=0.0, stop_token_ids=(stop,))
        free, stop, stopped = free, stop, await engine.generate("stopped", PROMPT, params)
    first = free.tokens.tolist().index(stop)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist() and len(stopped.logprobs) == first + 1


def test_stop_strings_end_the_sample_and_are_part_of_it(subject):
    tokenizer = byte_tokenizer()

    async def main():
        async with subject.open() as engine:
            for number in range(20):
                prompt = as_tokens([*PROMPT.tolist(), number])
                free = await engine.generate(f"f{number}", prompt, SamplingParams(30, temperature=0.0, ignore_eos=True))
                pairs = [tokenizer.decode(free.tokens[i : i + 2]) for i in range(2, 28)]
                stops = [pair for pair in pairs if len(pair) == 2 and pair.isascii() and pair.isprintable()]
                if stops:
                    params = SamplingParams(30, temperature=0.0, ignore_eos=True, stop=("never so long", stops[0]))
                    return stops[0], free, await engine.generate(f"s{number}", prompt, params)
        raise AssertionError("no prompt gave two printable letters in a row")

    stop, free, stopped = run(main())
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    assert tokenizer.decode(stopped.tokens).endswith(stop)


async def test_abort_returns_the_tokens_so_far_and_they_can_be_continued(subject):
    """A partial rollout against a full one, with the same weights: the same tokens and log-probs."""
    params = SamplingParams(600, temperature=0.0, ignore_eos=True)
    async with subject.open() as engine:
        running = asyncio.ensure_future(engine.generate("long", PROMPT, params))
        other = asyncio.ensure_future(engine.generate("other", PROMPT, SamplingParams(900, ignore_eos=True)))
        await asyncio.sleep(0.4)
        await engine.abort("long")
        cut = await running
        assert not other.done()
        await engine.abort()
        await other
        prefix = as_tokens(np.concatenate([PROMPT, cut.tokens]))
        rest = await engine.generate("rest", prefix, SamplingParams(20, temperature=0.0, ignore_eos=True))
        total = SamplingParams(len(cut.tokens) + 20, temperature=0.0, ignore_eos=True)
        cut, rest, whole = cut, rest, await engine.generate("whole", PROMPT, total)
    assert cut.finish_reason is FinishReason.ABORT and 0 < len(cut.tokens) < 600
    assert [*cut.tokens, *rest.tokens] == whole.tokens.tolist()
    assert np.abs(np.concatenate([cut.logprobs, rest.logprobs]) - whole.logprobs).max() < TOLERANCE


async def test_a_request_longer_than_the_model_allows_is_an_error(subject):
    async with subject.open() as engine:
        with pytest.raises(EngineError, match=r"(?i)exceed.*1024"):
            await engine.generate("huge", PROMPT, SamplingParams(5000))


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
async def test_after_each_of_five_updates_the_logprobs_are_those_of_the_new_weights(subject, transport):
    if subject.server is None and transport != "disk":
        pytest.skip("the embedded engine has no transports")
    params = SamplingParams(24, ignore_eos=True)
    async with subject.open(transport) as engine:
        for number in range(5):
            before = await engine.generate(f"before{number}", PROMPT, params)
            subject.assert_agrees(PROMPT, before)
            old = engine.weight_version
            report = await subject.update(engine, seed=100 + number)
            assert report.version == old + 1 and not report.failed and report.tensors == 25
            after = await engine.generate(f"after{number}", PROMPT, params)
            subject.assert_agrees(PROMPT, after)
            assert [span.version for span in after.weight_spans] == [old + 1]
            stale = reference_logprobs(subject.model, PROMPT, before.tokens)
            assert np.abs(stale - before.logprobs).max() > 100 * TOLERANCE, "the update changed nothing"


def test_partial_rollouts_over_real_updates_carry_the_version_of_every_token(subject):
    """The sampler with oversampling and interrupted samples, new weights after each step: every token's log-prob is
    that of the weights its span names. Three steps, or more until a sample has been interrupted and continued."""
    config = settings(
        samples_per_prompt=2, max_response_tokens=160, dynamic_sampling=False, stop_token_ids=[3, 77],
        sampler={"oversampling": 3, "order": "completion", "unfinished": "continue", "max_carryover_staleness": 9},
    )  # fmt: skip

    async def grade(prompt, sample):
        return Grade(sample.index == 0, 1.0)

    async def main():
        models, batches = {}, []
        async with subject.open(config=config) as engine:
            sampler = Sampler(engine, grade, Prompts(), config, groups_per_step=2)
            for step in range(12):
                models[engine.weight_version] = copy_of(subject.model)
                batches.append(await sampler.collect(step))
                await subject.update(engine, seed=step)
                if step >= 2 and any(len(sample.weight_spans) > 1 for batch in batches for sample in batch.samples):
                    break
        return models, batches

    models, batches = run(main())
    spans = 0
    for sample in (sample for batch in batches for sample in batch.samples):
        expected = {v: reference_logprobs(m, sample.prompt_tokens, sample.response_tokens) for v, m in models.items()}
        assert sample.weight_spans[-1].end == sample.length
        for span in sample.weight_spans:
            difference = (sample.engine_logprobs - expected[span.version])[span.start : span.end]
            assert np.abs(difference).max() < TOLERANCE
        spans += len(sample.weight_spans)
    assert spans > len([s for batch in batches for s in batch.samples]), "no sample was interrupted and continued"


# ---- weights change while requests run ----


def pausing(mode, transport="disk"):
    config = settings(transport)
    return config.model_copy(update={"weights": config.weights.model_copy(update={"pause_mode": mode})})


async def until_it_has_tokens(engine, subject):
    """Requests that run are slower than this: about 20 tokens on a server, more in the embedded engine."""
    if subject.server is None:
        while not any(request.generated > 5 for request in engine._running):
            await asyncio.sleep(0.001)
    else:
        await asyncio.sleep(0.3)


def reports_token_versions(subject):
    return subject.server is None or "0.5.18" not in subject.server.config.python


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_token_has_the_version_of_the_weights_that_sampled_it(subject, mode):
    """Two requests over two updates. abort: the caller continues; retract: as if it had; in_place: the first part is
    exact, later log-probs come from keys and values of older weights."""
    if mode != "abort" and not reports_token_versions(subject):
        pytest.skip("this SGLang does not report the version of each token: test_a_server_that_cannot_…")
    count = 400 if subject.server else 250

    async def whole(engine, name):
        tokens, logprobs, spans = PROMPT, [], []
        while len(logprobs) < count:
            left = SamplingParams(count - len(logprobs), ignore_eos=True)
            part = await engine.generate(f"{name}-{len(logprobs)}", tokens, left)
            spans += [(s.version, s.start + len(logprobs), s.end + len(logprobs)) for s in part.weight_spans]
            tokens, logprobs = as_tokens([*tokens, *part.tokens]), [*logprobs, *part.logprobs]
            if mode != "abort":
                assert part.finish_reason is FinishReason.LENGTH
        return tokens[len(PROMPT) :], np.array(logprobs), spans

    async with subject.open(config=pausing(mode)) as engine:
        models = {engine.weight_version: copy_of(subject.model)}
        running = [asyncio.ensure_future(whole(engine, f"{mode}{i}")) for i in range(2)]
        for seed in (31, 32):
            await until_it_has_tokens(engine, subject)
            await subject.update(engine, seed=seed)
            models[engine.weight_version] = copy_of(subject.model)
        found = [await request for request in running]
    for tokens, logprobs, spans in found:
        versions = [version for version, _, _ in spans]
        assert versions == sorted(versions) and len(set(versions)) > 1, "no update happened while it ran"
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])] and spans[-1][2] == count
        for index, (version, start, end) in enumerate(spans):
            expected = reference_logprobs(models[version], PROMPT, tokens)
            if mode != "in_place" or not index:
                assert np.abs(logprobs - expected)[start:end].max() < TOLERANCE


async def test_requests_that_arrive_during_an_update_wait_for_the_new_version(subject):
    async with subject.open() as engine:
        version = engine.weight_version + 1
        pairs = changed_weights(subject.model, 41)
        await engine.load_weights(version, iter([pairs]))
        late = asyncio.ensure_future(engine.generate("late", PROMPT, SamplingParams(8, ignore_eos=True)))
        await asyncio.sleep(0.3)
        assert not late.done()
        await engine.serve_weights(version)
        subject.model.load_state_dict(dict(pairs))
        completion = await late
        assert [span.version for span in completion.weight_spans] == [version]
        subject.assert_agrees(PROMPT, completion)


# ---- SGLang alone ----


async def test_a_server_that_cannot_tell_the_version_of_each_token_is_refused():
    """SGLang before 0.5.23, whose replies the fake server gives."""
    server = await FakeServer().start()
    with pytest.raises(EngineError, match=r"pause_mode retract keeps requests .* use abort"):
        await connect_engine([server.url], pausing("retract"))


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1][:, :3])], "has shape"),
        (lambda pairs: pairs[:-1], "are missing"),
        (lambda pairs: [*pairs, ("model.nonsense", torch.zeros(3))], "no tensor 'model.nonsense'"),
    ],
)
async def test_a_wrong_update_is_not_served_and_the_next_one_is(sglang_server, spoil, cause):
    """The second of two buckets is wrong: the server has half of the new weights and must not serve."""
    subject = Subject(sglang_server)
    config = settings("tensor")
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"keep_snapshot": False})})
    async with subject.open(config=config) as engine:
        wrong = spoil(changed_weights(subject.model, 5))
        with pytest.raises(WeightUpdateError, match=f"no server took weight version.*{cause}") as caught:
            await engine.update_weights(engine.weight_version + 1, iter([wrong[:9], wrong[9:]]))
        assert sglang_server.process.url in str(caught.value)
        engine.patience = 0.5
        with pytest.raises(EngineError, match="no server serves"):
            await engine.generate("x", PROMPT, SamplingParams(4))
        assert not (await subject.update(engine, seed=6)).failed
        subject.assert_agrees(PROMPT, await engine.generate("y", PROMPT, SamplingParams(16, ignore_eos=True)))


async def test_capabilities_are_read_from_the_server(sglang_server):
    async with Subject(sglang_server).open() as engine:
        server = engine.servers[0]
        found, version = await server.capabilities(), (await server.connection.get("/server_info"))["version"]
    assert found.bracketed_updates is (version == "0.5.23") and found.checksums and found.releases_memory


async def test_released_memory_is_resumed_by_the_next_update(sglang_server):
    """On the CPU there is no memory to release, but the server has the same states, and exits when the calls come in a
    wrong order or while a request runs."""
    subject = Subject(sglang_server)
    async with subject.open("tensor") as engine:
        for seed in (8, 9):
            running = asyncio.ensure_future(engine.generate(f"r{seed}", PROMPT, SamplingParams(900, ignore_eos=True)))
            await asyncio.sleep(0.3)
            await engine.release_memory()
            assert (await running).finish_reason == FinishReason.ABORT
            assert not (await subject.update(engine, seed=seed)).failed
            found = await engine.generate(f"s{seed}", PROMPT, SamplingParams(16, ignore_eos=True))
            subject.assert_agrees(PROMPT, found)


@pytest.mark.parametrize("sglang_server", SGLANG_VERSIONS[-1:], indirect=True)
async def test_a_real_server_killed_in_mid_conversation_is_restarted_and_joins_the_next_update(sglang_server, tmp_path):
    """kill -9 among the first and second turns of a batch: it completes with every sample once and right, no process of
    the old server is left, and the new one joins the process group of the next update. It stays, for the tests that
    follow. One version, because starting one takes half a minute."""
    subject = Subject(sglang_server)
    config = settings(
        "distributed", samples_per_prompt=4, max_response_tokens=64, dynamic_sampling=False,
    ).model_copy(update={"servers": sglang_server.config.model_copy(
        update={"heartbeat": 0.5, "attempts": 30, "sample_timeout": 60.0})})  # fmt: skip

    first_turns = []

    async def two_turns(prompt, conversation, settings):
        index = conversation.samples[0].index
        await conversation.generate(max_tokens=4 + 8 * index)
        first_turns.append((prompt.id, index))
        conversation.append([7, 8])
        await conversation.generate(max_tokens=24)
        return Grade(True, 1.0)

    fleet = Fleet(config, str(sglang_server.directory), tmp_path)
    fleet.processes = [sglang_server.process]
    engine = await fleet.start(version=sglang_server.version)
    await subject.update(engine, seed=77)
    function = RolloutFunction("python:test.two_turns", two_turns, {}, Texts())
    sampler = Sampler(engine, None, Prompts(), config, groups_per_step=4, function=function)
    collecting = asyncio.ensure_future(sampler.collect(0))
    while len(first_turns) < 4:
        await asyncio.sleep(0.001)
    assert not collecting.done()
    session = sglang_server.process.pid
    assert len(members(session)) >= 4  # supervisor, server, scheduler, detokenizer
    os.kill(session, signal.SIGKILL)
    batch = await collecting
    assert not members(session)
    version, model = engine.weight_version, copy_of(subject.model)
    report = await subject.update(engine, seed=78)
    assert not report.failed and engine._update._last.failed == {}, "it needed the snapshot"
    after = await engine.generate("after", PROMPT, SamplingParams(16, ignore_eos=True))
    sglang_server.version = engine.weight_version
    fleet.processes = []  # it would end them
    await engine.close()
    assert len({(s.prompt_id, s.index) for s in batch.samples}) == len(batch.samples) == 16
    assert len(set(first_turns)) == len(first_turns) >= 16, "a conversation started again"
    assert batch.metrics["rollout/samples_failed"] == 0
    for sample in batch.samples:
        assert {span.version for span in sample.weight_spans} == {version}
        assert [turn.role for turn in sample.turns] == ["assistant", "tool", "assistant"]
        expected = reference_logprobs(model, sample.prompt_tokens, sample.response_tokens)
        assert np.abs(sample.engine_logprobs - expected)[sample.trained_mask].max() < TOLERANCE
    assert [span.version for span in after.weight_spans] == [version + 1]
    subject.assert_agrees(PROMPT, after)


async def test_a_teachers_log_probs_are_those_of_its_model(sglang_server):
    """Scored by prefill, for distillation: prompts of one and of several tokens, and a second time from the cache. With
    the last id of the vocabulary, which SGLang reports as 0."""
    response = as_tokens([33, 34, VOCABULARY - 1, 35, 36])
    prompts = [PROMPT, as_tokens([7]), PROMPT, as_tokens([7, 8])]
    samples = [
        Sample("p", i, prompt, response, as_logprobs([0.0] * len(response)), FinishReason.STOP)
        for i, prompt in enumerate(prompts)
    ]
    config = DistillationConfig(urls=[sglang_server.process.url], api_key_env=API_KEY_VARIABLE, concurrency=1)
    teacher = await open_teacher(config)
    await teacher.score(samples)
    await teacher.close()
    for sample in samples:
        expected = reference_logprobs(sglang_server.model, sample.prompt_tokens, response)
        np.testing.assert_allclose(sample.teacher_logprobs, expected, atol=TOLERANCE)
