"""How fast the configured engines generate when they are always full: the limit for the rollout phase of a run.

    python benchmarks/engine.py examples/gsm8k_1gpu/gsm8k.yaml --set policy.model=MODEL [--compare RUN_DIR]
    python benchmarks/engine.py examples/gsm8k_1gpu/gsm8k.yaml --lengths 250 0.6    # weights that never end a response

Starts the servers exactly as `megatron-dapo train` does, and always has more requests than `servers.max_running` for
each of them, with the run's prompts and sampling settings. Responses end by themselves; `--lengths MEAN SIGMA` draws
log-normal lengths instead, for random weights. Tokens are counted when a response is complete, after a warm-up in which
as many responses as there are slots have completed.

`--compare` prints the rollout phase of each step of a run beside it, as a share of this limit. `--speculation` starts
the servers without and with SGLang's NGRAM speculation and keeps 8, 32, 128 and 512 requests running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from megatron_dapo.config import Config, load_config
from megatron_dapo.data import load_prompts
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import Engine, SamplingParams
from megatron_dapo.observe.metrics_file import read_records

QUEUED = 2  # requests for each slot
RUNNING = (8, 32, 128, 512)
# Without a limit of its own SGLang runs at most 48 requests with speculation.
SPECULATION = {"off": [], "NGRAM": ["--speculative-algorithm", "NGRAM"]}


@dataclass
class Completed:
    responses: int = 0
    tokens: int = 0


class Load:
    """Keeps every slot of the engines busy, and counts what completes."""

    def __init__(self, engine: Engine, config: Config, lengths: Callable[[], int] | None) -> None:
        rollout = config.rollout
        self.engine, self.lengths = engine, lengths
        self.slots = rollout.servers.max_running * max(rollout.servers.count, len(rollout.servers.urls))
        self.group_size = rollout.samples_per_prompt
        tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
        self.prompts = [prompt.tokens for prompt in load_prompts(config.data, tokenizer, rollout.max_prompt_tokens)]
        self.params = SamplingParams(
            rollout.max_response_tokens, rollout.temperature, stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids), ignore_eos=lengths is not None,
        )  # fmt: skip
        self.done = Completed()
        self.sent = 0

    async def keep_requesting(self) -> None:
        while True:
            number, self.sent = self.sent, self.sent + 1
            params = self.params
            if self.lengths is not None:
                params = replace(params, max_new_tokens=min(self.lengths(), params.max_new_tokens))
            prompt = self.prompts[number // self.group_size % len(self.prompts)]
            completion = await self.engine.generate(f"load-{number}", prompt, replace(params, seed=number))
            self.done.responses += 1
            self.done.tokens += len(completion.tokens)

    async def measure(self, seconds: float, slots: int, requests: int) -> tuple[Completed, float]:
        self.done = Completed()
        tasks = [asyncio.ensure_future(self.keep_requesting()) for _ in range(requests)]
        try:
            await self.until(tasks, lambda: self.done.responses >= slots)
            self.done, began = Completed(), time.perf_counter()
            await self.until(tasks, lambda: time.perf_counter() - began >= seconds)
            return self.done, time.perf_counter() - began
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, tasks: Sequence[asyncio.Future[None]], condition: Callable[[], bool]) -> None:
        while not condition():
            done, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()


async def engine_speed(
    config: Config, seconds: float, lengths: Callable[[], int] | None, running: Sequence[int] = ()
) -> list[float]:
    """Tokens/s with more requests than slots, or with each number of `running` requests."""
    speeds = []
    with tempfile.TemporaryDirectory() as logs:
        engine = await open_engine(config.rollout, config.policy.model, logs)
        try:
            load = Load(engine, config, lengths)
            for slots in running or [load.slots]:
                done, took = await load.measure(seconds, slots, slots if running else QUEUED * slots)
                speeds.append(done.tokens / took)
                print(
                    f"{'' if running else 'always full '}({slots} running): {speeds[-1]:,.0f} tokens/s, "
                    f"{done.responses} responses of {done.tokens / max(1, done.responses):.0f} tokens in {took:.1f} s",
                    flush=True,
                )
        finally:
            await engine.close()
    return speeds


def compare_speculation(args: argparse.Namespace, lengths: Callable[[], int] | None) -> None:
    speeds = {}
    for name, more in SPECULATION.items():
        own = load_config(args.config, args.settings).rollout.servers.arguments
        limit = ["--max-running-requests", str(max(RUNNING)), *more]
        servers = [f"rollout.servers.{key}" for key in (f"max_running={max(RUNNING)}", "count=1")]
        config = load_config(
            args.config, [*args.settings, *servers, f"rollout.servers.arguments={json.dumps([*own, *limit])}"]
        )
        speeds[name] = asyncio.run(engine_speed(config, args.seconds, lengths, RUNNING))
    print(f"| running | {' | '.join(speeds)} | × |\n|---|---|---|---|")
    for running, off, on in zip(RUNNING, *speeds.values(), strict=True):
        print(f"| {running} | {off:,.0f} | {on:,.0f} | {on / off:.2f} |")


def log_normal(mean: float, sigma: float) -> Callable[[], int]:
    chance = random.Random(0)
    return lambda: max(1, round(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def compare(run_dir: Path, limit: float) -> None:
    """Each step's rollout phase as a share of the limit, and the median by ranges of the yield."""
    rows = []
    print(f"{'step':>5} {'yield':>6} {'tokens/s':>9} {'of limit':>8} {'rollout s':>9} {'step s':>7} {'wasted':>7}")
    for record in read_records(run_dir / "metrics.jsonl"):
        if record.kind != "step":
            continue
        found = record.metrics
        trained, dropped = found["rollout/samples_trained"], found["rollout/samples_dropped"]
        kept = trained / max(1.0, trained + dropped)
        share = found["rollout/tokens_per_second"] / limit
        wasted = found["rollout/wasted_tokens"] / max(1.0, found["rollout/response_tokens"])
        rows.append((kept, share))
        print(
            f"{record.step:5d} {kept:6.0%} {found['rollout/tokens_per_second']:9,.0f} {share:8.0%} "
            f"{found['rollout/seconds']:9.1f} {found.get('time/step', float('nan')):7.1f} {wasted:7.0%}"
        )
    inside = [share for kept, share in rows if 0.4 <= kept <= 0.8]
    for name, shares in (("all steps", [share for _, share in rows]), ("yield 40 to 80 %", inside)):
        if shares:
            print(f"{name}: {len(shares)} steps, median {statistics.median(shares):.0%}, least {min(shares):.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="settings")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measurement after the warm-up")
    parser.add_argument("--lengths", type=float, nargs=2, metavar=("MEAN", "SIGMA"))
    parser.add_argument("--compare", type=Path, metavar="RUN_DIR")
    parser.add_argument("--limit", type=float, help="tokens/s measured before; only --compare is done")
    parser.add_argument("--speculation", action="store_true", help="tokens/s without and with NGRAM speculation")
    args = parser.parse_args()
    config = load_config(args.config, args.settings)
    lengths = log_normal(*args.lengths) if args.lengths else None
    if args.speculation:
        compare_speculation(args, lengths)
        return 0
    limit = args.limit or asyncio.run(engine_speed(config, args.seconds, lengths))[0]
    if args.compare:
        compare(args.compare, limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
