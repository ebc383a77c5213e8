"""User graders that misbehave, loaded by grading processes in test_pool.py."""

import asyncio
import mmap
import os
import time

import numpy as np

from megatron_dapo.types import Grade


def by_response(prompt, response):
    """Does what the response says, once it is asked to."""
    if response == "spin":
        while True:
            pass
    if response == "allocate slowly":
        hoard = []
        while True:
            hoard.append(bytearray(8 * 2**20))
            time.sleep(0.005)
    if response == "allocate at once":
        return np.zeros(2**29).size == 0  # 4 GiB, not touched: resident memory stays small, only the kernel can refuse
    if response == "map at once":
        return len(mmap.mmap(-1, 4 * 2**30)) == 0
    if response == "sleep":
        time.sleep(3600)
    if response == "die":
        os._exit(7)
    if response == "exit":
        raise SystemExit(3)
    if response == "raise":
        raise ValueError("what a strange answer")
    if response == "shrug":
        return Grade(None, 0.0, None, "cannot say")
    return response == prompt.answer


def die_once(prompt, response):
    """Crashes at the first try, and works at the second."""
    if not os.path.exists(response):
        open(response, "w").close()
        os._exit(7)
    return True


def report(prompt, response):
    """What a grading process has loaded, and what it was sent."""
    import sys

    heavy = sorted({"torch", "transformers", "megatron"} & set(sys.modules))
    return Grade(True, 1.0, ",".join(heavy), f"{prompt.tokens.tolist()} {prompt.meta} {response!r}")


in_flight = most_in_flight = 0


async def wait_a_little(prompt, response):
    global in_flight, most_in_flight
    if response == "sleep":
        await asyncio.sleep(3600)
    in_flight += 1
    most_in_flight = max(most_in_flight, in_flight)
    await asyncio.sleep(0.3)
    in_flight -= 1
    return Grade(True, 1.0, str(most_in_flight))
