"""External servers that come and go: where their addresses come from, what a joiner and a leaver get, and leases."""

import asyncio
import socket

import aiohttp
import pytest
from event_loop import close_at_the_end, until
from fake_server import FakeServer
from faults import PROMPT, WEIGHTS, fill_batch, settings

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang import client, fleet, http
from megatron_dapo.engines.sglang.client import CHECKSUM_LOADERS
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.engines.sglang.membership import Membership
from megatron_dapo.engines.sglang.response_parser import lease_of
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.engines.sglang.weight_proof import checksums_of
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import flatten
from megatron_dapo.types import FinishReason, as_tokens

KEY = "MEGATRON_DAPO_MEMBERSHIP_KEY"


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(fleet, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(http, "PROBE_SECONDS", 5.0)  # on a busy machine a reply takes longer
    monkeypatch.setenv(KEY, "secret")


def config(folder, *urls, **servers):
    base = settings(urls=list(urls), api_key_env=KEY, **{"heartbeat": 0.05, "start_timeout": 10} | servers)
    return base.model_copy(update={"weights": base.weights.model_copy(update={"directory": str(folder)})})


async def test_a_file_names_servers_and_keeps_its_last_word(tmp_path):
    path = tmp_path / "servers"
    members = Membership(["http://a:1/", f"file://{path}"], None, list)

    async def twice():
        await members.current()
        return await members.current()

    assert members.changes and await twice() == ["http://a:1"]  # the file does not exist yet
    path.write_bytes(b"# spot \xff nodes\nhttp://b:2\nnonsense\nhttp://c:300000\nhttp://d:3o\nhttp://a:1  # again\n")
    assert await twice() == ["http://a:1", "http://b:2"]
    path.unlink()
    assert await twice() == ["http://a:1", "http://b:2"]
    path.write_text("")
    assert await twice() == ["http://a:1"]
    assert not Membership(["http://a:1"], None, list).changes
    assert Membership(["http://b:1", "http://a:1/", "http://b:1/"], None, list).fixed == ["http://b:1", "http://a:1"]


@pytest.mark.parametrize("cut", ["", "http://a:1\n", "http://a:1\nhttp://b:20"])
async def test_a_file_that_is_read_while_it_is_written_changes_nothing(tmp_path, cut):
    path = tmp_path / "servers"
    whole = "http://a:1\nhttp://b:200\n"
    members = Membership([f"file://{path}"], None, list)
    said = []
    for text in (whole, whole, cut, whole, cut, whole):
        path.write_text(text)
        said.append(await members.current())
    assert said[1:] == [["http://a:1", "http://b:200"]] * 5


async def test_every_address_of_a_name_is_a_server(monkeypatch):
    resolve = asyncio.get_running_loop().getaddrinfo

    async def getaddrinfo(host, port, **options):
        if host == "no..name":
            return await resolve(host, port, **options)
        if addresses is None:
            raise socket.gaierror("no such name")
        assert (host, port) == ("engines", 30000)
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    members = Membership(["dns://engines:30000"], None, list)
    addresses = None
    assert await members.current() == []
    assert await Membership(["dns://no..name:30000"], None, list).current() == []
    addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    expected = ["http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://[fd00::1]:30000"]
    assert await members.current() == [] and await members.current() == expected
    addresses = None
    assert await members.current() == expected


async def test_a_source_that_names_no_server_says_why(tmp_path):
    servers = config(tmp_path, f"file://{tmp_path}/absent", "dns://no..name:1", start_timeout=0.1)
    with pytest.raises(EngineError, match=r"absent cannot be read: .*No such file.*dns://no..name:1 cannot be read"):
        await Fleet(servers, str(tmp_path), tmp_path, client_processes=False).start()


async def test_servers_are_posted_with_the_key(tmp_path):
    first, second = [await FakeServer().start() for _ in range(2)]
    group = Fleet(config(tmp_path, first.url, "listen://127.0.0.1:0"), str(tmp_path), tmp_path, client_processes=False)
    engine = close_at_the_end(await group.start())
    async with aiohttp.ClientSession() as session:

        async def call(method, body=None, key="secret"):
            headers, url = {"Authorization": f"Bearer {key}"}, f"{group.membership.address}/servers"
            async with session.request(method, url, json=body, headers=headers) as reply:
                return reply.status, await reply.json()

        assert (await call("POST", {"url": second.url}, key="wrong"))[0] == 401
        assert (await call("POST", {"url": "ftp://x"}))[0] == (await call("POST", []))[0] == 400
        assert (await call("POST", {"url": "http://x:300000"}))[0] == 400
        assert (await call("POST", {"url": second.url}))[0] == 200
        await until(lambda: [s.state.phase for s in engine.servers] == [Phase.SERVING] * 2)
        _, said = await call("GET")
        assert [(one["url"], one["state"]) for one in said["servers"]] == [
            (first.url, "serving"), (second.url, "serving"),
        ]  # fmt: skip
        await call("DELETE", {"url": second.url})
        await until(lambda: len(engine.servers) == 1)


async def test_a_joiner_gets_the_current_weights_alone_and_the_samples_of_a_leaver_move(tmp_path):
    servers = [await FakeServer(seconds=0.3).start() for _ in range(3)]
    listed = tmp_path / "servers"
    listed.write_text(servers[0].url)
    chosen = config(tmp_path, f"file://{listed}")
    engine = await Fleet(chosen, str(tmp_path), tmp_path, client_processes=False).start()
    await engine.update_weights(3, [WEIGHTS])
    paused = servers[0].calls.count("/pause_generation")
    listed.write_text("\n".join(server.url for server in servers[:2]))
    await until(lambda: len(engine.servers) == 2 and engine.servers[1].state.serves(3))
    assert servers[0].calls.count("/pause_generation") == paused and len(servers[1].loaded) == 1
    assert lease_of(servers[1].label)[0]
    servers[0].seconds = 30.0  # what it runs takes too long
    collecting = asyncio.ensure_future(fill_batch(engine, chosen, groups=12))
    busy = [asyncio.ensure_future(engine.generate(f"x{i}", as_tokens([i]), SamplingParams(8))) for i in range(16)]
    await asyncio.sleep(0.1)
    listed.write_text("\n".join(server.url for server in servers[1:]))
    batch = await collecting
    assert {span.version for sample in batch.samples for span in sample.weight_spans} == {3}
    moved = [completion for completion in await asyncio.gather(*busy) if completion.moved]
    assert moved and {completion.server for completion in moved} == {servers[0].url}
    await until(lambda: len(engine.servers) == 2 and engine.servers[1].state.serves(3))
    report = await engine.update_weights(4, [WEIGHTS])
    assert set(report.served_by) == {servers[1].url, servers[2].url} and not report.failed
    await engine.close()
    assert [server.label for server in servers[1:]] == ["4", "4"]  # the leases have ended


async def test_an_update_waits_for_the_next_server_when_the_last_one_has_left(tmp_path):
    """As requests do: spot nodes come back."""
    server, listed = await FakeServer().start(), tmp_path / "servers"
    listed.write_text(server.url)
    group = Fleet(config(tmp_path, f"file://{listed}"), str(tmp_path), tmp_path, client_processes=False)
    engine = close_at_the_end(await group.start())
    listed.write_text("")
    await until(lambda: not engine.servers)
    update = asyncio.ensure_future(engine.update_weights(1, [WEIGHTS]))
    await asyncio.wait([update], timeout=0.3)
    listed.write_text(server.url)
    assert (await update).served_by == (server.url,)


async def test_a_server_that_returns_as_another_process_gets_what_the_first_one_had(tmp_path):
    """It proves its weights with a module that every process of a server must be told to load."""
    sums = {name: f"{n}:x:{total}" for name, (n, total) in checksums_of(flatten(WEIGHTS)).read().items()}
    first, returning = [await FakeServer().start() for _ in range(2)]
    first.checksums = returning.checksums = sums
    listed = tmp_path / "servers"
    both = f"{first.url}\n{returning.url}\n"
    listed.write_text(both)
    chosen = config(tmp_path, f"file://{listed}")
    engine = close_at_the_end(await Fleet(chosen, str(tmp_path), tmp_path, client_processes=False).start())
    await until(lambda: [s.state.phase for s in engine.servers] == [Phase.SERVING] * 2)
    await engine.update_weights(1, [WEIGHTS])
    assert returning.loaded.count(CHECKSUM_LOADERS[0]) == 1
    listed.write_text(first.url)
    await until(lambda: len(engine.servers) == 1)
    await returning.stop()
    other = FakeServer()
    other.checksums = sums
    await other.start(int(returning.url.rpartition(":")[2]))
    listed.write_text(both)
    await until(lambda: len(engine.servers) == 2 and engine.servers[1].state.serves(1))
    assert other.loaded.count(CHECKSUM_LOADERS[0]) == 1


async def test_a_server_belongs_to_one_run_at_a_time(tmp_path, monkeypatch):
    server = await FakeServer().start()
    start = {
        name: lambda name=name: Fleet(
            config(tmp_path, server.url), str(tmp_path), tmp_path / name, client_processes=False
        ).start()
        for name in ("one", "two")
    }
    engine = await start["one"]()
    await engine.update_weights(1, [WEIGHTS])
    with pytest.raises(EngineError, match=r"belongs to run \w+ for another \d+ s.*its own servers"):
        await start["two"]()
    completion = await engine.generate("r", PROMPT, SamplingParams(8))
    assert completion.finish_reason is FinishReason.STOP and completion.weight_spans[0].version == 1
    monkeypatch.setattr(client, "LEASE_SECONDS", 1000.0)  # more than half of it is over
    _, until_then = lease_of(server.label)
    engine.servers[0]._leased_until -= 400
    await until(lambda: lease_of(server.label)[1] > until_then)
    again = await start["one"]()  # resumed after a kill: the same run
    await again.close()
    await (await start["two"]()).close()
    await engine.supervision.stop()


@pytest.mark.parametrize(
    ("rollout", "match"),
    [
        ({"servers": {"urls": ["listen://0.0.0.0:1"]}}, "set api_key_env"),
        ({"servers": {"urls": ["dns://x:1"], "share_gpus": True}}, "share_gpus"),
        ({"servers": {"urls": ["dns://x:1"]}, "weights": {"transport": "tensor"}}, "use disk or distributed"),
    ],
)
def test_sources_that_cannot_work_are_refused(rollout, match):
    with pytest.raises(ValueError, match=match):
        RolloutConfig(**rollout)
