"""A fleet that changes, on a virtual clock: servers come, go, die, hang and differ in speed, and no sample is lost."""

import asyncio

import pytest
from virtual_servers import VirtualServer, grade, next_prompt, tool_occupancy, virtual_fleet

from megatron_dapo.planner.simulation.run import run_virtually
from megatron_dapo.rollout.sampler import Sampler

SLOW = "http://server-1"


def make(url, config):
    return VirtualServer(url, config, speed=0.3 if url == SLOW else 1.0)


async def train(tmp_path, sizes, steps=12):
    """(batches, updates, joiners, servers, speeds of the slow one). The fleet has each size for a third of the steps.
    In each third one is killed, in the last one another hangs during an update, and the one that was killed is back."""
    batches, updates, joined, speeds = [], [], {}, []
    options = {"sampler": {"unfinished": "continue"}, "samples_per_prompt": 8, "max_response_tokens": 2000}
    clock = asyncio.get_running_loop().time
    async with virtual_fleet(tmp_path, sizes[0], make, **options) as (fleet, engine):
        sampler = Sampler(engine, grade, next_prompt(), engine.config, groups_per_step=64)

        async def disturb(step):
            await asyncio.sleep(1)
            if step % (steps // 3) == 0:
                fleet.list_servers(sizes[step * 3 // steps])
                joined.update({url: clock() for url in fleet.listed if url not in fleet.every})
            await asyncio.sleep(1)
            if step % (steps // 3) == 1:
                fleet.every["http://server-2"].kill()
            if step == steps - 2:
                fleet.every["http://server-2"].alive = True
                fleet.every[f"http://server-{sizes[2] - 1}"].answering = False

        for step in range(steps):
            disturbing = asyncio.ensure_future(disturb(step))
            batches.append(await sampler.collect(step))
            await disturbing
            began = clock()
            report = await engine.update_weights(step + 1, [])
            updates.append((clock() - began, report))
            speeds.append(engine.speeds().get(SLOW, 1.0))
        await asyncio.sleep(60)
        return batches, updates, joined, dict(fleet.every), speeds


@pytest.mark.parametrize("sizes", [(4, 1, 6), (16, 4, 32)])
def test_no_sample_is_lost_and_no_update_waits_for_a_dead_server(tmp_path, sizes):
    batches, updates, joined, servers, speeds = run_virtually(train(tmp_path, sizes))
    for step, batch in enumerate(batches):
        assert len(batch.groups) == 64 and batch.metrics["rollout/samples_failed"] == 0
        assert batch.metrics["rollout/staleness_max"] <= 1
        assert all(len(group.samples) == 8 for group in batch.groups), step
    seconds = [seconds for seconds, _ in updates]
    assert max(seconds) - min(seconds) < 1.0, seconds
    for url, when in joined.items():
        replied = servers[url].first_reply
        assert replied is not None and replied - when < 30, url
    assert all(server.most_loads <= 1 for server in servers.values())
    assert "http://server-2" in updates[-1][1].served_by or sizes[2] <= 2
    assert min(speeds) < 0.5


def test_a_tool_that_takes_as_long_as_generating_keeps_the_engines_full(tmp_path):
    assert run_virtually(tool_occupancy(tmp_path, 4.0, groups=64, max_running=32)) > 0.9
