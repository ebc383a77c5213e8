"""Rank 0's CPU time for one sample: client, sampler, text and grade, against a stub server that replies at once.

    python benchmarks/rank0.py --tokenizer DIR [--samples 512] [--tokens 4500]

Rank 0 drives all engines with one thread. Responses of 4500 tokens are sampled, decoded and graded three times: all of
it in this process; decoded in the grading processes; and, as a run does it, decoded there and requested and parsed in
a client process. The ratio is of the last to the first. CPU time of other processes does not count; it is spread over
cores. The last lines are the sampler alone, with an engine whose samples end one by one: its cost must not grow with
the number of groups in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import bridge
import numpy as np
import orjson
from transformers import AutoTokenizer

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.client_process import ClientProcess
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.reward.combined import ResponseGrader
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, WeightSpan, as_logprobs, as_tokens

STEP_SAMPLES = 8192
GROUP = 16
WORDS = ["so", "the", "value", "of", "$x^2$", "is", "therefore", "\\frac{3}{7}", "12", "+", "=", "we", "find", ".\n"]
# (decoded, parsed) in this process
ARRANGEMENTS = {
    "all in this process": (True, True),
    "decoded in grading processes": (False, True),
    "and parsed in a client process": (False, False),
}
ONE_BY_ONE = {"oversampling": 1, "order": "prompt", "unfinished": "finish"}

Grading = Callable[[Prompt, Sample], Awaitable[Grade]]


def prepared_reply(tokenizer: Any, tokens: int) -> bytes:
    """A reply whose tokens are those of a text that ends in an answer."""
    rng = random.Random(0)
    text = " ".join(rng.choice(WORDS) for _ in range(2 * tokens))
    end = tokenizer.encode("\nAnswer: 42")
    reply = orjson.loads(bridge.prepared_reply(tokens))
    reply["output_ids"] = ids = [*tokenizer.encode(text)[: tokens - len(end)], *end]
    for entry, token in zip(reply["meta_info"]["output_token_logprobs"], ids, strict=True):
        entry[1] = token
    reply["text"] = tokenizer.decode(ids)
    return orjson.dumps(reply)


def prompts() -> Callable[[], Prompt]:
    count = iter(range(10**9))
    return lambda: Prompt(f"p{next(count)}", "question", as_tokens(range(400)), answer="42")


async def sample(engine: Any, grade: Grading, groups: int, group_size: int) -> float:
    """CPU seconds of this process for one batch."""
    config = RolloutConfig(samples_per_prompt=group_size, dynamic_sampling=False, sampler=ONE_BY_ONE)
    sampler = Sampler(engine, grade, prompts(), config, groups_per_step=groups)
    began = time.process_time()
    batch = await sampler.collect(0)
    assert len(batch.groups) == groups and all(s.grade and s.grade.correct for s in batch.samples)
    return time.process_time() - began


async def with_server(url: str, tokenizer: Any, samples: int, decoded_here: bool, parsed_here: bool) -> float:
    config = RolloutConfig(servers={"max_running": 64})
    responses = ResponseGrader(RewardConfig(grader="math", workers=1), tokenizer)
    server = SGLangClient(url, config.servers)
    server.state.served(0)
    engine = SGLangEngine([server], config)
    if not parsed_here:
        server.process = ClientProcess()
        await server.process.ready()
    async with responses.graders as graders:

        async def here(prompt: Prompt, sample: Sample) -> Grade:
            sample.text = responses.decode(sample.response_tokens)
            return await graders.grade(prompt, sample)

        grade = here if decoded_here else responses.grade
        await sample(engine, grade, 2, GROUP)  # connections, the grading process
        try:
            return await sample(engine, grade, samples // GROUP, GROUP) / samples
        finally:
            await engine.close()
            if server.process is not None:
                await server.process.close()


class SpreadEngine:
    """Samples end one by one, half a millisecond apart on average."""

    weight_version, max_running = 0, 10**6

    def __init__(self, samples: int) -> None:
        self._seconds = samples / 2000

    async def generate(self, request_id: str, prompt: Any, params: SamplingParams) -> Completion:
        await asyncio.sleep(random.random() * self._seconds)
        return Completion(as_tokens([1]), as_logprobs([-1.0]), FinishReason.STOP, [WeightSpan(0, 0, 1)])


async def sampler_alone(groups: int) -> float:
    async def grade(prompt: Prompt, sample: Sample) -> Grade:
        return Grade(True, 1.0)

    return await sample(SpreadEngine(2 * groups), grade, groups, 2) / (2 * groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokenizer", required=True, help="HF directory of a tokenizer")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4500)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    reply = prepared_reply(tokenizer, args.tokens)
    ready, other = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(target=bridge.serve, args=(reply, other), daemon=True)
    stub.start()
    url = f"http://127.0.0.1:{ready.recv()}"
    gc.collect()
    gc.freeze()  # as a run does: otherwise a full collection, 80 ms, is or is not part of a measurement
    try:
        client = {}
        for parsed_here in (True, False):
            _, cpu, _ = asyncio.run(bridge.ours(url, args.samples, 64, parsed_here))
            client[parsed_here] = cpu / args.samples
        cost = {
            name: asyncio.run(with_server(url, tokenizer, args.samples, *where)) for name, where in ARRANGEMENTS.items()
        }
    finally:
        stub.terminate()
    tokens = as_tokens(orjson.loads(reply)["output_ids"])
    began = time.process_time()
    for _ in range(50):
        tokenizer.decode(np.asarray(tokens), skip_special_tokens=True)
    decoding = (time.process_time() - began) / 50
    print(f"client alone                     {1e3 * client[True]:6.2f} ms a sample of {args.tokens} tokens")
    print(f"client alone, client process     {1e3 * client[False]:6.2f} ms")
    print(f"decoding alone                   {1e3 * decoding:6.2f} ms")
    for name, found in cost.items():
        print(f"{name:32s} {1e3 * found:6.2f} ms; {STEP_SAMPLES} samples: {STEP_SAMPLES * found:5.1f} s")
    first, *_, last = cost.values()
    print(f"ratio                            {last / first:6.2f} (goal: 0.40)")
    for groups in (512, 5120):
        print(f"sampler alone, {groups:5d} groups      {1e6 * asyncio.run(sampler_alone(groups)):6.0f} µs a sample")


if __name__ == "__main__":
    main()
