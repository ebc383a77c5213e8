"""The load balancer refills a full server in batches, every request gets its turn, and slow servers get fewer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.engines.server_load import SLOW
from megatron_dapo.engines.sglang.load_balancer import AFFINITY_SLACK, MEMORY, REFILL_SHARE, LoadBalancer
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


_names = count()


def acquire(balancer: LoadBalancer, key: int = 0, avoid: Any = ()) -> Coroutine[Any, Any, Any]:
    return balancer.acquire(f"r{next(_names)}", key, 1, 10.0, avoid)


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
        for server, load in zip(servers, in_flight, strict=True):
            server.in_flight = load
        balancer.refresh()
        found = await acquire(balancer, key, [servers[i] for i in avoid])
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
        late = asyncio.ensure_future(request("second"))
        await settle()
        for _ in range(2):
            balancer.release(only)
            await settle()
        await asyncio.wait_for(asyncio.gather(waiting, late), 5)
        assert order == ["first", "second"]

    asyncio.run(scenario())


def measure(
    balancer: LoadBalancer, server: Any, tokens_per_second: float, tokens: int = 100, count: int = MEMORY
) -> None:
    """As if the server had completed requests at this rate, one at a time."""
    for _ in range(count):
        server.in_flight += 1
        balancer.release(server, tokens, tokens / tokens_per_second, 1.0)


def test_requests_go_where_they_are_expected_to_finish_first() -> None:
    """A hundred fit on each server. The slow one gets none until the others are so full that they are as slow:
    (40 + 8 + 101) / 1 < 101 / 0.667, with 8 for the cache. A small difference counts as none."""

    async def scenario() -> None:
        servers, balancer = make(3, 100)
        for server, rate in zip(servers, (100.0, 60.0, 90.0), strict=True):
            measure(balancer, server, rate)
        assert [round(balancer.speeds()[server], 2) for server in servers] == [1.11, 0.67, 1.0]
        for number in range(80):
            await acquire(balancer, number)
        assert servers[1].in_flight == 0 and abs(servers[0].in_flight - 40) <= AFFINITY_SLACK
        for number in range(60):
            await acquire(balancer, number)
        assert 0 < servers[1].in_flight < 30

    asyncio.run(scenario())


def test_requests_that_end_together_are_no_sign_of_a_slow_server() -> None:
    """One of two equal servers was called slow on an H200, seconds after an update: an evaluation aborts 200 requests
    that are hardly prefilled; or a quarter of all requests ends while the others are prefilled."""

    async def scenario(count: int, tokens: int, tokens_per_second: float) -> float:
        (first, second), balancer = make(2, 256)
        for _ in range(4):
            measure(balancer, first, 50.0, 500)
            measure(balancer, second, 50.0, 500)
        measure(balancer, first, tokens_per_second, tokens, count)
        return balancer.speeds()[first]

    assert asyncio.run(scenario(200, 5, 2.0)) > 0.8
    assert asyncio.run(scenario(200, 40, 25.0)) > 0.9
    assert asyncio.run(scenario(64, 200, 20.0)) > 0.8
    assert asyncio.run(scenario(512, 500, 25.0)) < SLOW  # it is slow


def test_requests_move_from_a_slow_server_only_while_nobody_waits() -> None:
    async def scenario() -> None:
        (slow, fast), balancer = make(2, 10)
        slow.in_flight, fast.in_flight = 5, 5
        balancer.refresh()
        assert balancer.overloaded() is None  # equal
        measure(balancer, slow, 30.0)
        measure(balancer, fast, 100.0)
        # 15 / 0.3 on the slow one. The fast one has room for 5, and is faster with all of them: 20 / 1.
        assert balancer.overloaded() == (slow, 5)
        fast.in_flight = 10
        assert balancer.overloaded() is None  # no room
        fast.in_flight = 5
        with balancer.closed():
            waiting = asyncio.ensure_future(acquire(balancer))
            await settle()
        slow.state.withdrawn("failed")
        assert balancer.overloaded() is None  # it cannot be asked
        waiting.cancel()

    asyncio.run(scenario())


def test_an_abort_and_a_server_that_leaves_wake_nobody_else() -> None:
    async def scenario() -> None:
        (first, second), balancer = make(2, 1)
        assert {await acquire(balancer, 0), await acquire(balancer, 1)} == {first, second}
        waiting = {n: asyncio.ensure_future(balancer.acquire(n, 0, 1, 10.0)) for n in ("a", "b", "c")}
        await settle()
        balancer.cancel("b")
        await settle()
        assert waiting["b"].result() is None and not waiting["a"].done() and not waiting["c"].done()
        balancer.remove(second)
        second.state.given_up("left")
        balancer.release(second)  # its last request has returned
        await settle()
        assert not waiting["a"].done()
        balancer.release(first)
        await settle()
        assert waiting["a"].result() is first and not waiting["c"].done()
        balancer.add(third := make(1, 1)[0][0])
        await settle()
        assert waiting["c"].result() is third

    asyncio.run(scenario())
