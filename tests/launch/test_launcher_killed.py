"""A local launcher that is killed takes its ranks, servers and graders with it."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import psutil
from tiny_run import environment, raw_config, write_config
from waiting import wait_for

FAKE_SERVER = Path(__file__).resolve().parents[1] / "support" / "fake_server.py"
# In the place of the Python that has SGLang: finds the port among SGLang's arguments.
SERVER = f"""\
#!/bin/bash
while [ "$1" != --port ]; do shift; done
exec {sys.executable} {FAKE_SERVER} "$2" 0.5
"""


def launch(arguments):
    from megatron_dapo.cli import main

    os.environ.update(environment())
    os.setsid()
    sys.exit(main(arguments))


def kind(process, launcher):
    try:
        command = " ".join(process.cmdline())
        if process.ppid() == launcher:
            return "rank"
        return "server" if str(FAKE_SERVER) in command else "grader" if "reward.worker" in command else ""
    except psutil.Error:
        return ""


def test_nothing_outlives_a_killed_launcher(tmp_path):
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    raw = raw_config(tmp_path / "model", tmp_path / "run", trainer__ranks=2, reward__grader="python:slow_grader.right")
    raw["rollout"] |= {"engine": "sglang", "servers": {"python": str(python), "device": "cpu", "port": 33000}}
    raw["rollout"]["weights"] = {"directory": str(tmp_path / "weights")}
    config = write_config(raw, tmp_path / "run.yaml")
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(["train", str(config)],))
    launcher.start()
    tree = psutil.Process(launcher.pid)
    started: dict[int, psutil.Process] = {}

    def complete():
        assert launcher.is_alive(), "the run ended before it could be killed"
        started.update({process.pid: process for process in tree.children(recursive=True)})
        found = [kind(process, launcher.pid) for process in started.values()]
        return found.count("rank") >= 2 and "server" in found and "grader" in found

    try:
        wait_for(complete, 120, "two ranks, a server and a grader")
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.join()
        deadline = time.monotonic() + 10
        while (left := [p for p in started.values() if running(p)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, [(p.pid, p.cmdline()) for p in left]
    finally:
        for process in started.values():
            if running(process):
                process.kill()
        if launcher.is_alive():
            launcher.kill()
        launcher.join()


def running(process):
    """False for a zombie, too: its parent is this machine's init, which may not collect it."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
