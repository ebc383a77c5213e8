"""Signals from Slurm may come at any moment and to any process of a job: the run ends saved and starts again."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from long_lists import some
from mini_slurm import signals
from waiting import wait_for

from megatron_dapo.config import parse_config
from megatron_dapo.config.data import RewardConfig
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.sglang.server_process import ServerProcess
from megatron_dapo.launch.slurm_script import Job, render
from megatron_dapo.processes.supervised import members
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.trainer.signals import StopSignal, end_at_once
from megatron_dapo.types import FinishReason, Prompt, Sample, as_logprobs, as_tokens

SENT = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
USER = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("number", some(SENT, signal.SIGUSR1))  # all have a handler, which the test waits for
def test_a_run_that_still_imports_ends_at_once(number, tmp_path):
    """Before torch is there, so for all but the first moments of a start."""
    os.mkfifo(tmp_path / "run.yaml")  # reading it blocks
    command = [sys.executable, "-m", "megatron_dapo.cli", "train", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: signals(process.pid, "SigCgt", *SENT), 30, "the handlers")
        wait_for(lambda: signals(process.pid, "SigIgn", signal.SIGUSR2), 30, "the handlers")
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 75
    assert f"asked to stop ({number.name}) while nothing had to be saved" in said


@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_is_respected(ignored):
    with restored_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        with end_at_once(), StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == (0 if ignored else signal.SIGHUP)


@contextlib.contextmanager
def restored_handlers():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


MODULES = ("argparse", "megatron_dapo.errors", "megatron_dapo.cli", "pydantic", "numpy")


@pytest.mark.parametrize("imported", some(MODULES, "argparse", "megatron_dapo.errors", "numpy"))
def test_ctrl_c_while_a_command_imports_ends_in_one_line(imported):
    """Python prints the modules as they are imported. Python's own start, before any module of ours, is its own."""
    simulate = ["-m", "megatron_dapo", "simulate", "examples/qwen2.5_32b_dapo/dapo.yaml"]
    command = [sys.executable, "-X", "importtime", *simulate]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr:
        if not line.startswith("import time:"):
            said.append(line.strip())
        elif line.split("|")[-1].strip() == imported:
            process.send_signal(signal.SIGINT)
    assert list(filter(None, said)) == ["megatron-dapo: interrupted"]
    # After an exception inside of exec() Python ends itself with the signal; a shell shows 130 for both.
    assert process.wait(10) in (130, -signal.SIGINT)


def test_the_installed_command_is_that_module():
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"megatron-dapo": "megatron_dapo.__main__:main"}


def grading_processes():
    """The supervisor and the grading process below this one, once neither ends by the signals."""
    found = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        grading = [process for process in found if "megatron_dapo.reward.worker" in process.cmdline()]
        handled = zip(grading, ("SigIgn", "SigCgt"), strict=True)
        if grading and all(signals(process.pid, how, *SENT[:2]) for process, how in handled):
            return grading
    return []


async def test_graders_leave_signals_to_the_trainer():
    """Slurm signals every process of a step: grading goes on, and no process is replaced."""
    sample = Sample("p", 0, as_tokens([1]), as_tokens([]), as_logprobs([]), FinishReason.STOP, text="2")
    prompt = Prompt("p", "1+1", as_tokens([1]), "2")
    async with RewardPool(RewardConfig(grader="python:slow_grader.right", workers=1)) as pool:
        grading = asyncio.ensure_future(pool.grade(prompt, sample))
        while not (found := grading_processes()):
            await asyncio.sleep(0.1)
        for process in found:
            for number in (*SENT[:2], signal.SIGUSR2):  # SIGHUP reaches only the session of a terminal
                process.send_signal(number)
        assert (await grading).correct
        counted = pool.metrics()
    assert (counted["reward/retries"], counted["reward/restarts"]) == (0, 0)


def test_servers_that_the_trainer_starts_do_too(tmp_path):
    server = ServerProcess("", ServerConfig(), 0, tmp_path, make_command=lambda *_: (["sleep", "30"], {}))
    with ThreadPoolExecutor(1) as fleet:  # it lives in a thread of its own, and its children end with it
        fleet.submit(server.spawn).result()
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # blocked at first, then ignored
            os.killpg(server.pid, number)
        wait_for(lambda: len(members(server.pid)) == 2, 20, "the server and its supervisor")
        wait_for(lambda: all(signals(pid, "SigIgn", *USER) for pid in members(server.pid)), 20, "the signals")
        assert server.alive()
        asyncio.run(server.end())


COMMANDS = {
    "scontrol": '[ "$1" = show ] && echo n1 || { echo "$@" >> asked; kill -TERM $PPID; }',
    "srun": "exec %s trainer.py" % sys.executable,  # noqa: UP031
    "sinfo": "true",
}
TRAINER = """\
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
open("trainer-ready", "w")
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["setup", "trainer-ready"])
def test_the_script_passes_a_signal_on_whenever_it_comes(moment, tmp_path):
    """Slurm's commands are stand-ins here: a signal while the surroundings are set up, and while the trainer runs."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "trainer.py").write_text(TRAINER)
    config = parse_config(
        {
            "rollout": {"engine": "embedded"},
            "slurm": {"gpus_per_node": 0, "setup": ["touch setup; sleep 1; : $NOT_SET"]},
        }
    )
    (tmp_path / "job.sbatch").write_text(render(Job(config, tmp_path / "run", tmp_path)))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    script = subprocess.Popen(
        ["bash", "job.sbatch"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for((tmp_path / moment).exists, 20, moment)
        script.send_signal(signal.SIGUSR1)
        said, _ = script.communicate(timeout=30)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
    assert "passing USR1 on to the trainer" in said and "queueing the job again, restart 1 of 20" in said
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert not (tmp_path / "run/logs/crashes").exists()
