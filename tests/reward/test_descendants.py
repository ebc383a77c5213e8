"""Programs that a grader starts end with the grading process, however it ends, even if they are detached."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_pool import HOSTILE, prompt, sample

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.reward.pool import RewardPool


def listed(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


def wait_until_gone(pids: list[int], seconds: float = 20) -> list[int]:
    """Those that still run when the time is up."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


async def start_and_grade(answer: str, file: Path, *, leave: bool = False) -> list[int]:
    """Grades one response with `start_programs` and returns the pids of the programs."""
    config = RewardConfig(grader=HOSTILE + "start_programs", workers=1, cpu_seconds=5, stuck_seconds=1.0, retries=0)
    async with RewardPool(config) as pool:
        call = asyncio.create_task(pool.grade(prompt(answer), sample(str(file))))
        while not file.exists():
            await asyncio.sleep(0.01)
        programs = listed(file)
        assert len(programs) == 6
        if leave:
            return programs
        if answer == "yes":
            assert (await call).correct
            assert all(psutil.pid_exists(program) for program in programs)  # a grader may keep a helper program
        else:
            assert (await call).ungraded
    return programs


@pytest.mark.parametrize("answer", ["yes", "die", "sleep", "leave"])
def test_programs_end_with_the_grading_process(answer, tmp_path):
    """yes: it is idle and closed. die: it crashes. sleep: it is killed as stuck. leave: it is busy and closed."""
    act, leave = ("sleep", True) if answer == "leave" else (answer, False)
    programs = asyncio.run(start_and_grade(act, tmp_path / "pids", leave=leave))
    assert len(programs) == 6 and not wait_until_gone(programs)


def test_programs_end_when_the_trainer_is_killed(tmp_path):
    script = (
        f"import sys, asyncio, pathlib; sys.path[:0] = [{str(Path(__file__).resolve().parent)!r}]\n"
        "from test_descendants import start_and_grade\n"
        f"asyncio.run(start_and_grade('spin', pathlib.Path({str(tmp_path / 'pids')!r})))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        while not (tmp_path / "pids").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        programs = listed(tmp_path / "pids")
        descendants = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        assert len(descendants) >= 2  # the supervisor and the grading process
        parent.kill()
    assert not wait_until_gone([*programs, *descendants])
