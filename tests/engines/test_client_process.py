"""Generate requests through a client process: the same completions, errors, aborts and accounting as without it."""

import asyncio
import base64
import os
import select
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from aiohttp import web
from event_loop import close_at_the_end
from fake_server import FakeServer, changed
from faults import PROMPT, WEIGHTS, connect, fill_batch, settings

from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.engines.sglang import client_process
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import ClientProcess
from megatron_dapo.engines.sglang.client_worker import Worker, decode_completion, encode_call, encode_completion
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.engines.sglang.http import ServerFailure
from megatron_dapo.engines.sglang.response_parser import GenerateCall
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.frames import Channel, FrameBuffer
from megatron_dapo.types import FinishReason, WeightSpan, as_logprobs, as_tokens


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def engine_through(process, servers, config):
    engine = await connect(servers, config)
    for server in engine.servers:
        server.process = process
    return engine


def described(found):
    if isinstance(found, BaseException):
        return type(found), str(found), getattr(found, "status", None)
    experts = found.routed_experts
    return (
        found.tokens.tolist(), found.logprobs.tolist(), found.tokens.dtype, found.logprobs.dtype,
        found.finish_reason, found.weight_spans, experts is not None and (experts.tolist(), experts.dtype),
    )  # fmt: skip


def with_experts(reply):
    rows = np.arange((len(PROMPT) + 7) * 4, dtype=np.int32)
    reply["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()


def other_label(label):
    return lambda reply: reply["meta_info"].update(weight_version=label)


def spans(reply):
    reply["meta_info"]["weight_versions"] = [
        {"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 8}
    ]  # fmt: skip


def text(reply):
    reply["text"] = "½ ∑ \U0001f600\x00"


def nothing_generated(reply):
    reply["output_ids"], reply["meta_info"]["output_token_logprobs"] = [], []
    reply["meta_info"]["finish_reason"] = {"type": "abort"}


REPLIES = {
    "plain": None,
    "two versions": changed(spans),
    "text": changed(text),
    "experts": changed(with_experts),
    "aborted without a token": changed(nothing_generated),
    "400": lambda server, body: web.Response(status=400, text="too long"),
    "500": lambda server, body: web.Response(status=500, text="out of order"),
    "not JSON": changed(lambda reply: "<html>"),
    "broken connection": lambda server, body: "truncate",
    "update not ended": changed(other_label("updating-to-3")),
    "foreign label": changed(other_label("theirs")),
    "too slow": lambda server, body: asyncio.sleep(1000),
    "nobody listens": "stopped",
}


async def test_results_and_errors_are_those_of_the_client_in_this_process():
    """Every kind of reply once with and once without the process: equal arrays, or the same class and message."""

    async def ask(server, process, config, params):
        client = SGLangClient(server.url, config)
        client.process = process
        found = (await asyncio.gather(client.generate("r", PROMPT, params), return_exceptions=True))[0]
        await client.close()
        return described(found)

    process, config = close_at_the_end(ClientProcess()), settings(sample_timeout=0.3).servers
    await process.ready()
    for name, fault in REPLIES.items():
        server = await FakeServer(fault=None if fault == "stopped" else fault).start()
        if fault == "stopped":
            await server.stop()
        params = SamplingParams(8, seed=2**62, routed_experts_from=0 if name == "experts" else None)
        here, there = [await ask(server, where, config, params) for where in (None, process)]
        assert here == there, name


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_completions_arrive_whole_wherever_the_byte_stream_is_split(piece):
    lengths = (0, 1, 5) if piece < 10 else (0, 1, 300_000, 2)  # the third is larger than the buffer
    sent = [
        Completion(as_tokens(range(n)), as_logprobs([-0.5] * n), FinishReason.STOP, [WeightSpan(3, 0, n)])
        for n in lengths
    ]
    stream = b"".join(encode_completion(number, completion) for number, completion in enumerate(sent))
    buffer, received = FrameBuffer(), []
    while stream:
        room = buffer.room()
        part = stream[: min(piece, len(room))]
        room[: len(part)], stream = part, stream[len(part) :]
        received += [decode_completion(*frame) for frame in buffer.received(len(part))]
    assert [described(found) for found in received] == [described(found) for found in sent]


async def test_a_cancelled_request_closes_its_connection_and_the_others_go_on():
    go_on = asyncio.Event()

    async def wait(server, body):
        await go_on.wait()

    server = await FakeServer(fault=wait).start()
    process = close_at_the_end(ClientProcess())
    engine = await engine_through(process, [server], settings(sample_timeout=30))
    cancelled, other = [
        asyncio.ensure_future(engine.generate(name, PROMPT, SamplingParams(8))) for name in ("cancelled", "other")
    ]
    while server.calls.count("/generate") < 2:
        await asyncio.sleep(0.01)
    connections = [transport for transport in server._last_used if not transport.is_closing()]
    pid = process.pid
    cancelled.cancel()
    while not any(transport.is_closing() for transport in connections):
        await asyncio.sleep(0.01)
    assert not all(transport.is_closing() for transport in connections)
    go_on.set()
    assert (await other).finish_reason is FinishReason.STOP
    while "/abort_request" not in server.calls:
        await asyncio.sleep(0.01)
    assert not engine.servers[0].in_flight and not process._worker._waiting and process.pid == pid


async def test_a_request_that_is_cancelled_while_its_reply_is_sent_does_not_cut_it_off():
    """Half a frame on the socket would be completed with the next ones, and no reply could be read any more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        server = await FakeServer(fault=changed(lambda reply: reply.update(text="x" * (1 << 22)))).start()
        worker = Worker(theirs)
        call = GenerateCall(server.url, None, server.url, "r", PROMPT, {"max_new_tokens": 8}, 30.0, None, None)
        header, prompt = encode_call(call)
        worker._receive(({"number": 0, **header}, [prompt.tobytes()]))
        async with asyncio.timeout(20):
            while not select.select([ours], [], [], 0)[0]:
                await asyncio.sleep(0.01)
        worker._receive(({"number": 0, "cancel": True}, []))
        worker._receive(({"number": 1}, []))  # a ping
        channel = Channel(ours)
        async with asyncio.timeout(10):
            found = [await asyncio.to_thread(channel.receive) for _ in range(2)]
        assert [frame[0]["number"] for frame in found] == [0, 1]
        await worker._connection(call).close()


async def test_no_sample_is_lost_or_trained_twice_when_the_process_is_killed_or_hangs(monkeypatch):
    """kill -9 and SIGSTOP while all requests run: the next try goes through a new process."""
    servers = [await FakeServer(seconds=0.3).start() for _ in range(2)]
    process, config = ClientProcess(), settings(sample_timeout=3.0)
    await process.ready()
    engine = await engine_through(process, servers, config)
    for number, grace in ((signal.SIGKILL, 1000.0), (signal.SIGSTOP, 0.5)):
        monkeypatch.setattr(client_process, "GRACE", grace)  # a death is noticed without it
        collecting = asyncio.ensure_future(fill_batch(engine, config))
        before = sum(server.calls.count("/generate") for server in servers)
        while sum(server.calls.count("/generate") for server in servers) < before + 6:
            await asyncio.sleep(0.01)
        victim = process.pid
        os.kill(victim, number)
        await collecting
        assert process.pid not in (None, victim) and ended(victim), number.name
    last = process.pid
    await engine.close()
    await process.close()
    assert ended(last)
    with pytest.raises(EngineError, match=r"closed"):
        await process.start()


async def test_a_request_fails_with_the_cause_when_every_process_dies(monkeypatch):
    monkeypatch.setattr(client_process, "COMMAND", [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    engine = await engine_through(ClientProcess(), [await FakeServer().start()], settings(attempts=2))
    with pytest.raises(EngineError, match=r"2 tries failed.*client process ended with exit code 3"):
        await engine.generate("r", PROMPT, SamplingParams(8))
    monkeypatch.setattr(client_process, "COMMAND", ["/does/not/exist"])
    with pytest.raises(ServerFailure, match=r"cannot start a client process.*/does/not/exist"):
        await ClientProcess().start()


async def test_a_fleet_has_one_process_for_some_servers_and_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.engines.sglang.fleet.SERVERS_PER_PROCESS", 2)
    servers = [await FakeServer().start() for _ in range(3)]
    config = settings(urls=[server.url for server in servers])
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"directory": str(tmp_path)})})
    fleet = Fleet(config, str(tmp_path), tmp_path)
    engine = await fleet.start()
    first, second = fleet.client_processes
    assert [server.process for server in engine.servers] == [first, first, second]
    pids = [first.pid, second.pid]
    await engine.update_weights(2, [WEIGHTS])
    batch = await fill_batch(engine, config)
    assert {span.version for sample in batch.samples for span in sample.weight_spans} == {2}
    await engine.close()
    assert all(map(ended, pids))
    monkeypatch.setattr(client_process, "COMMAND", [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with pytest.raises(EngineError, match=r"cannot send requests to the servers.*exit code 3"):
        await Fleet(config, str(tmp_path), tmp_path).start()


async def test_the_process_ends_without_a_word(capfd):
    """aiohttp reports connections that are open when they are forgotten."""
    process, server = ClientProcess(), await FakeServer().start()
    client = SGLangClient(server.url, settings().servers)
    client.process = process
    await client.generate("r", PROMPT, SamplingParams(8))
    await process._worker.end(patience=20)
    await client.close()
    assert capfd.readouterr().err == ""


def test_the_process_ends_with_its_parent():
    """kill -9 of the parent, which also has a child that holds its descriptors."""
    script = (
        "import asyncio, os, time\n"
        "from megatron_dapo.engines.sglang.client_process import ClientProcess\n"
        "async def main():\n"
        "    process = ClientProcess()\n"
        "    await process.ready()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "    print(process.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        deadline = time.monotonic() + 20
        while not ended(pid):
            assert time.monotonic() < deadline, "the client process outlives its parent"
            time.sleep(0.02)
        os.killpg(parent.pid, signal.SIGKILL)
