"""The load balancer refills a full server in batches, and every request gets its turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.engines.sglang.load_balancer import AFFINITY_SLACK, REFILL_SHARE, LoadBalancer
from megatron_dapo.engines.sglang.server_state import ServerState


class Server(SimpleNamespace):
    """What the load balancer reads of a client."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def make(count: int, max_running: int) -> tuple[list[Any], LoadBalancer]:
    servers: list[Any] = [Server(state=ServerState(), in_flight=0) for _ in range(count)]
    for server in servers:
        server.state.served(1)
    return servers, LoadBalancer(servers, max_running)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def acquire(balancer: LoadBalancer, key: int = 0) -> Coroutine[Any, Any, Any]:
    return balancer.acquire(key, 1, lambda: False, 10.0)


def test_a_full_server_is_refilled_in_batches() -> None:
    async def scenario() -> None:
        running = 4 * REFILL_SHARE
        (only,), balancer = make(1, running)
        tasks = [asyncio.ensure_future(acquire(balancer)) for _ in range(running + 10)]
        await settle()
        assert only.in_flight == running
        for ended in range(1, 4):
            balancer.release(only)
            await settle()
            assert only.in_flight == running - ended, "a free slot is not filled at once"
        balancer.release(only)
        await settle()
        assert only.in_flight == running, "all four free slots are filled together"
        assert sum(task.done() for task in tasks) == running + 4
        for _ in range(4):
            balancer.release(only)
        await settle()
        for _ in range(4):
            balancer.release(only)
        await settle()
        assert all(task.done() for task in tasks)

    asyncio.run(scenario())


def test_a_server_that_was_never_full_takes_requests_at_once() -> None:
    async def scenario() -> None:
        (only,), balancer = make(1, 2 * REFILL_SHARE)
        for _ in range(2 * REFILL_SHARE - 1):
            assert await acquire(balancer) is only
        balancer.release(only)
        assert await asyncio.wait_for(acquire(balancer), 1) is only

    asyncio.run(scenario())


@pytest.mark.parametrize("max_running", [1, 3, REFILL_SHARE, 5 * REFILL_SHARE])
def test_every_request_gets_its_turn(max_running: int) -> None:
    async def scenario() -> None:
        servers, balancer = make(2, max_running)
        chance, most = random.Random(0), 0

        async def request(number: int) -> None:
            nonlocal most
            chosen = await acquire(balancer, number)
            most = max(most, *(one.in_flight for one in servers))
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            balancer.release(chosen)

        await asyncio.wait_for(asyncio.gather(*(request(number) for number in range(300))), 30)
        assert most == max_running
        assert [one.in_flight for one in servers] == [0, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("in_flight", "key", "avoid", "chosen"),
    [
        ((0, 0, 0), 4, (), 1),  # its own server, by the key
        ((0, AFFINITY_SLACK, 5), 1, (), 1),  # a little more loaded than the least
        ((0, AFFINITY_SLACK + 1, 5), 1, (), 0),  # too much: the least loaded
        ((9, 7, 8), 0, (0,), 1),
        ((0, 3, 3), 0, (0,), 1),  # a request failed there
        ((0, 3, 3), 2, (0, 1, 2), 2),  # everywhere: then any
    ],
)
def test_the_server_of_a_request(in_flight: tuple[int, ...], key: int, avoid: tuple[int, ...], chosen: int) -> None:
    async def scenario() -> None:
        servers, balancer = make(3, 100)
        for server, count in zip(servers, in_flight, strict=True):
            server.in_flight = count
        found = await balancer.acquire(key, 1, lambda: False, 10.0, [servers[i] for i in avoid])
        assert servers.index(found) == chosen

    asyncio.run(scenario())


def test_a_new_request_does_not_overtake_those_that_wait() -> None:
    async def scenario() -> None:
        (only,), balancer = make(1, 1)
        assert await acquire(balancer) is only
        order: list[str] = []

        async def request(name: str) -> None:
            await acquire(balancer)
            order.append(name)

        waiting = asyncio.ensure_future(request("first"))
        await settle()
        only.in_flight -= 1  # there is room, and nobody has been woken yet
        balancer._full.clear()
        late = asyncio.ensure_future(request("second"))
        await settle()
        balancer.wake_one()
        await settle()
        balancer.release(only)
        await asyncio.wait_for(asyncio.gather(waiting, late), 5)
        assert order == ["first", "second"]

    asyncio.run(scenario())
