"""Supervision: a server that cannot generate is found, a sample has a deadline, restarts are limited but recover."""

import asyncio
import time
from typing import ClassVar

import pytest
from event_loop import until
from fake_process import fake_fleet
from fake_server import FakeServer
from faults import PROMPT, WEIGHTS, connect, fill_batch, run, settings

from megatron_dapo.engines.protocol import ForeignWeightsError, SamplingParams
from megatron_dapo.engines.sglang import client, server_state, supervisor, transports
from megatron_dapo.engines.sglang.process_group import members_of
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.engines.sglang.supervisor import RestartBudget
from megatron_dapo.errors import EngineError
from megatron_dapo.types import FinishReason


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(client, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(server_state, "BACKOFF", (0.01, 0.05))


def config(tmp_path, transport="disk", keep_snapshot=True, **servers):
    base = settings(**{"heartbeat": 0.02, "health_interval": 0.1, "start_timeout": 5, "sample_timeout": 20, **servers})
    weights = {"directory": str(tmp_path), "transport": transport, "keep_snapshot": keep_snapshot}
    return base.model_copy(update={"weights": base.weights.model_copy(update=weights)})


async def never(server, body):
    if body.get("logprob_start_len") != 0:
        await asyncio.sleep(1000)


async def test_a_server_that_replies_but_generates_nothing_is_replaced(tmp_path):
    """Its requests move to the new process, long before their own deadline."""
    chosen = config(tmp_path)
    fleet, engine = await fake_fleet(chosen, tmp_path)
    process = fleet.processes[0]
    await engine.update_weights(1, [WEIGHTS])
    process.server.fault, process.server.hanging = never, {"/health_generate"}
    batch = await asyncio.wait_for(fill_batch(engine, chosen), 10)
    assert process.starts == 2
    assert {span.version for sample in batch.samples for span in sample.weight_spans} == {1}


async def test_a_server_that_completes_samples_is_not_asked_to_prove_it(tmp_path):
    fleet, engine = await fake_fleet(config(tmp_path, health_interval=30), tmp_path)
    for number in range(5):
        await engine.generate(f"r{number}", PROMPT, SamplingParams(8))
        await asyncio.sleep(0.03)
    calls = fleet.processes[0].server.calls
    assert "/health_generate" not in calls and calls.count("/model_info") > 3


@pytest.mark.parametrize("state", ["memory released", "between load and serve"])
async def test_a_server_that_must_not_generate_is_not_asked_to(tmp_path, state):
    """SGLang's check fails while it is paused: a healthy server would be restarted."""
    fleet, engine = await fake_fleet(config(tmp_path, share_gpus=True), tmp_path)
    process = fleet.processes[0]
    await engine.release_memory()
    if state == "between load and serve":
        await engine.load_weights(1, [WEIGHTS])
    process.server.calls.clear()
    await asyncio.sleep(0.4)
    assert "/health_generate" not in process.server.calls and "/model_info" in process.server.calls
    assert process.starts == 1 and not process.server.crashes


async def test_a_pause_that_begins_during_the_check_is_not_a_failure(tmp_path):
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    process = fleet.processes[0]
    process.server.hanging = {"/health_generate"}
    while "/health_generate" not in process.server.calls:
        await asyncio.sleep(0.005)
    await engine.load_weights(1, [WEIGHTS])
    process.server.hanging = set()
    await asyncio.sleep(0.3)
    await engine.serve_weights(1)
    assert process.starts == 1
    assert (await engine.generate("r", PROMPT, SamplingParams(8))).finish_reason is FinishReason.STOP


async def test_a_sample_that_takes_too_long_moves_to_another_server():
    """The server works and has lost only this request; the request is aborted there."""
    servers = [await FakeServer().start() for _ in range(2)]
    engine = await connect(servers, settings(sample_timeout=0.3))
    lost = []

    async def lose_first(server, body):
        if not lost:
            lost.append((server, body["rid"]))
            await asyncio.sleep(1000)

    for server in servers:
        server.fault = lose_first
    completion = await engine.generate("r", PROMPT, SamplingParams(8))
    [(first, name)] = lost
    assert completion.finish_reason is FinishReason.STOP and name == "r"
    other = next(server for server in servers if server is not first)
    assert other.served == ["r-try1"] and completion.server == other.url
    await asyncio.sleep(0.05)
    assert "/abort_request" in first.calls


def test_the_deadline_of_a_sample_grows_with_its_tokens():
    servers = settings(sample_timeout=None).servers
    assert servers.sample_seconds(0) == 300 and servers.sample_seconds(20_480) == 300 + 4096
    assert settings(sample_timeout=7).servers.sample_seconds(20_480) == 7


def test_restarts_are_limited_and_come_back_with_service(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    budget = RestartBudget(limit=2, recovery=60)
    budget.serving()
    assert budget.spend() and budget.spend() and not budget.spend()
    budget.serving()
    now += 59
    assert not budget.spend()  # and a server that is down gains nothing
    now += 600
    assert not budget.spend()
    budget.serving()
    now += 61
    assert budget.spend() and not budget.spend()
    budget.serving()
    now += 10_000
    assert budget.spend() and budget.spend() and not budget.spend()  # never more than the limit


async def test_a_server_that_dies_again_and_again_after_good_service_is_always_restarted(tmp_path):
    chosen = config(tmp_path, restarts=1, restart_recovery=0.01)
    fleet, engine = await fake_fleet(chosen, tmp_path)
    process = fleet.processes[0]
    await engine.update_weights(1, [WEIGHTS])
    for number in range(4):
        await asyncio.sleep(0.02)
        process.server.drop["/generate"] = ["die"]
        completion = await engine.generate(f"r{number}", PROMPT, SamplingParams(8))
        assert [span.version for span in completion.weight_spans] == [1]
    assert process.starts == 5


async def test_an_unexpected_error_of_a_restart_is_logged_and_the_next_restart_helps(tmp_path, monkeypatch, caplog):
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    process = fleet.processes[0]
    spawn = process.spawn

    def no_room():
        monkeypatch.setattr(process, "spawn", spawn)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process, "spawn", no_room)
    process.server.drop["/generate"] = ["die"]
    completion = await asyncio.wait_for(engine.generate("r", PROMPT, SamplingParams(8)), 10)
    assert completion.finish_reason is FinishReason.STOP and process.starts == 2
    [failed] = [record for record in caplog.records if "restart 1: [Errno 28]" in record.getMessage()]
    assert failed.exc_info


async def test_an_unexpected_error_while_a_server_is_admitted_again_is_logged_and_a_restart_helps(
    tmp_path, monkeypatch, caplog
):
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    admit = engine.admit

    async def broken(server):
        monkeypatch.setattr(engine, "admit", admit)
        raise ValueError("a bug")

    monkeypatch.setattr(engine, "admit", broken)
    fleet.recover(engine.servers[0], EngineError("a call failed"))
    completion = await asyncio.wait_for(engine.generate("r", PROMPT, SamplingParams(8)), 10)
    assert completion.finish_reason is FinishReason.STOP and fleet.processes[0].starts == 2
    [failed] = [record for record in caplog.records if "cannot go on as it is: a bug" in record.getMessage()]
    assert failed.exc_info


async def test_an_unexpected_error_of_a_health_check_is_logged_and_counts_as_a_missed_one(
    tmp_path, monkeypatch, caplog
):
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    process, [server] = fleet.processes[0], engine.servers
    answers, left = server.answers, [2]

    async def broken():
        left[0] -= 1
        if left[0] >= 0:
            raise ValueError("a bug")
        await answers()

    monkeypatch.setattr(server, "answers", broken)
    await asyncio.wait_for(until(lambda: left[0] < 0), 10)
    failed = [record for record in caplog.records if "cannot be checked: a bug" in record.getMessage()]
    assert process.starts == 1 and len(failed) == 2 and failed[0].exc_info
    process.server.drop["/generate"] = ["die"]
    completion = await asyncio.wait_for(engine.generate("r", PROMPT, SamplingParams(8)), 10)
    assert completion.finish_reason is FinishReason.STOP and process.starts == 2


async def test_requests_wait_as_long_as_a_server_is_being_restarted(tmp_path):
    """The patience for servers that serve nothing does not run meanwhile."""
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    process = fleet.processes[0]
    ready = process.wait_ready

    async def slowly(server):
        await asyncio.sleep(0.5)
        await ready(server)

    process.wait_ready = slowly
    engine.patience = 0.1
    process.server.drop["/generate"] = ["die"]
    completion = await engine.generate("r", PROMPT, SamplingParams(8))
    assert completion.finish_reason is FinishReason.STOP and process.starts == 2


async def test_requests_do_not_wait_for_a_server_whose_memory_was_the_trainers_base(tmp_path):
    """Nothing can bring it back, and 900 s of patience are for servers that may come back."""
    chosen = config(tmp_path)
    shared = chosen.servers.model_copy(update={"share_base": True})  # without the adapters that it needs
    fleet, engine = await fake_fleet(chosen.model_copy(update={"servers": shared}), tmp_path)
    engine.patience = 900
    fleet.processes[0].server.drop["/generate"] = ["die"]
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=r"no server serves weight version 0.*computes with its memory"):
            await engine.generate("r", PROMPT, SamplingParams(8))
    assert fleet.processes[0].starts == 1


async def test_a_server_with_the_trainers_base_is_used_again_when_it_replies_again(tmp_path):
    """It cannot be restarted, so there is no restart to wait for."""
    chosen = config(tmp_path, control_timeout=0.1, restart_recovery=1800)
    shared = chosen.servers.model_copy(update={"share_base": True})  # without the adapters that it needs
    fleet, engine = await fake_fleet(chosen.model_copy(update={"servers": shared}), tmp_path)
    server = fleet.processes[0].server
    server.hanging = {"/model_info"}
    await until(lambda: engine.servers[0].state.phase is Phase.GIVEN_UP)
    server.hanging = set()
    async with asyncio.timeout(20):
        completion = await engine.generate("r", PROMPT, SamplingParams(8))
    assert completion.finish_reason is FinishReason.STOP and fleet.processes[0].starts == 1


async def test_an_unexpected_error_while_a_server_is_given_up_is_logged_and_it_is_asked_again(
    tmp_path, monkeypatch, caplog
):
    chosen = config(tmp_path, control_timeout=0.1, restart_recovery=1800)
    shared = chosen.servers.model_copy(update={"share_base": True})  # without the adapters that it needs
    fleet, engine = await fake_fleet(chosen.model_copy(update={"servers": shared}), tmp_path)
    process, [server] = fleet.processes[0].server, engine.servers
    process.hanging = {"/model_info"}
    await until(lambda: server.state.phase is Phase.GIVEN_UP)
    answers = server.answers

    async def broken():
        monkeypatch.setattr(server, "answers", answers)
        process.hanging = set()
        raise ValueError("a bug")

    monkeypatch.setattr(server, "answers", broken)
    await asyncio.wait_for(until(lambda: server.state.phase is Phase.SERVING), 10)
    [failed] = [record for record in caplog.records if "cannot be checked: a bug" in record.getMessage()]
    assert failed.exc_info


@pytest.mark.parametrize("in_flight", [False, True])
async def test_requests_wait_for_an_update_only_where_one_can_come(tmp_path, in_flight):
    """Without a snapshot a restarted server needs an update, which follows the batch that waits for the server, unless
    weights change while a batch is generated."""
    chosen = config(tmp_path, keep_snapshot=False, transport="tensor")
    fleet, engine = await fake_fleet(chosen.model_copy(update={"max_staleness": int(in_flight)}), tmp_path)
    engine.patience = 900
    await engine.update_weights(1, [WEIGHTS])
    fleet.processes[0].server.drop["/generate"] = ["die"]
    request = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
    await asyncio.wait([request], timeout=1 if in_flight else 20)
    assert request.done() != in_flight
    if not in_flight:
        assert "it holds weight version 0, current is 1" in str(request.exception())
    await until(lambda: fleet.processes[0].starts == 2 and not engine.servers[0].admitting.locked())
    await engine.update_weights(2, [WEIGHTS])
    if not in_flight:
        request = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
    async with asyncio.timeout(20):  # an update aborts what waits for the version before it
        assert (await request).finish_reason is (FinishReason.ABORT if in_flight else FinishReason.STOP)


@pytest.mark.parametrize("label", ["99", "somebody-elses"])
async def test_weights_that_were_never_sent_stop_the_batch_at_once(tmp_path, label):
    chosen = config(tmp_path)
    _, engine = await fake_fleet(chosen, tmp_path, count=2)
    await engine.update_weights(1, [WEIGHTS])
    for process in engine.supervision.processes:
        process.server.label = label
        process.server.calls.clear()
    with pytest.raises(ForeignWeightsError, match=rf"{label}.*never sent.*rollout.servers.api_key_env"):
        await engine.generate("r", PROMPT, SamplingParams(8))
    assert sum(process.server.calls.count("/generate") for process in engine.supervision.processes) == 1
    with pytest.raises(ForeignWeightsError):
        await fill_batch(engine, chosen)


class Group:
    """A process group that knows which processes joined it."""

    made: ClassVar[list[list[tuple[str, int]]]] = []

    def __init__(self, config, servers, senders):
        self.members, self.senders = transports.members_of(servers), senders
        self.names = {0: str(len(self.made))}

    async def join(self, link):
        self.made.append(self.members)

    async def broadcast(self, flat, body, label, link):
        assert body["group_name"] == self.names[0] and label.startswith("updating-to-")

    async def leave(self):
        pass


@pytest.mark.parametrize("noticed", ["restarted by the fleet", "restarted by somebody else"])
def test_a_restarted_server_joins_a_new_process_group(tmp_path, monkeypatch, noticed):
    """Its URL is the same, but the new process is in no group: the old group would wait for it for ever."""
    monkeypatch.setattr(transports, "WeightProcessGroups", Group)
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(supervisor, "KILL_SECONDS", 0.1)

    async def main():
        chosen = config(tmp_path, transport="distributed")
        fleet, engine = await fake_fleet(chosen, tmp_path, count=2)
        first = members_of(engine.servers)
        for version in (1, 2):
            await update(engine, fleet, version)
        assert Group.made == [first]  # one group for both updates
        if noticed == "restarted by the fleet":
            fleet.processes[1].server.dead = True
            while members_of(engine.servers) == first or engine.servers[1].state.version is None:
                await asyncio.sleep(0.01)
        else:
            fleet.processes[1].server.label = "default"
        await update(engine, fleet, 3)
        second = members_of(engine.servers)
        assert Group.made[1:] == [second] and second[0] == first[0] and second[1] != first[1]
        await update(engine, fleet, 4)
        assert len(Group.made) == 2
        await engine.close()

    async def update(engine, fleet, version):
        report = await engine.update_weights(version, [WEIGHTS])
        assert not report.failed and [process.server.label for process in fleet.processes] == [str(version)] * 2

    run(main())


async def test_a_started_server_is_watched_between_the_calls(tmp_path):
    """Nothing is sent to it, and it is back before the next request needs it."""
    fleet, engine = await fake_fleet(config(tmp_path), tmp_path)
    await engine.update_weights(1, [WEIGHTS])
    fleet.processes[0].server.dead = True
    deadline = time.monotonic() + 10
    while fleet.processes[0].starts < 2 or not engine.servers[0].state.serves(1):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("ours", [True, False])
async def test_no_update_waits_for_a_dead_server_and_it_is_used_when_it_is_back(tmp_path, ours):
    """Without a snapshot: it gets the next version."""
    chosen = config(tmp_path, "tensor", keep_snapshot=False, restarts=1, restart_recovery=0.3, control_timeout=30)
    fleet, engine = await fake_fleet(chosen, tmp_path, count=2)
    process, gone, start_fails = fleet.processes[1], engine.servers[1], asyncio.Event()
    ready, process.ours = process.wait_ready, ours

    async def never_ready(server):
        await start_fails.wait()
        raise EngineError("it does not start")

    process.wait_ready = never_ready
    await process.end()
    if not ours:  # nobody knows whether it lives, and nobody ends it
        process.alive, process.end = lambda: True, lambda patience=0: asyncio.sleep(0)
    engine.supervision.check(gone)
    await until(lambda: gone.state.phase is Phase.RECOVERING)
    report = await engine.update_weights(1, [WEIGHTS])
    assert report.served_by == (fleet.processes[0].url,) and gone.state.phase is Phase.RECOVERING
    start_fails.set()
    await until(lambda: gone.state.phase is Phase.GIVEN_UP)
    process.wait_ready = ready
    if not ours:
        await ready(None)  # its launcher has started it
    await until(lambda: not gone.state.down)
    report = await engine.update_weights(2, [WEIGHTS])
    assert len(report.served_by) == 2
    fleet.check(gone)
    assert gone.state.phase is Phase.SUSPECT  # it is supervised again
    await until(lambda: gone.state.phase is Phase.SERVING)


async def test_a_server_that_only_others_can_restart_is_waited_for_once(tmp_path):
    """Each wait takes up to start_timeout; `restarts` of them would be an hour."""
    fleet, engine = await fake_fleet(config(tmp_path, restarts=3), tmp_path)
    process, waits = fleet.processes[0], []

    async def never_ready(server):
        waits.append(server)
        raise EngineError("it was not ready after 900 s")

    await process.end()
    process.ours, process.alive, process.wait_ready = False, lambda: True, never_ready
    await until(lambda: engine.servers[0].state.phase is Phase.GIVEN_UP)
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("path", "why"), [("/model_info", "it does not answer"), ("/pause_generation", "1 s after the other")]
)
async def test_a_server_that_hangs_holds_no_update(tmp_path, path, why):
    """Nor does one that replies, but is much slower than the others."""
    fleet, engine = await fake_fleet(config(tmp_path, control_timeout=4, heartbeat=600), tmp_path, count=2)
    fleet.processes[1].server.hanging = {path}
    fleet.processes[1].server.calls.clear()
    report = await engine.update_weights(1, [WEIGHTS])
    assert report.served_by == (fleet.processes[0].url,) and why in str(report.failed)
    assert fleet.processes[1].server.calls.count("/update_weights_from_disk") == 0
