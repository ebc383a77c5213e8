"""User graders that misbehave, loaded by the grading processes of test_pool.py and test_descendants.py."""

import asyncio
import json
import mmap
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from megatron_dapo.types import Grade


def by_response(prompt, response):
    """Does what the response says."""
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
        raise ValueError("what a strange response")
    if response.startswith("json "):
        return json.loads(response.removeprefix("json "))
    if response == "numpy":
        return Grade(np.True_, np.float32(0.5))
    if response == "shrug":
        return Grade(None, 0.0, None, "cannot say")
    return response == prompt.answer


def start_programs(prompt, response):
    """Starts programs that never end, lists their pids in the file `response`, then does what the answer says."""
    shell = "setsid sleep 1000 & echo $!; (sleep 1000 & echo $!)"  # orphans: their parent, the shell, ends at once
    subprocess.run(["sh", "-c", f"({shell}) > {response}.orphans"], check=True, timeout=10)
    programs = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sleep", "1000"], start_new_session=True),
        subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 1000; sleep 1000"], start_new_session=True),
    ]
    forked = os.fork()  # has a copy of the socket to the parent
    if forked == 0:
        os.setsid()
        time.sleep(1000)
    pids = [*Path(f"{response}.orphans").read_text().split(), *(program.pid for program in programs), forked]
    Path(f"{response}.part").write_text(" ".join(map(str, pids)))
    Path(f"{response}.part").rename(response)
    return by_response(prompt, prompt.answer)


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


def always_raises(prompt, response):
    raise ZeroDivisionError("on every response")


def show_environment(prompt, response):
    """Also that of a program which the grader starts, as one that runs the response's code would."""
    child = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, text=True, check=True).stdout
    return Grade(True, 1.0, " ".join([Path("/proc/self/environ").read_text(), child, str(os.environ)]))
