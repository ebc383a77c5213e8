"""What the rollout thread costs the trainer when generation runs during training: they share a GIL on rank 0.

    python benchmarks/gil.py [--seconds 5] [--tokens 4500]

The main thread launches small operators as fast as Python can, which is what a training step does between two large
kernels: it is the worst case, because nothing hides a delay. Meanwhile a thread with an event loop receives replies of
an engine at a given rate and reads them with the client's parser, as in a run (`engines/sglang/response_parser.py`,
`rollout/group_runner.py`). "limit" is what the replies cost by themselves: no arrangement of threads can be better.
Beside Python's default switch interval of 5 ms: 0.5 ms, and the replies read in another process, which has its own GIL.
Needs a machine with a free core for each of the two threads; "limit" is CPU time and needs none.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import threading
import time

import numpy as np
import orjson
import torch

from megatron_dapo.engines.sglang.response_parser import parse_completion
from megatron_dapo.rollout.group_runner import append_completion
from megatron_dapo.rollout.pending_group import new_samples
from megatron_dapo.types import Prompt, as_tokens

RATES = (48_000, 200_000, 800_000)  # tokens per second: one H200 with a 1.5B model, and fleets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=4500, help="per response")
    args = parser.parse_args()
    torch.set_num_threads(1)
    content = reply(args.tokens)
    each = seconds_per_reply(content)
    print(f"{1e6 / launches(1.0):.2f} µs a launch alone; {1e3 * each:.2f} ms a reply of {args.tokens} tokens")
    print("| tokens/s | limit | thread | thread, switch interval 0.5 ms | process |")
    print("|---|---|---|---|---|")
    for rate in RATES:
        replies = rate / args.tokens
        cells = [f"{rate:,}", f"{min(1.0, each * replies):.1%}"]
        for interval, process in ((0.005, False), (0.0005, False), (0.005, True)):
            sys.setswitchinterval(interval)
            alone = launches(args.seconds)
            cells.append(f"{1 - slowed(content, replies, args.seconds, process) / alone:.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


def reply(tokens: int) -> bytes:
    """As SGLang writes it."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, tokens).tolist()
    logprobs = (-rng.exponential(0.5, tokens)).tolist()
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": entries}
    return orjson.dumps({"text": "x" * 3 * tokens, "output_ids": ids, "meta_info": meta})


def read(content: bytes) -> None:
    (sample,) = new_samples(Prompt("p", "?", as_tokens([1, 2, 3])), [0])
    append_completion(sample, parse_completion(content, "benchmark"))


def seconds_per_reply(content: bytes) -> float:
    began = time.thread_time()
    for _ in range(50):
        read(content)
    return (time.thread_time() - began) / 50


def launches(seconds: float) -> float:
    """Small operators per second."""
    value, count, began = torch.zeros(16), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(200):
            value.add_(1.0)
        count += 200
    return count / (time.perf_counter() - began)


def receive(content: bytes, per_second: float, seconds: float) -> None:
    async def arrive() -> None:
        loop = asyncio.get_running_loop()
        began, number = loop.time(), 0
        while (now := loop.time() - began) < seconds:
            while number < now * per_second:
                read(content)
                number += 1
                await asyncio.sleep(0)
            await asyncio.sleep(min(0.002, 0.5 / per_second))

    asyncio.run(arrive())


def slowed(content: bytes, per_second: float, seconds: float, process: bool) -> float:
    kind = multiprocessing.get_context("spawn").Process if process else threading.Thread
    other = kind(target=receive, args=(content, per_second, seconds + (3 if process else 1)), daemon=True)
    other.start()
    time.sleep(2.5 if process else 0.5)  # a process imports first
    found = launches(seconds)
    other.join()
    return found


if __name__ == "__main__":
    main()
