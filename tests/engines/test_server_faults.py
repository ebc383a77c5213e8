"""Failing servers: the batch completes with every sample once, or the error names the server and the cause."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from connect_engine import connect_engine
from fake_server import FakeServer, changed, response_of
from faults import PROMPT, Texts, connect, fill_batch, settings
from simulation import Prompts

from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.errors import ConfigError, EngineError
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, as_tokens


async def sleep_for_ever(server, body):
    await asyncio.sleep(1000)


def nothing_but(status):
    return lambda server, body: web.Response(status=status, text="out of order")


def nan_logprob(answer):
    answer["meta_info"]["output_token_logprobs"][3][0] = float("nan")
    return str(answer).replace("'", '"').replace("None", "null").replace("nan", "NaN")


def null_logprob(answer):
    answer["meta_info"]["output_token_logprobs"][3][0] = None


def fewer_logprobs(answer):
    answer["meta_info"]["output_token_logprobs"].pop()


def other_tokens(answer):
    answer["output_ids"][-1] += 1


def emptied(answer):
    answer["output_ids"] = answer["meta_info"]["output_token_logprobs"] = []


def set_entry(answer, place, value):
    answer["meta_info"]["output_token_logprobs"][3][place] = value
    if place:
        answer["output_ids"][3] = value


def set_meta(answer, name, value):
    answer["meta_info"][name] = value


LATER = {"Retry-After": "0.1"}
FEWER = [{"version": "default", "start": 0, "end": 7}]
FAULTS = {
    "hangs": (sleep_for_ever, "did not reply within 1 s"),
    "answers 500": (nothing_but(500), "replied 500: out of order"),
    "garbage": (changed(lambda answer: "<html>proxy error</html>"), "not JSON"),
    "empty object": (changed(lambda answer: "{}"), "lacks 'meta_info'"),
    "truncated body": (lambda server, body: "truncate", "/generate failed"),
    "NaN log-prob": (changed(nan_logprob), "not JSON"),
    "null log-prob": (changed(null_logprob), "log-prob 3 of 8"),
    "fewer log-probs than tokens": (changed(fewer_logprobs), "8 tokens but 7 log-probs"),
    "log-probs of other tokens": (changed(other_tokens), "other tokens than output_ids"),
    "more tokens than asked": (lambda server, body: web.json_response(response_of(24, "stop", "default")), "8 were"),
    "no token": (changed(emptied), "has no token"),
    "positive log-prob": (changed(lambda answer: set_entry(answer, 0, 0.5)), "log-prob 3 of 8 is 0.5"),
    "infinite log-prob": (changed(lambda answer: set_entry(answer, 0, -1e39)), "log-prob 3 of 8 is -inf"),
    "unlikely log-prob": (changed(lambda answer: set_entry(answer, 0, -2e3)), "log-prob 3 of 8 is -2000"),
    "negative token": (changed(lambda answer: set_entry(answer, 1, -1)), "outside of the vocabulary of 250"),
    "token beyond the vocabulary": (changed(lambda answer: set_entry(answer, 1, 250)), "vocabulary of 250"),
    "a version that it does not hold": (changed(lambda answer: set_meta(answer, "weight_version", "77")), "not hold"),
    "a label that it does not have": (changed(lambda answer: set_meta(answer, "weight_version", "x")), "not hold"),
    "versions of fewer tokens": (changed(lambda answer: set_meta(answer, "weight_versions", FEWER)), "do not cover"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_no_sample_is_lost_when_one_of_two_servers_fails(name):
    bad, good = await FakeServer(fault=FAULTS[name][0]).start(), await FakeServer().start()
    engine = await connect([bad, good], settings())
    engine.vocabulary = 250
    await fill_batch(engine, settings())
    assert "/generate" in bad.calls and not bad.served


@pytest.mark.parametrize("name", FAULTS)
async def test_the_error_of_a_single_failing_server_names_it_and_the_cause(name):
    bad = await FakeServer(fault=FAULTS[name][0]).start()
    config = settings(attempts=2, sample_timeout=1.0)
    engine = await connect([bad], config)
    engine.vocabulary = 250
    began = time.monotonic()
    with pytest.raises(EngineError, match=FAULTS[name][1]) as caught:
        await engine.generate("r1", PROMPT, SamplingParams(8))
    assert bad.url in str(caught.value) and "2 tries failed" in str(caught.value)
    assert time.monotonic() - began < 10


async def test_a_refusal_is_final_and_not_repeated():
    server = await FakeServer(fault=nothing_but(400)).start()
    engine = await connect([server], settings())
    with pytest.raises(EngineError, match="replied 400"):
        await engine.generate("r1", PROMPT, SamplingParams(8))
    assert server.calls.count("/generate") == 1


async def test_no_sample_is_lost_when_servers_fail_occasionally():
    failures = iter([True, False, True, True, False] * 100)

    def sometimes(server, body):
        return web.Response(status=503) if next(failures) else None

    servers = [await FakeServer(fault=sometimes).start() for _ in range(3)]
    config = settings(attempts=10)
    engine = await connect(servers, config)
    await fill_batch(engine, config, groups=10)
    served = [name.split("-try")[0] for server in servers for name in server.served]
    assert len(served) == len(set(served)) == 40


@pytest.mark.parametrize("by", ["generate", "control"])
@pytest.mark.parametrize("busy", [lambda: web.Response(status=429), lambda: web.Response(status=503, headers=LATER)])
async def test_a_busy_server_is_asked_again_and_no_try_is_used_up(busy, by):
    """More replies in a row than `attempts`; a busy server is not a failed one."""
    server, left = await FakeServer().start(), [busy] * 3
    server.fault = lambda server, body: left.pop()() if left else None
    engine = await connect([server], settings(attempts=1))
    engine.supervision.check = lambda server: pytest.fail("it is only busy")
    if by == "generate":
        assert (await engine.generate("r", PROMPT, SamplingParams(8))).rejected == 0
    else:
        await engine.logprobs_of([1, 2, 3])
    assert not left and server.calls.count("/generate") == 4


async def test_a_server_that_is_always_busy_is_an_error():
    server = await FakeServer(fault=nothing_but(429)).start()
    engine = await connect([server], settings())
    engine.patience = 0.3
    with pytest.raises(EngineError, match=r"refused for 0.3 s; the last: .* replied 429: out of order"):
        await engine.generate("r", PROMPT, SamplingParams(8))


async def test_running_requests_never_exceed_max_running():
    running = most = 0

    async def count(server, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    servers = [await FakeServer(fault=count).start() for _ in range(2)]
    engine = await connect(servers, settings(max_running=3))
    await asyncio.gather(*(engine.generate(f"r{i}", PROMPT, SamplingParams(8)) for i in range(40)))
    assert most <= 6 and sum(len(server.served) for server in servers) == 40


async def test_abort_reaches_running_and_queued_requests():
    server = await FakeServer(seconds=30).start()
    engine = await connect([server], settings(max_running=3, sample_timeout=60))
    tasks = [asyncio.ensure_future(engine.generate(f"r{i}", PROMPT, SamplingParams(8))) for i in range(10)]
    await asyncio.sleep(0.2)
    await engine.abort("r0")
    first = await asyncio.wait_for(tasks[0], 5)
    assert first.finish_reason is FinishReason.ABORT and len(first.tokens) == 4
    await engine.abort()
    done = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert all(c.finish_reason is FinishReason.ABORT for c in done)
    assert sorted(len(c.tokens) for c in done) == [0] * 6 + [4] * 4


async def test_with_a_router_only_generate_requests_go_to_it():
    router = await FakeServer(seconds=30).start()
    servers = [await FakeServer().start() for _ in range(2)]
    urls = [server.url for server in servers]
    engine = await connect(servers, settings(router_url=router.url, urls=urls, sample_timeout=60))
    task = asyncio.ensure_future(engine.generate("r1", PROMPT, SamplingParams(8)))
    await asyncio.sleep(0.1)
    await engine.abort("r1")
    await engine.abort()
    assert router.calls == ["/generate"]
    for server in servers:
        assert "/generate" not in server.calls and server.calls.count("/abort_request") == 2
    task.cancel()


async def test_a_cancelled_request_is_aborted_on_the_server():
    server = await FakeServer(seconds=30).start()
    engine = await connect([server], settings(sample_timeout=60))
    task = asyncio.ensure_future(engine.generate("r1", PROMPT, SamplingParams(8)))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.sleep(0.1)
    assert "/abort_request" in server.calls and engine.servers[0].in_flight == 0


def test_a_public_interface_needs_a_key():
    with pytest.raises(ValueError, match="needs a key"):
        settings(host="0.0.0.0")
    assert settings(host="0.0.0.0", api_key_env="KEY").servers.host == "0.0.0.0"


async def test_keys_are_sent_and_a_missing_one_is_an_error(monkeypatch):
    seen = {}
    server = await FakeServer().start()

    async def look(request):
        seen[request.path] = request.headers.get("Authorization")
        return await original(request)

    original = server._handle
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", look)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = settings(api_key_env="TEST_API_KEY", admin_key_env="TEST_ADMIN_KEY")
    with pytest.raises(ConfigError, match="TEST_API_KEY, which is not set"):
        await connect_engine([url], config)
    monkeypatch.setenv("TEST_API_KEY", "one")
    monkeypatch.setenv("TEST_ADMIN_KEY", "two")
    engine = await connect_engine([url], config)
    await engine.generate("r", PROMPT, SamplingParams(8))
    await engine.servers[0].pause()
    await engine.close()
    await runner.cleanup()
    assert seen["/generate"] == "Bearer one" and seen["/pause_generation"] == "Bearer two"


async def test_the_body_of_a_generate_request():
    bodies = []
    server = await FakeServer(fault=lambda server, body: bodies.append(body)).start()
    engine = await connect([server], settings())
    prompt = as_tokens(np.arange(2000) % 250)
    params = SamplingParams(8, temperature=0.5, top_p=0.9, top_k=7, stop=("a", "b"), stop_token_ids=(5,), seed=2**62)
    await engine.generate("r", prompt, params)
    with pytest.raises(EngineError, match="the reply lacks 'routed_experts'"):  # of the fake server
        await engine.generate("s", prompt, replace(params, routed_experts_from=1200))
    await engine.close()
    sent = bodies[0]
    assert "return_routed_experts" not in sent
    assert bodies[1]["return_routed_experts"] is True and bodies[1]["routed_experts_start_len"] == 1200
    assert sent["input_ids"] == (np.arange(2000) % 250).tolist() and sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "ignore_eos": False,
        "stop": ["a", "b"], "stop_token_ids": [5], "sampling_seed": 2**62,
    }  # fmt: skip


async def test_a_server_that_dies_in_mid_conversation_loses_nothing():
    """Every conversation is whole, and every request of a later turn had all tokens before it."""
    contexts = []

    def note(server, body):
        contexts.append(body["input_ids"])

    async def three_turns(prompt, conversation, settings):
        for number in range(3):
            await conversation.generate(max_tokens=4)
            conversation.append([7, number])
        return Grade(conversation.samples[0].index % 2 == 0, 1.0)

    dying, good = await FakeServer(fault=note).start(), await FakeServer(fault=note).start()
    dying.drop["/generate"] = [""] * 10 + ["die"]
    config = settings().model_copy(update={"max_response_tokens": 40})
    engine = await connect([dying, good], config)
    function = RolloutFunction("python:test.three_turns", three_turns, {}, Texts())
    sampler = Sampler(engine, None, Prompts(), config, groups_per_step=6, function=function)
    batch = await sampler.collect(0)
    await engine.close()
    assert dying.dead and good.served
    assert batch.metrics["rollout/samples_trained"] == 24 and batch.metrics["rollout/samples_failed"] == 0
    for sample in batch.samples:
        assert [turn.role for turn in sample.turns] == ["assistant", "tool"] * 3
        assert sample.trained_tokens == 12 and sample.length == 18
        for turn in sample.turns[::2]:
            whole = [*sample.prompt_tokens, *sample.response_tokens[: turn.start]]
            assert whole in contexts
