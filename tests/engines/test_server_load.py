"""The load of the engines during a rollout."""

import asyncio
import gc

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


@pytest.mark.parametrize("every", [1000.0, 0.0], ids=["between two readings", "during a reading"])
def test_a_collection_that_is_cancelled_as_it_ends_is_cancelled(every):
    """Otherwise a queue that is interrupted then goes on and waits for weights that never come."""
    reported = []

    async def collect():
        async with watch_load(Engine(Server([(0.5, 1)])), every):
            for _ in range(3):
                await asyncio.sleep(0)
            asyncio.current_task().cancel()
        await asyncio.Event().wait()

    async def interrupted():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        done, _ = await asyncio.wait([task := asyncio.ensure_future(collect())], timeout=5)
        for _ in range(5):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task(), task}
        return bool(done) and task.cancelled(), left

    assert asyncio.run(interrupted()) == (True, set())
    gc.collect()
    assert not reported, "the watch left something behind"


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
