"""Cost of a tool call in the sandbox, beside the same code in a plain, unconfined subprocess.

    python benchmarks/tools.py --calls 200     # half a minute on two cores

A call is `print(1 + 1)`, one after the other; medians. The sandbox forks from a worker that has started, so a call
should cost less than a new interpreter (ratio below 1), confined or not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time

from megatron_dapo.rollout.agents.tools.sandbox import Sandbox

CODE = "print(1 + 1)"


def plain(calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        found = subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
        assert found.stdout == "2\n"
    return seconds


async def sandboxed(calls: int) -> list[float]:
    sandbox = Sandbox(workers=1)
    try:
        await sandbox.run("python", CODE)  # starts the worker
        results = [await sandbox.run("python", CODE) for _ in range(calls)]
    finally:
        await sandbox.close()
    assert {(result.text, result.limit) for result in results} == {("2\n", "")}
    return [result.seconds for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    subprocesses, confined = plain(calls), asyncio.run(sandboxed(calls))
    for name, seconds in (("plain subprocess", subprocesses), ("sandbox", confined)):
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"{name:17} {middle * 1e3:6.1f} ms (quartiles {low * 1e3:.1f} to {high * 1e3:.1f})")
    ratio = statistics.median(confined) / statistics.median(subprocesses)
    print(f"sandbox / subprocess: {ratio:.2f}, limit 1 ({calls} calls, load average {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    main()
