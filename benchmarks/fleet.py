"""The driver of a large or uneven fleet: what a request costs, and what a slow server or a slow tool costs.

    python benchmarks/fleet.py [--samples 100000]
    python benchmarks/fleet.py --elastic [--sglang PYTHON]   # one run on servers that come, go, die and differ

- `acquire`: one choice of a server, with half of the slots in use, on 16 and on 512 servers.
- `abort`: one waiting request, with 20 000 others that wait.
- `driver`: CPU time of sampler, engine and load balancer for one sample, on 16 and on 512 servers that reply at once.
- `start`: CPU time for one server that is admitted and gets one weight update, of a fleet of 16 and of 512 (HTTP).
- `slow server`: one of three servers at 0.3 × speed, on a virtual clock with the real sampler and engine. The limit is
  the time of three equal servers × 3 ÷ 2.3.
- `slow tool`: two turns, and a tool between them that takes as long as a turn. How full the engines are.

`--elastic`: 4 → 1 → 6 server processes, three of them killed, one of these back, one at 0.3 × speed. Counts lost
samples and measures staleness, updates, and how soon a joiner serves. The servers are SGLang's on the CPU with a tiny
model, whose log-probs are compared with transformers'; without `--sglang` they are fake ones
(tests/support/fake_server.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from fake_server import FakeServer, Proxy  # noqa: E402
from installed_sglang import API_KEY_VARIABLE  # noqa: E402
from tiny_model import changed_weights, reference_logprobs, tiny_model, write_model  # noqa: E402
from virtual_servers import VirtualServer, grade, next_prompt, tool_occupancy, virtual_fleet  # noqa: E402

from megatron_dapo.config.rollout import RolloutConfig, ServerConfig  # noqa: E402
from megatron_dapo.engines.protocol import Completion, SamplingParams  # noqa: E402
from megatron_dapo.engines.server_load import SLOW  # noqa: E402
from megatron_dapo.engines.sglang.client import SGLangClient  # noqa: E402
from megatron_dapo.engines.sglang.engine import SGLangEngine  # noqa: E402
from megatron_dapo.engines.sglang.fleet import Fleet  # noqa: E402
from megatron_dapo.engines.sglang.load_balancer import LoadBalancer  # noqa: E402
from megatron_dapo.engines.sglang.server_process import ServerProcess, sglang_command  # noqa: E402
from megatron_dapo.engines.sglang.server_state import ServerState  # noqa: E402
from megatron_dapo.planner.simulation.run import run_virtually  # noqa: E402
from megatron_dapo.rollout.sampler import Sampler  # noqa: E402
from megatron_dapo.types import FinishReason, Sample, WeightSpan, as_logprobs, as_tokens  # noqa: E402

FEW, MANY = 16, 512
RUNNING = 64  # requests on a server
WAITING = 20_000


class Server(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def balancer_of(count: int) -> LoadBalancer:
    servers: list[Any] = [Server(state=ServerState(), in_flight=0, name=str(i)) for i in range(count)]
    for server in servers:
        server.state.served(0)
    return LoadBalancer(servers, RUNNING)


async def acquire_seconds(count: int, requests: int = 20_000) -> float:
    """Of one acquire and its release."""
    balancer = balancer_of(count)

    async def acquire(name: str, key: int) -> SGLangClient:
        server = await balancer.acquire(name, key, 0, 10.0)
        assert server is not None  # nothing is cancelled
        return server

    held = [await acquire(f"w{i}", i) for i in range(count * RUNNING // 2)]
    began = time.process_time()
    for i in range(requests):
        server = await acquire(f"r{i}", i * 7919)
        balancer.release(held[i % len(held)], 100, 1.0, 10.0)
        held[i % len(held)] = server
    return (time.process_time() - began) / requests


async def abort_seconds() -> float:
    """Until the loop is free again, and the mean of 1000 aborts."""
    config = RolloutConfig(servers={"max_running": 1})
    client = SGLangClient("http://server", config.servers)
    client.state.served(0)
    engine = SGLangEngine([client], config)
    client.in_flight = 1
    engine._balancer._places[0].full = True
    engine._balancer.refresh()
    prompt, params = as_tokens([1]), SamplingParams(8)
    waiting = [asyncio.ensure_future(engine.generate(f"r{i}", prompt, params)) for i in range(WAITING)]
    while len(engine._balancer._waiting) < WAITING:
        await asyncio.sleep(0)
    began = time.process_time()
    for i in range(1000):
        await engine.abort(f"r{i}")
        await asyncio.sleep(0)
    seconds = (time.process_time() - began) / 1000
    assert sum(task.done() for task in waiting) == 1000
    await engine.abort()
    await asyncio.gather(*waiting)
    await engine.close()
    return seconds


class InstantServer(SGLangClient):
    async def generate(
        self, request_id: str, prompt: Any, params: SamplingParams, adapter: str | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        return Completion(as_tokens([1]), as_logprobs([-1.0]), FinishReason.STOP, [WeightSpan(0, 0, 1)])


async def driver_seconds(count: int, samples: int) -> float:
    config = RolloutConfig(
        samples_per_prompt=16, dynamic_sampling=False, servers={"max_running": RUNNING},
        sampler={"oversampling": 1, "order": "prompt", "unfinished": "finish"},
    )  # fmt: skip
    servers = [InstantServer(f"http://server-{i}", config.servers) for i in range(count)]
    for server in servers:
        server.state.served(0)
    engine = SGLangEngine(servers, config)
    sampler = Sampler(engine, grade, next_prompt(), config, groups_per_step=samples // 16)
    began = time.process_time()
    batch = await sampler.collect(0)
    seconds = time.process_time() - began
    assert len(batch.groups) == samples // 16
    await engine.close()
    return seconds / samples


def serve(count: int, pipe: Any) -> None:
    async def main() -> None:
        servers = [await FakeServer().start() for _ in range(count)]
        pipe.send([server.url for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())


async def start_seconds(urls: list[str]) -> tuple[float, float, float, float]:
    """CPU and wall seconds of the start and of an update, for each server."""
    with tempfile.TemporaryDirectory() as folder:
        config = RolloutConfig(
            servers={"urls": urls, "heartbeat": 600}, weights={"directory": folder, "proof": "version"}
        )
        cpu, wall = time.process_time(), time.monotonic()
        engine = await Fleet(config, folder, folder, client_processes=False).start()
        started = time.process_time() - cpu, time.monotonic() - wall
        cpu, wall = time.process_time(), time.monotonic()
        report = await engine.update_weights(1, [[("a.weight", torch.ones(2, 3))]])
        assert len(report.served_by) == len(urls)
        updated = time.process_time() - cpu, time.monotonic() - wall
        await engine.close()
    return (*(seconds / len(urls) for seconds in started), *(seconds / len(urls) for seconds in updated))  # type: ignore[return-value]


SAMPLING = {"samples_per_prompt": 16, "max_response_tokens": 4000}


async def batch_seconds(folder: Path, speeds: list[float], unfinished: str, steps: int = 5) -> float:
    """Seconds of a step, without the first."""

    def make(url: str, config: RolloutConfig) -> VirtualServer:
        return VirtualServer(url, config, speeds[int(url.rpartition("-")[2])], mean=400)

    clock, ends = asyncio.get_running_loop().time, []
    async with virtual_fleet(folder, len(speeds), make, sampler={"unfinished": unfinished}, **SAMPLING) as (_, engine):
        sampler = Sampler(engine, grade, next_prompt(), engine.config, groups_per_step=64)
        for step in range(steps):
            await sampler.collect(step)
            await engine.update_weights(step + 1, [])
            ends.append(clock())
    return (ends[-1] - ends[0]) / (steps - 1)


def fake_command(model: str, config: ServerConfig, index: int, port: int) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(SUPPORT / "fake_server.py"), str(port), "0.3"], {}


class ElasticRun:
    """Server processes on this machine, listed in a file that the run watches. Server 1 is behind a slow proxy."""

    STEPS, GROUPS, SLOW, SPEED = 12, 24, 1, 0.3

    def __init__(self, folder: Path, python: str) -> None:
        """`python` has SGLang; empty: fake servers."""
        self.folder = folder
        self.file = folder / "servers"
        self.model = tiny_model()
        self.weights = [{name: tensor.clone() for name, tensor in self.model.state_dict().items()}]  # by version
        self.real = bool(python)
        os.environ[API_KEY_VARIABLE] = secrets.token_hex(16)
        servers = ServerConfig(
            device="cpu", python=python, dtype="float32", start_timeout=600, api_key_env=API_KEY_VARIABLE
        )
        servers.demand(computes_checksums=True)
        command = sglang_command if python else fake_command
        model = str(write_model(folder / "model"))
        self.servers = [ServerProcess(model, servers, index, folder / "logs", command) for index in range(6)]
        self.urls: dict[int, str] = {}
        self.served: dict[str, float] = {}  # when it first completed a request
        self.ready: dict[int, float] = {}  # joiners

    def note_served(self, server: str, *_: object) -> None:
        self.served.setdefault(server, time.monotonic())

    async def serve(self, *indices: int) -> None:
        """Returns when all of them are ready."""
        for index in indices:
            self.servers[index].spawn({server.port for server in self.servers})
        for index in indices:
            client = self.servers[index].client()
            await self.servers[index].wait_ready(client)
            await client.close()
            proxy = await Proxy(self.servers[index].url, self.SPEED).start() if index == self.SLOW else None
            self.urls[index] = proxy.url if proxy else self.servers[index].url

    def use(self, *indices: int) -> None:
        self.file.write_text("".join(f"{self.urls[index]}\n" for index in indices))

    def kill(self, index: int) -> None:
        os.kill(self.servers[index].pid, signal.SIGKILL)

    def joins(self, *indices: int) -> None:
        for index in indices:
            self.served.pop(self.urls[index], None)
            self.ready[index] = time.monotonic()

    async def disturb(self, step: int) -> None:
        await asyncio.sleep(0.3)
        if step == 2:
            self.kill(2)
        if step == 4:
            self.use(1)
        if step == 6:
            await self.serve(4, 5)
            self.use(0, 1, 2, 3, 4, 5)  # 2 is still dead
            self.joins(0, 3, 4, 5)
        if step == 7:
            await self.serve(2)
            self.joins(2)
        if step == 9:
            self.kill(3)

    async def run(self) -> None:
        try:
            await self.serve(0, 1, 2, 3)
            self.use(0, 1, 2, 3)
            await self.train()
        finally:
            await asyncio.gather(*(server.end() for server in self.servers))

    async def train(self) -> None:
        config = RolloutConfig(
            samples_per_prompt=8, max_response_tokens=48 if self.real else 8, sampler={"unfinished": "continue"},
            servers={
                "urls": [f"file://{self.file}"], "max_running": 8, "heartbeat": 0.5, "attempts": 8,
                "api_key_env": API_KEY_VARIABLE,
            },
            weights={"directory": str(self.folder / "weights")},
        )  # fmt: skip
        engine = await Fleet(config, str(self.folder / "model"), self.folder / "logs").start()
        sampler = Sampler(
            engine, grade, next_prompt(), config, groups_per_step=self.GROUPS,
            on_request=self.note_served,
        )  # fmt: skip
        trained, failed, stale, gaps = set(), 0, 0.0, []
        updates: tuple[list[float], list[float]] = [], []  # without and with a dead server
        for step in range(self.STEPS):
            began = time.monotonic()
            disturbing = asyncio.ensure_future(self.disturb(step))
            batch = await sampler.collect(step)
            sampled = time.monotonic() - began
            await disturbing
            failed += int(batch.metrics["rollout/samples_failed"])
            stale = max(stale, batch.metrics["rollout/staleness_max"])
            samples = [sample for group in batch.groups for sample in group.samples]
            trained |= {(sample.prompt_id, sample.index) for sample in samples}
            gaps.append(max(self.gap(sample) for sample in samples[::8]) if self.real else 0.0)
            self.weights.append(dict(changed_weights(self.model, step)))
            if step == 10:
                self.kill(5)  # nobody has noticed yet when the update begins
            began = time.monotonic()
            report = await engine.update_weights(step + 1, [[*self.weights[-1].items()]])
            seconds = time.monotonic() - began
            updates[bool(report.failed)].append(seconds)
            print(f"step {step:2d}      {sampled:5.1f} s of sampling, update of {seconds:.2f} s: "
                  f"{len(report.served_by)} servers, {len(report.failed)} failed; log-probs differ by {gaps[-1]:.1g}",
                  flush=True)  # fmt: skip
        joins = [self.served[url] - when for i, when in self.ready.items() if (url := self.urls[i]) in self.served]
        slow = {url: round(share, 2) for url, share in engine.speeds().items() if share < SLOW}
        await engine.close()
        median, slowest = statistics.median(updates[0]), max(updates[1])
        print(f"samples      {len(trained)} of {self.STEPS * self.GROUPS * 8} trained, {failed} lost (goal: 0)")
        print(f"staleness    at most {stale:.0f} (limit: 1)")
        print(
            f"joiners      {len(joins)} of {len(self.ready)} served, at most {max(joins):.1f} s after ready (goal: 30)"
        )
        print(f"updates      {median:.2f} s, with a dead server at most {slowest - median:+.2f} s (goal: 1)")
        print(f"slow server  {slow}; server {self.SLOW} is {self.urls[self.SLOW]}, at {self.SPEED} × speed")
        if self.real:
            print(f"log-probs    differ by at most {max(gaps):.1g} from transformers', each token with its own weights")

    def gap(self, sample: Sample) -> float:
        """The largest difference of a log-prob between the server and transformers with the weights of its version."""
        found = []
        for span in sample.weight_spans:
            self.model.load_state_dict(self.weights[span.version])
            right = reference_logprobs(self.model, sample.prompt_tokens, sample.response_tokens)
            found.append(np.abs(sample.engine_logprobs - right)[span.start : span.end].max(initial=0.0))
        self.model.load_state_dict(self.weights[0])
        return float(max(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--sglang", metavar="PYTHON", default="", help="with --elastic: the Python that has SGLang")
    args = parser.parse_args()
    if args.elastic:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(ElasticRun(Path(name), args.sglang).run())
        return
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()
    few, many = (asyncio.run(acquire_seconds(count)) for count in (FEW, MANY))
    print(f"acquire      {1e6 * few:6.1f} µs with {FEW} servers, {1e6 * many:6.1f} µs with {MANY} (goal: 15)")
    print(f"abort        {1e3 * asyncio.run(abort_seconds()):6.3f} ms with {WAITING} waiting (goal: 0.1)")
    few, many = (asyncio.run(driver_seconds(count, args.samples)) for count in (FEW, MANY))
    print(f"driver       {1e6 * few:6.1f} µs a sample with {FEW} servers, {1e6 * many:6.1f} µs with {MANY}: "
          f"{many / few:.2f} × (goal: 1.3)")  # fmt: skip
    ready, other = multiprocessing.Pipe()
    fakes = multiprocessing.get_context("spawn").Process(target=serve, args=(MANY, other), daemon=True)
    fakes.start()
    urls = ready.recv()
    costs = [asyncio.run(start_seconds(urls[:count])) for count in (FEW, MANY)]
    fakes.terminate()
    for name, at in (("start", 0), ("update", 2)):
        (a, wall_a), (b, wall_b) = (cost[at : at + 2] for cost in costs)
        print(f"{name:12s} {1e3 * a:6.2f} ms CPU a server with {FEW} servers, {1e3 * b:6.2f} ms with {MANY}: "
              f"{b / a:.2f} × (goal: 1.3); {FEW * wall_a:.2f} s and {MANY * wall_b:.2f} s in all")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for unfinished in ("finish", "continue"):
            equal = run_virtually(batch_seconds(folder, [1.0, 1.0, 1.0], unfinished))
            slow = run_virtually(batch_seconds(folder, [1.0, 0.3, 1.0], unfinished))
            limit = equal * 3 / 2.3
            print(f"slow server  {slow:6.1f} s a step ({unfinished}), {limit:.1f} s by remaining capacity: "
                  f"{slow / limit:.2f} × (goal: 1.10)")  # fmt: skip
        for groups in (256, 128):
            slowly, fast = (run_virtually(tool_occupancy(folder, seconds, groups)) for seconds in (4.0, 0.0))
            print(f"slow tool    {100 * slowly:6.1f} % of the slots in use with batches of {groups} groups, "
                  f"{100 * fast:.1f} % without the tool (goal: 90)")  # fmt: skip


if __name__ == "__main__":
    main()
