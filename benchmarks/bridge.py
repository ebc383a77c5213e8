"""The cost of the SGLang client: one client process against a stub server that replies at once.

    [SLIME=checkout] python benchmarks/bridge.py [--samples 600] [--tokens 4500]

Every reply has the size of a long response of a 32B model: 4500 tokens with their log-probs, about a quarter of a
megabyte of JSON. The same requests are made with plain httpx and json; both must give the same numpy arrays. The stub
runs in its own process and sends prepared bytes. The last line has the client in a process of its own, as in a run: CPU
time is that of the driving process. If SLIME names a checkout of slime, its own client makes the requests, too; it
keeps tokens and log-probs as lists.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import ClientProcess
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.types import as_tokens

# A rollout step of the published 32B run: 512 prompts × 16 samples, oversampled three times.
STEP_SAMPLES = 512 * 16 * 3


def prepared_reply(tokens: int) -> bytes:
    rng = random.Random(0)
    ids = [rng.randrange(151_000) for _ in range(tokens)]
    rows = [[float(np.float32(-rng.expovariate(2))), token, None] for token in ids]
    text = "".join(rng.choice("abcdefgh 123=+\n") for _ in range(4 * tokens))
    meta = {
        "id": "r", "finish_reason": {"type": "stop", "matched": 151643}, "prompt_tokens": 400,
        "weight_version": "0", "output_token_logprobs": rows, "completion_tokens": tokens, "cached_tokens": 0,
    }  # fmt: skip
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


class Stub(asyncio.Protocol):
    """Minimal HTTP: reads a whole request, writes the prepared reply."""

    reply = b""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", 0))
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.transport.write(self.reply)


def serve(reply: bytes, ready: Connection) -> None:
    async def main() -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n\r\n"
        Stub.reply = head.encode() + reply
        server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


Ask = Callable[[int], Awaitable[tuple[Any, Any]]]


async def measure(ask: Ask, samples: int, at_once: int) -> tuple[float, float, tuple[Any, Any]]:
    """(seconds, CPU seconds of this process, one result)."""
    gate = asyncio.Semaphore(at_once)

    async def one(index: int) -> tuple[Any, Any]:
        async with gate:
            return await ask(index)

    await asyncio.gather(*(one(-i) for i in range(1, 9)))  # connections and caches
    began, cpu = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(one(i) for i in range(samples)))
    return time.perf_counter() - began, time.process_time() - cpu, results[0]


async def ours(url: str, samples: int, at_once: int, parsed_here: bool = True) -> tuple[float, float, tuple[Any, Any]]:
    config = RolloutConfig(servers={"max_running": at_once})
    server = SGLangClient(url, config.servers)
    server.state.served(0)
    engine = SGLangEngine([server], config)
    if not parsed_here:
        server.process = ClientProcess()
        await server.process.ready()
    prompt, params = as_tokens(range(400)), SamplingParams(20480, seed=1)

    async def ask(index: int) -> tuple[Any, Any]:
        completion = await engine.generate(f"r{index}", prompt, params)
        return completion.tokens, completion.logprobs

    try:
        return await measure(ask, samples, at_once)
    finally:
        await engine.close()
        if server.process is not None:
            await server.process.close()


def body(index: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 20480}
    return {"rid": f"r{index}", "input_ids": list(range(400)), "sampling_params": sampling, "return_logprob": True}


async def slime(url: str, samples: int, at_once: int) -> tuple[float, float, tuple[Any, Any]]:
    sys.path.insert(0, os.environ["SLIME"])
    from slime.utils import http_utils

    http_utils.init_http_client(
        SimpleNamespace(rollout_num_engines=1, sglang_server_concurrency=at_once, use_distributed_post=False)
    )

    async def ask(index: int) -> tuple[Any, Any]:
        rows = (await http_utils.post(f"{url}/generate", body(index)))["meta_info"]["output_token_logprobs"]
        return [row[1] for row in rows], [row[0] for row in rows]

    return await measure(ask, samples, at_once)


async def plain(url: str, samples: int, at_once: int) -> tuple[float, float, tuple[Any, Any]]:
    try:
        import httpx
    except ImportError:
        import httpx2 as httpx  # type: ignore[no-redef]
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def ask(index: int) -> tuple[Any, Any]:
            reply = (await client.post(f"{url}/generate", json=body(index))).json()
            rows = reply["meta_info"]["output_token_logprobs"]
            return np.array([row[1] for row in rows], np.int32), np.array([row[0] for row in rows], np.float32)

        return await measure(ask, samples, at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=4500)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=600.0, help="length of a 32B step, for the share")
    args = parser.parse_args()
    reply = prepared_reply(args.tokens)
    ready, other = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(target=serve, args=(reply, other), daemon=True)
    stub.start()
    url = f"http://127.0.0.1:{ready.recv()}"
    try:
        found = {}
        clients: list[tuple[str, Any, int]] = [
            ("httpx + json", plain, args.samples // 4),
            ("megatron-dapo", ours, args.samples),
            ("client process", partial(ours, parsed_here=False), args.samples),
        ]
        if os.environ.get("SLIME"):
            clients.insert(1, ("slime", slime, args.samples // 4))
        for name, client, samples in clients:
            seconds, cpu, result = asyncio.run(client(url, samples, args.at_once))
            found[name] = (samples / seconds, samples / cpu, result)
            tokens, megabytes = samples * args.tokens / 1e6, samples * len(reply) / 1e6
            print(
                f"{name:14s} {samples / seconds:7.0f} samples/s {tokens / seconds:6.2f} M tokens/s "
                f"{megabytes / seconds:6.0f} MB/s {1e3 * cpu / samples:6.2f} ms CPU per sample"
            )
        for _, _, result in found.values():
            for a, b in zip(found["httpx + json"][2], result, strict=True):
                assert np.array_equal(a, np.asarray(b, a.dtype)), "the clients disagree"
    finally:
        stub.terminate()
    slow, slow_cpu, _ = found["httpx + json"]
    fast, fast_cpu, _ = found["megatron-dapo"]
    driver_cpu = found["client process"][1]
    print(f"ratio          {fast / slow:.1f} × in wall time, {fast_cpu / slow_cpu:.1f} × in CPU time (goal: 5)")
    cost, size = STEP_SAMPLES / fast_cpu, STEP_SAMPLES * len(reply) / 1e9
    driver = STEP_SAMPLES / driver_cpu
    share = 100 * driver / args.step_seconds
    print(
        f"a 32B step     {STEP_SAMPLES} samples, {size:.1f} GB of JSON: {cost:.0f} s of one core; with a client "
        f"process {driver:.1f} s of rank 0, {share:.1f} % of a step of {args.step_seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
