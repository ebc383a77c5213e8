"""What the rollout thread costs the trainer when generation runs during training: they share a GIL on rank 0.

    python benchmarks/gil.py [--seconds 5] [--tokens 4500]

The main thread launches small operators as fast as Python can, which is what a training step does between two large
kernels: it is the worst case, because nothing hides a delay. Meanwhile a thread with an event loop requests responses
at a given rate from a stub server, as in a run: the engine, the client, the sample (`rollout/generation.py`). Three
arrangements: replies parsed in this process, the same with a switch interval of 0.5 ms instead of Python's 5 ms, and
replies parsed in a client process, which is what a run does. "limit" is the CPU time that the thread needs: no
arrangement of threads can be better. A launch that finds the GIL taken waits until the event loop's callback ends, so
the CPU time of callbacks is printed, too. Needs free cores for the two threads, the client process and the stub;
"limit" and callbacks are CPU time and need none.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import bridge
import numpy as np
import torch

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import ClientProcess
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.rollout.generation import append_completion
from megatron_dapo.rollout.pending_group import new_samples
from megatron_dapo.types import Prompt, as_tokens

RATES = (48_000, 200_000, 800_000)  # tokens per second: one H200 with a 1.5B model, and fleets
COUNTED = 200  # replies whose CPU time is measured
PARAMS = SamplingParams(20480, seed=1)

Receive = Callable[[SGLangEngine], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="0: only CPU times")
    parser.add_argument("--tokens", type=int, default=4500, help="per response")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ready, other = multiprocessing.Pipe()
    start = multiprocessing.get_context("spawn").Process
    stub = start(target=bridge.serve, args=(bridge.prepared_reply(args.tokens), other), daemon=True)
    stub.start()
    url = f"http://127.0.0.1:{ready.recv()}"
    try:
        each = {}
        for process in (False, True):
            each[process], callbacks = seconds_per_reply(url, process)
            times = ", ".join(f"{1e3 * np.quantile(callbacks, share):.2f}" for share in (0.5, 0.9, 0.99))
            print(
                f"parsed in {'a client process' if process else 'the thread'}: {1e3 * each[process]:.2f} ms of CPU "
                f"time for {args.tokens} tokens; callbacks of more than 20 µs: {times} ms (50, 90, 99 %)"
            )
        if not args.seconds:
            return
        print(f"{1e6 / launches(1.0):.2f} µs a launch alone")
        print("| tokens/s | limit | thread | thread, switch interval 0.5 ms | limit, client process | client process |")
        print("|---|---|---|---|---|---|")
        for rate in RATES:
            replies, cells = rate / args.tokens, [f"{rate:,}"]
            for interval, process in ((0.005, False), (0.0005, False), (0.005, True)):
                sys.setswitchinterval(interval)
                if interval == 0.005:
                    cells.append(f"{min(1.0, each[process] * replies):.1%}")
                alone = launches(args.seconds)
                cells.append(f"{1 - slowed(url, replies, args.seconds, process) / alone:.1%}")
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        stub.terminate()


async def with_engine(url: str, process: bool, receive: Receive) -> None:
    config = RolloutConfig(servers={"max_running": 256})
    server = SGLangClient(url, config.servers)
    server.serves = 0
    if process:
        server.process = ClientProcess()
        await server.process.ready()
    engine = SGLangEngine([server], config)
    try:
        await receive(engine)
    finally:
        await engine.close()
        if server.process is not None:
            await server.process.close()


async def request(engine: SGLangEngine, number: int) -> None:
    (sample,) = new_samples(Prompt("p", "?", as_tokens(range(400))), [0])
    append_completion(sample, await engine.generate(f"r{number}", sample.prompt_tokens, PARAMS))


def seconds_per_reply(url: str, process: bool) -> tuple[float, list[float]]:
    """CPU seconds of the thread for a reply, and those of the event loop's callbacks (the short ones left out)."""
    found: list[float] = []
    callbacks: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        if (seconds := time.thread_time() - began) > 20e-6:
            callbacks.append(seconds)

    async def receive(engine: SGLangEngine) -> None:
        await asyncio.gather(*(request(engine, -number) for number in range(1, 17)))  # connections and caches
        began = time.thread_time()
        await asyncio.gather(*(request(engine, number) for number in range(COUNTED)))
        found.append((time.thread_time() - began) / COUNTED)
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            await asyncio.gather(*(request(engine, number) for number in range(COUNTED)))
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]

    asyncio.run(with_engine(url, process, receive))
    return found[0], callbacks


def launches(seconds: float) -> float:
    """Small operators per second."""
    value, count, began = torch.zeros(16), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(200):
            value.add_(1.0)
        count += 200
    return count / (time.perf_counter() - began)


def slowed(url: str, per_second: float, seconds: float, process: bool) -> float:
    """Launches per second while replies arrive."""
    started, done = threading.Event(), threading.Event()

    async def receive(engine: SGLangEngine) -> None:
        loop = asyncio.get_running_loop()
        began, number, running = loop.time(), 0, set()
        started.set()
        while not done.is_set():
            while number < (loop.time() - began) * per_second:
                task = asyncio.ensure_future(request(engine, number))
                running.add(task)
                task.add_done_callback(running.discard)
                number += 1
            await asyncio.sleep(min(0.002, 0.5 / per_second))
        await asyncio.gather(*running)

    thread = threading.Thread(target=lambda: asyncio.run(with_engine(url, process, receive)), daemon=True)
    thread.start()
    started.wait()
    found = launches(seconds)
    done.set()
    thread.join()
    return found


if __name__ == "__main__":
    main()
