"""The load of the engines during a rollout."""

import asyncio

import pytest

from megatron_dapo.engines.server_load import LoadReadings, watch_load
from megatron_dapo.errors import EngineError


class Server:
    """Answers with these loads in turn; an error is raised."""

    def __init__(self, *replies):
        self.replies, self.connection = list(replies), self

    async def get(self, path, **options):
        assert path.startswith("/v1/loads")
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return {"loads": [{"token_usage": usage, "num_waiting_reqs": waiting} for usage, waiting in reply]}


class Engine:
    def __init__(self, *servers):
        self.servers = list(servers)


async def watch(engine, readings_wanted):
    async with watch_load(engine, every=0.001) as load:
        while len(load.kv_use) < readings_wanted:
            await asyncio.sleep(0.001)
    return load


def test_the_mean_and_the_highest_load_of_all_servers():
    engine = Engine(Server([(0.2, 0)], [(0.6, 4)]), Server([(0.4, 2)], [(1.0, 8)]))
    load = asyncio.run(watch(engine, 2))
    assert (load.kv_use[:2], load.queue[:2]) == ([pytest.approx(0.3), pytest.approx(0.8)], [2, 12])
    found = LoadReadings(load.kv_use[:2], load.queue[:2]).metrics()
    assert found["rollout/kv_use"] == pytest.approx(0.55) and found["rollout/kv_use_max"] == pytest.approx(0.8)
    assert (found["rollout/queue"], found["rollout/queue_max"]) == (7, 12)


def test_a_server_that_does_not_answer_is_left_out():
    load = asyncio.run(watch(Engine(Server(EngineError("gone")), Server([(0.5, 1)])), 1))
    assert (load.kv_use[0], load.queue[0]) == (0.5, 1)


def test_an_engine_without_servers_has_no_load():
    async def one():
        async with watch_load(object()) as load:
            await asyncio.sleep(0)
        return load.metrics()

    assert asyncio.run(one()) == {}


def test_sglang_reports_its_load(sglang_server):
    async def ask():
        client = sglang_server.process.client()
        engine = Engine(client)
        try:
            async with watch_load(engine, every=0.01) as load:
                async with asyncio.timeout(30):
                    while not load.kv_use:
                        await asyncio.sleep(0.01)
        finally:
            await client.close()
        return load.metrics()

    found = asyncio.run(ask())
    assert 0 <= found["rollout/kv_use"] <= 1 and found["rollout/queue"] == 0
