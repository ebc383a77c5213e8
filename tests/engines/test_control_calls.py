"""Control calls on broken connections and dying servers: the step goes on, and nothing runs twice that must not."""

import asyncio
from types import SimpleNamespace

import pytest
from event_loop import close_at_the_end, until
from fake_process import fake_fleet
from fake_server import FakeServer
from faults import PROMPT, WEIGHTS, connect, run, settings

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang import http
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.http import BrokenConnection, OutcomeUnknown
from megatron_dapo.engines.sglang.process_group import WeightProcessGroups
from megatron_dapo.errors import EngineError
from megatron_dapo.types import FinishReason

REPEATABLE = (
    "/pause_generation", "/continue_generation", "/flush_cache", "/update_weight_version", "/model_info",
    "/update_weights_from_disk", "/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update",
    "/server_info", "/generate",
)  # fmt: skip
NOT_REPEATABLE = ("/release_memory_occupation", "/resume_memory_occupation")
SNAPSHOT_HELPS = ("/update_weights_from_tensor", "/begin_weight_update")  # a disk update needs neither
EVERY_CALL = (*REPEATABLE, *NOT_REPEATABLE)


# A server that is only slow, because the machine is, must never look like one that hangs.
PATIENCE = 60.0
LIMITS = dict.fromkeys(("sample_timeout", "control_timeout", "start_timeout"), PATIENCE)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "PAUSES", (0.001, 0.002, 0.004))
    monkeypatch.setattr(http, "PROBE_SECONDS", PATIENCE)


def config(tmp_path, transport="disk", **servers):
    base = settings(**{"share_gpus": True, "heartbeat": 0.02, "restarts": 1, **LIMITS, **servers})
    weights = {"directory": str(tmp_path), "transport": transport, "timeout": PATIENCE}
    return base.model_copy(update={"weights": base.weights.model_copy(update=weights)})


async def one_step(engine, version, buckets=None):
    """Everything that a step of a colocated run asks of its engine; the last completion."""
    params = SamplingParams(8)
    assert (await engine.generate(f"a{version}", PROMPT, params)).finish_reason is FinishReason.STOP
    await engine.release_memory()
    await engine.load_weights(version, buckets or [WEIGHTS])
    report = await engine.serve_weights(version)
    assert report.version == version and len(report.served_by) == 1
    return await engine.generate(f"b{version}", PROMPT, params)


def transport_of(path):
    return "tensor" if path in ("/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update") else "disk"


def with_brackets(server):
    server.brackets = True


async def step_with_drop(tmp_path, path, drops):
    """A whole step, then one in which the connection of `path` breaks as `drops` says; the fleet's only process."""
    fleet, engine = await fake_fleet(config(tmp_path, transport_of(path)), tmp_path, prepare=with_brackets)
    process = fleet.processes[0]
    await one_step(engine, 1)
    first = process.server
    first.drop[path] = list(drops)
    engine.servers[0]._capabilities = None  # asked again, for /server_info
    completion = await one_step(engine, 2)
    assert [span.version for span in completion.weight_spans] == [2] and not first.drop[path]
    assert not process.server.crashes and process.server.label == "2"
    return first, process


@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("path", REPEATABLE)
async def test_a_call_that_may_run_twice_is_repeated_and_the_server_stays(tmp_path, path, drop):
    first, process = await step_with_drop(tmp_path, path, [drop, drop, drop])
    assert process.starts == 1 and not first.crashes


async def test_a_lost_reply_to_resume_does_not_cost_the_server(tmp_path):
    """The call has run, so the update goes on."""
    first, process = await step_with_drop(tmp_path, "/resume_memory_occupation", ["after", "after"])
    assert process.starts == 1 and not first.crashes


@pytest.mark.parametrize("drop", ["before", "after"])
async def test_a_server_that_may_still_have_its_memory_is_restarted(tmp_path, drop):
    """Whether it released its memory is unknown, and asking again would end it: ending it frees the memory."""
    first, process = await step_with_drop(tmp_path, "/release_memory_occupation", [drop])
    assert process.starts == 2 and not first.crashes
    assert first.calls.count("/release_memory_occupation") == 2  # one in each step: it was not repeated


async def test_a_server_that_did_not_get_its_memory_back_is_restarted(tmp_path):
    """The assumption that the call has run is wrong here; the server ends at the next call, and is replaced."""
    first, process = await step_with_drop(tmp_path, "/resume_memory_occupation", ["before"])
    assert process.starts == 2 and first.crashes == ["weights written to released memory"]


@pytest.mark.parametrize("path", EVERY_CALL)
async def test_a_server_that_dies_in_a_call_is_restarted_and_the_step_goes_on(tmp_path, path):
    first, process = await step_with_drop(tmp_path, path, ["die"])
    assert process.starts == 2 and not first.crashes


@pytest.mark.parametrize("path", [path for path in EVERY_CALL if path not in ("/model_info", "/generate")])
async def test_a_server_that_hangs_in_a_call_is_recovered_and_the_step_goes_on(tmp_path, path, monkeypatch):
    fleet, engine = await fake_fleet(
        config(tmp_path, transport_of(path), heartbeat=10), tmp_path, prepare=with_brackets
    )
    process = fleet.processes[0]
    await one_step(engine, 1)
    call = http.Connection._call

    def hurried(connection, method, called, body, seconds, *key, **options):
        """The limits of calls that hang are 200 times shorter."""
        hangs = process.server is not None and called in process.server.hanging
        return call(connection, method, called, body, seconds / 200 if hangs else seconds, *key, **options)

    monkeypatch.setattr(http.Connection, "_call", hurried)
    process.server.hanging = {path}
    engine.servers[0]._capabilities = None
    completion = await one_step(engine, 2)
    assert [span.version for span in completion.weight_spans] == [2] and not process.server.crashes
    assert process.starts == (1 if path in SNAPSHOT_HELPS else 2)


async def test_the_run_ends_only_when_the_budget_is_spent(tmp_path):
    """Every new server dies in the same call."""

    def dies(server):
        server.drop["/update_weights_from_disk"] = ["die"]

    fleet, engine = await fake_fleet(config(tmp_path, restarts=2), tmp_path, prepare=dies)
    with pytest.raises(EngineError, match=r"no server took weight version 1.*given up after 2 restarts"):
        await one_step(engine, 1)
    assert fleet.processes[0].starts == 3


async def test_one_of_two_servers_may_fail_in_every_call(tmp_path):
    """Its requests and its weights go on without it; it comes back in the background with the current weights."""
    for path in EVERY_CALL:
        fleet, engine = await fake_fleet(config(tmp_path, transport_of(path)), tmp_path, 2, prepare=with_brackets)
        first = fleet.processes[0]
        first.server.drop[path] = ["die"]
        engine.servers[0]._capabilities = None
        await engine.generate("a", PROMPT, SamplingParams(8))
        await engine.release_memory()
        report = await engine.update_weights(1, [WEIGHTS])
        assert fleet.processes[1].url in report.served_by
        while [server.state.version for server in engine.servers] != [1, 1]:
            await asyncio.sleep(0.01)
        assert first.starts >= 2  # once more if its restart was interrupted by the release of the GPUs
        await engine.close()


async def test_a_disk_update_is_not_repeated_while_the_first_one_runs(tmp_path):
    """SGLang ends when two run at once: the repeat waits until the scheduler has done what came before."""
    server = await FakeServer().start()
    server.update_seconds = 0.2
    engine = await connect([server], config(tmp_path), model=str(tmp_path))
    server.drop["/update_weights_from_disk"] = ["during", "during"]
    await engine.update_weights(1, [WEIGHTS])
    assert server.most_updates == 1 and len(server.loaded) == 3


@pytest.mark.parametrize("call", ["release", "join"])
async def test_a_call_that_must_not_run_twice_is_sent_again_only_if_it_was_not_sent(call):
    server = await FakeServer().start()
    client = close_at_the_end(SGLangClient(server.url, settings(**LIMITS).servers))
    path = {"release": "/release_memory_occupation", "join": "/init_weights_update_group"}[call]
    act = {"release": client.release_memory, "join": lambda: client.join_group({}, 1.0)}[call]
    server.drop[path] = ["after"]
    with pytest.raises(OutcomeUnknown, match="must not run twice"):
        await act()
    assert server.calls.count(path) == 1


def test_a_refused_connection_is_tried_again_whatever_the_call():
    """The server has not received it, so it cannot run twice."""

    async def main():
        server = await FakeServer().start()
        port = int(server.url.rpartition(":")[2])
        client = SGLangClient(server.url, settings(**LIMITS).servers)
        await client._until_idle()
        await server.stop()
        releasing = asyncio.ensure_future(client._control("/release_memory_occupation", {"tags": []}, repeatable=False))
        await asyncio.sleep(0.002)
        again = FakeServer()
        again.busy = -1
        await again.start(port)
        await releasing
        assert again.calls == ["/release_memory_occupation"]
        await client.close()
        await again.stop()

    http.PAUSES = (0.05, 0.1, 30.0)
    run(main())


async def test_a_connection_that_always_breaks_is_an_error_after_four_tries():
    server = await FakeServer().start()
    server.drop["/pause_generation"] = ["before"] * 9
    client = close_at_the_end(SGLangClient(server.url, settings(**LIMITS).servers))
    with pytest.raises(BrokenConnection, match=r"server http://127.0.0.1.*/pause_generation failed"):
        await client.pause()
    assert server.calls.count("/pause_generation") == 4


async def test_a_cancelled_update_leaves_no_call_behind(tmp_path):
    """It would go on in the background, with weights that may be gone, while the engine is closed or updated again."""
    servers = [await FakeServer().start() for _ in range(2)]
    engine = await connect(servers, config(tmp_path, share_gpus=False))
    before, path = asyncio.all_tasks(), "/update_weights_from_disk"
    for server in servers:
        server.hanging.add(path)
    update = asyncio.ensure_future(engine.update_weights(1, [WEIGHTS]))
    await until(lambda: all(path in server.calls for server in servers))
    update.cancel()
    await asyncio.wait([update])
    for _ in range(50):  # turns of the event loop, however long they take
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() - before if "load_from_disk" in repr(task)]


async def test_a_cancelled_broadcast_leaves_no_call_behind():
    running, ended = asyncio.Event(), []

    async def receive(*_):
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            ended.append("receive")

    server = SimpleNamespace(name="a", incarnation=0, receive_broadcast=receive)
    groups = WeightProcessGroups(WeightTransportConfig(), [server])
    broadcast = asyncio.ensure_future(groups.broadcast(None, {}, "1"))
    await running.wait()
    broadcast.cancel()
    await asyncio.wait([broadcast])
    for _ in range(50):
        await asyncio.sleep(0)
    assert broadcast.cancelled() and ended == ["receive"]


async def test_requests_on_their_way_do_not_hold_up_a_weight_update(tmp_path):
    """A paused SGLang keeps a request that arrives then and does not abort it: after 60 s the server was restarted. The
    pause itself takes a second if requests run, so they are aborted before."""

    async def arrives_late(server, body):
        if body.get("logprob_start_len") != 0:  # not the proof's request
            await asyncio.sleep(0.4)

    server = await FakeServer(seconds=1000.0, fault=arrives_late).start()
    engine = await connect([server], config(tmp_path, share_gpus=False))
    sent = [asyncio.ensure_future(engine.generate(f"{i}", PROMPT, SamplingParams(8))) for i in range(6)]
    await asyncio.sleep(0.1)
    report = await engine.update_weights(1, [WEIGHTS])
    assert report.served_by == (server.url,) and not server.crashes
    done = await asyncio.gather(*sent)
    assert all(one.finish_reason is FinishReason.ABORT for one in done)
    calls = [path for path in server.calls if path in ("/abort_request", "/pause_generation")]
    assert calls[-1] == "/pause_generation" and calls.count("/pause_generation") == 1


async def test_no_request_is_sent_on_a_connection_that_the_server_may_be_closing(monkeypatch):
    """The server breaks connections that were idle for 0.3 s; clients of SGLang's 5 s drop theirs after 2."""
    assert http.KEEP_ALIVE <= 2.5
    monkeypatch.setattr(http, "KEEP_ALIVE", 0.1)
    server = await FakeServer().start()
    server.keep_alive = 0.3
    engine = await connect([server], settings(**LIMITS, attempts=1))
    for number in range(3):
        await asyncio.gather(*(engine.generate(f"{number}-{i}", PROMPT, SamplingParams(8)) for i in range(4)))
        await asyncio.sleep(0.35)
        await engine.servers[0].pause()
        await asyncio.sleep(0.35)
        await engine.servers[0].resume()
    assert server.calls.count("/pause_generation") == 3 and server.calls.count("/continue_generation") == 4
