"""The checks of benchmarks/soak.py find what they look for, and its proxy drops connections at each moment."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402
from dropping_proxy import MOMENTS, Proxy  # noqa: E402


def record(step, **counts):
    samples = {"submitted": 8, "carried_in": 0, "trained": 8, "dropped": 0, "failed": 0, "carried_over": 0} | counts
    return {"step": step, "metrics": {f"rollout/samples_{name}": value for name, value in samples.items()}}


def test_accounting_adds_up_over_the_run():
    problems = []
    steps = [record(1, submitted=12, carried_over=4), record(2, carried_in=4, dropped=3, failed=1)]
    totals = soak.check_accounting(steps, problems)
    assert problems == []
    assert totals == {"submitted": 20, "trained": 16, "dropped": 3, "failed": 1, "carried": 0}


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([record(1, submitted=9)], "step 1: 9 samples entered and 8 left"),
        ([record(1, submitted=12, carried_over=4), record(2)], "step 2: 4 samples were carried over, 0 came in"),
    ],
)
def test_a_lost_sample_is_a_problem(steps, problem):
    problems = []
    soak.check_accounting(steps, problems)
    assert problems == [problem]


def test_a_sample_that_is_trained_twice_is_a_problem(tmp_path):
    def problems_of(*samples):
        (tmp_path / soak.TRAINED).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        problems = []
        soak.check_trained(tmp_path, [record(1, trained=2)], problems)
        return problems

    assert problems_of([1, "a", 0, 5], [1, "a", 1, 6]) == []
    assert "1 samples were trained twice" in problems_of([1, "a", 0, 5], [1, "a", 0, 5])[0]
    assert problems_of([1, "a", 0, 5], [1, "b", 0, 5]) == ["1 seeds were trained twice, for example 5"]
    assert problems_of([1, "a", 0, 5]) == ["step 1: 1 samples recorded, 2 trained"]


def test_growth_is_told_from_fluctuation_and_from_warming_up():
    wave = [100.0 + (i % 7) for i in range(200)]
    assert soak.trend(wave, 5.0)["verdict"] == "flat"
    assert soak.trend([50.0] * 20 + wave[20:], 5.0)["verdict"] == "flat"
    leak = soak.trend([value + 0.1 * i for i, value in enumerate(wave)], 5.0)
    assert leak["verdict"] == "growing" and leak["per_step"] == pytest.approx(0.1, abs=0.01)
    assert leak["last"] > leak["first"] + 10


class Script:
    """A proxy whose random choices are written down."""

    def __init__(self, moments):
        self.moments = iter(moments)

    def random(self):
        self.next = next(self.moments)
        return 0.0 if self.next else 1.0

    def choice(self, _):
        return self.next


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_proxy_resets_a_call_and_the_next_one_succeeds(moment, tmp_path):
    seen = []

    async def answer(request):
        seen.append(await request.read())
        return web.json_response({"length": len(seen[-1])})

    async def main():
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app, keepalive_timeout=0.2)
        await runner.setup()
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            ports = one.getsockname()[1], other.getsockname()[1]
        await web.TCPSite(runner, "127.0.0.1", ports[0]).start()
        proxy = Proxy("127.0.0.1", ports[0], str(tmp_path / "log"), 0.5, "0")
        proxy._random = Script([None, moment, None, None])
        await proxy.listen(ports[1])
        url = f"http://127.0.0.1:{ports[1]}/generate"
        async with aiohttp.ClientSession() as session:
            found = []
            for body in (b"a", b"bb", b"ccc" * 10**5, b"dddd"):
                if body == b"dddd":
                    await asyncio.sleep(0.5)  # the server has closed the idle connection, and the proxy with it
                try:
                    async with session.post(url, data=body) as reply:
                        found.append((await reply.json())["length"])
                except aiohttp.ClientError as error:
                    found.append(type(error))
        await runner.cleanup()
        return found

    found = asyncio.run(main())
    assert found[0] == 1 and found[2:] == [3 * 10**5, 4] and issubclass(found[1], aiohttp.ClientError)
    assert [len(body) for body in seen] == ([1] if moment == "request" else [1, 2]) + [3 * 10**5, 4]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["dropped"], line["retry"]) for line in lines] == [
        (None, False), (moment, False), (None, True), (None, False),
    ]  # fmt: skip
