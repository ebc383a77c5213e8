"""The virtual clock: time jumps, order is kept, and a deadlock is an error."""

import asyncio
import time

import pytest

from megatron_dapo.planner.simulation.run import run_virtually


def test_hours_pass_at_once_and_in_order():
    seen = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(sleeper(7200), sleeper(3600), sleeper(1))
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtually(main()) == pytest.approx(7200)
    assert [seconds for seconds, _ in seen] == [1, 3600, 7200]
    assert [when for _, when in seen] == pytest.approx([1, 3600, 7200])
    assert time.monotonic() - began < 60


def test_timeouts_use_the_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await asyncio.sleep(501)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(500)


def test_waiting_for_nothing_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happens"):
        run_virtually(main())
